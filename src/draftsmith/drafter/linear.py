"""A linear layer whose weight gradient is added to an fp32 buffer by the product that makes it.

Autograd would write each gradient in bf16 and the step would then add it to the fp32 sum of its draws: two more passes
over a buffer as large as the weights, and a rounding. The product can add in fp32 as it writes (cuBLAS: C = A B + C),
which costs no time of its own (measured: docs/log.md, 2026-12-01, fourth session).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, library, nn
from torch.nn import functional as F


@library.custom_op("draftsmith::add_weight_gradient", mutates_args={"main_grad"})
def add_weight_gradient(main_grad: Tensor, gradient: Tensor, rows: Tensor, first: int) -> None:
    """Rows `first` to `first + n_out` of `main_grad` [out, in] fp32 += gradient [n, n_out] transposed x rows [n, in].

    The part is given by its place, since a compiled backward that changes a view of its input finds another place.
    """
    part = main_grad[first : first + gradient.shape[1]]
    if part.is_cuda and gradient.dtype != torch.float32:
        torch.addmm(part, gradient.t(), rows, out_dtype=torch.float32, out=part)
    else:
        part.addmm_(gradient.t().to(torch.float32), rows.to(torch.float32))


@add_weight_gradient.register_fake
def _(main_grad: Tensor, gradient: Tensor, rows: Tensor, first: int) -> None:
    """Nothing is made."""


class _Summed(torch.autograd.Function):
    """rows times weight; backward adds the weight's gradient to `main_grad` and gives autograd none."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, main_grad: Tensor, first: int) -> Tensor:
        ctx.first = first
        ctx.save_for_backward(rows, weight)
        ctx.main_grad = main_grad  # not saved: a saved tensor may not change, and this one is a sum in the making
        return F.linear(rows, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0]
        add_weight_gradient(ctx.main_grad, gradient, rows, ctx.first)
        return (gradient @ weight if ctx.needs_input_grad[0] else None), None, None, None


class Linear(nn.Linear):
    """Without bias. As torch's own, until `main_grad` is set.

    `main_grad`: fp32 of the weight's shape, a view of a flat buffer (train/parameters.py). Once set, backward adds the
    weight's gradient to it, and autograd sees None for the weight.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.main_grad: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Rows [n, in] to [n, out]."""
        if self.main_grad is None or not torch.is_grad_enabled():
            return F.linear(input, self.weight)
        return cast(Tensor, _Summed.apply(input, self.weight, self.main_grad, 0))

    def halves(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`forward(rows)` cut in two along its width [n, out / 2].

        In training it is two products: else backward would first write the two gradients into one tensor, which reads
        what both need twice.
        """
        if self.main_grad is None or not torch.is_grad_enabled():
            first, second = self(rows).chunk(2, dim=-1)  # by way of whatever stands in for `forward`
            return first, second
        middle = self.weight.shape[0] // 2
        first = cast(Tensor, _Summed.apply(rows, self.weight[:middle], self.main_grad, 0))
        return first, cast(Tensor, _Summed.apply(rows, self.weight[middle:], self.main_grad, middle))
