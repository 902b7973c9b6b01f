"""Weight gradients that the product itself adds, against autograd's."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.drafter.linear import Linear, add_weight_gradient
from draftsmith.drafter.recompute import recomputed

IN, OUT, ROWS = 12, 8, 20


def layer(dtype: torch.dtype = torch.float32) -> Linear:
    torch.manual_seed(0)
    made = Linear(IN, OUT).to(dtype)
    made.main_grad = torch.zeros(OUT, IN)
    return made


def rows(seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def used_twice(one: Linear, x: Tensor, y: Tensor) -> Tensor:
    """A weight with two uses, the second by halves, as gate and up have it."""
    first, second = one.halves(y)
    return (one(x).sin() * torch.cat([first, second], 1).cos()).sum()


def test_the_sum_is_autograds_gradient_and_the_input_gets_its_own() -> None:
    one, plain = layer(), layer()
    plain.main_grad = None
    x, x2 = rows().requires_grad_(), rows().requires_grad_()
    expected = torch.autograd.grad(used_twice(plain, x2, rows(2)), (plain.weight, x2))
    found = torch.autograd.grad(used_twice(one, x, rows(2)), (one.weight, x), allow_unused=True)
    assert one.main_grad is not None
    assert found[0] is None, "autograd has nothing left to add"
    torch.testing.assert_close(one.main_grad, expected[0])
    torch.testing.assert_close(found[1], expected[1])


def test_gradients_of_several_draws_add_up() -> None:
    one = layer()
    for seed in (1, 2):
        torch.autograd.grad(one(rows(seed)).sum(), one.weight, allow_unused=True)
    expected = sum(rows(seed).sum(0).expand(OUT, IN) for seed in (1, 2))
    torch.testing.assert_close(one.main_grad, cast(Tensor, expected))


def test_bf16_gradients_are_summed_in_fp32() -> None:
    """1 + 2^-9 is 1 in bf16: a gradient rounded before it is added would lose the second draw."""
    main_grad, ones = torch.ones(2, 3), torch.ones(1, 2, dtype=torch.bfloat16)
    add_weight_gradient(main_grad, ones, torch.full((1, 3), 2.0**-9, dtype=torch.bfloat16), 0)
    assert (main_grad == 1 + 2**-9).all()


def test_only_the_named_rows_change() -> None:
    main_grad = torch.zeros(4, 3)
    add_weight_gradient(main_grad, torch.ones(5, 2), torch.ones(5, 3), 1)
    assert main_grad.tolist() == [[0.0] * 3, [5.0] * 3, [5.0] * 3, [0.0] * 3]


def test_without_a_sum_it_is_torchs_layer() -> None:
    one = Linear(IN, OUT)
    (gradient,) = torch.autograd.grad(one(rows()).square().sum(), one.weight)
    weight = one.weight.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.linear(rows(), weight).square().sum(), weight)
    assert torch.equal(gradient, expected)
    assert one.bias is None


def test_decoding_leaves_the_sum_alone() -> None:
    one = layer()
    with torch.no_grad():
        assert torch.equal(torch.cat(one.halves(rows()), 1), one(rows()))
    assert one.main_grad is not None
    assert (one.main_grad == 0).all()


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_compiled_and_recomputed_it_adds_the_same_once(again: bool, backend: str) -> None:
    torch._dynamo.reset()
    one, compiled = layer(), layer()

    def run(which: Linear, x: Tensor, y: Tensor) -> Tensor:
        return recomputed(used_twice, which, x, y) if again else used_twice(which, x, y)

    x, y = rows(), rows(2)
    torch.autograd.grad(run(one, x, y), one.weight, allow_unused=True)
    program = torch.compile(run, dynamic=False, fullgraph=True, backend=backend)
    for times in (1, 2):
        torch.autograd.grad(program(compiled, x, y), compiled.weight, allow_unused=True)
        assert one.main_grad is not None
        assert compiled.main_grad is not None
        torch.testing.assert_close(compiled.main_grad, times * one.main_grad)
