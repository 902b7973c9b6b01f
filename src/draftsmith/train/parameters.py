"""The drafter's weights as flat buffers: fp32 masters and gradients, and the shadow that computes.

bf16 masters leave RMSNorm weights at exactly 1.0 for ever (an update of 1e-3 is below half a bf16 step), so masters,
gradients and moments are fp32; `update` writes a bf16 shadow of the masters, and the drafter's parameters are views of
that shadow. In fp32 runs (CPU) masters and shadow are one buffer. Everything is allocated here, once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from draftsmith.drafter.linear import Linear

ALIGNMENT = 64
"""Elements; every parameter starts on a boundary that vector loads and matrix units like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """Where one named parameter lies in the flat buffers."""

    name: str
    offset: int
    shape: torch.Size

    def view(self, flat_N: Tensor) -> Tensor:
        return flat_N[self.offset : self.offset + self.shape.numel()].view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParameters:
    """Flat buffers of N elements and the module's parameters as views of `shadow_N`.

    Matrices lie first, so that `[:num_matrix]` is what weight decay applies to; frozen parameters lie last, behind
    `num_trained`, where no gradient and no moment reaches. Gaps of the alignment hold zeros.
    """

    slices: tuple[ParameterSlice, ...]
    num_matrix: int
    num_trained: int
    master_N: Tensor
    grad_N: Tensor
    """Of `num_trained` elements."""
    shadow_N: Tensor
    leaves: tuple[nn.Parameter, ...]
    """The module's trained parameters in the order of `slices`."""
    summed: frozenset[str]
    """Weights whose gradient the product of backward itself adds to `grad_N` (drafter/linear.py)."""

    @classmethod
    def install(
        cls, module: nn.Module, dtype: torch.dtype, device: torch.device | str, frozen: Collection[str] = ()
    ) -> FlatParameters:
        """Move `module`'s parameters into flat buffers on `device`, computing in `dtype`; the module keeps views.

        Those named in `frozen` are told to need no gradient and stay as they are.
        """
        named = sorted(module.named_parameters(), key=lambda item: (item[0] in frozen, item[1].ndim < 2))
        slices: list[ParameterSlice] = []
        offset, num_matrix, num_trained = 0, 0, 0
        for name, parameter in named:
            slices.append(ParameterSlice(name=name, offset=offset, shape=parameter.shape))
            offset += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            if name not in frozen:
                num_trained = offset
                num_matrix = offset if parameter.ndim >= 2 else num_matrix
        master_N = torch.zeros(offset, dtype=torch.float32, device=device)
        for piece, (_, parameter) in zip(slices, named, strict=True):
            piece.view(master_N).copy_(parameter.detach())
        shadow_N = master_N if dtype == torch.float32 else master_N.to(dtype)
        leaves: list[nn.Parameter] = []
        for piece, (name, parameter) in zip(slices, named, strict=True):
            parameter.data = piece.view(shadow_N)
            if name in frozen:
                parameter.requires_grad_(False)
            else:
                leaves.append(parameter)
        parts = cast(Iterator[tuple[str, nn.Module]], module.named_modules())
        layers = {name: part for name, part in parts if isinstance(part, Linear) and f"{name}.weight" not in frozen}
        flat = cls(
            slices=tuple(slices),
            num_matrix=num_matrix,
            num_trained=num_trained,
            master_N=master_N,
            grad_N=torch.zeros(num_trained, dtype=torch.float32, device=device),
            shadow_N=shadow_N,
            leaves=tuple(leaves),
            summed=frozenset(f"{name}.weight" for name in layers),
        )
        views = flat.named(flat.grad_N)
        for name, layer in layers.items():
            layer.main_grad = views[f"{name}.weight"]
        return flat

    def add_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Accumulate one draw's gradients (order of `leaves`, compute dtype) in fp32; None where backward did it.

        Raises:
            RuntimeError: a parameter has no gradient that nothing has added: it isn't part of the forward.
        """
        for piece, gradient in zip(self.slices[: len(self.leaves)], gradients, strict=True):
            if gradient is not None:
                piece.view(self.grad_N).add_(gradient)
            elif piece.name not in self.summed:
                raise RuntimeError(f"{piece.name} got no gradient: the forward doesn't use it")

    def publish(self) -> None:
        """Write the shadow that computes from the masters (a no-op where they are one)."""
        if self.shadow_N is not self.master_N:
            self.shadow_N.copy_(self.master_N)

    def named(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Views of a flat buffer (masters, gradients, a moment) by parameter name; of gradients the trained ones."""
        return {piece.name: piece.view(flat_N) for piece in self.slices if piece.offset < flat_N.numel()}
