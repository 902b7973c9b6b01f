"""Checkpointing: the same numbers, made twice."""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.drafter.recompute import recomputed


def test_gives_the_same_output_and_gradient_by_running_twice() -> None:
    calls: list[int] = []

    def cube(x: Tensor, scale: float) -> Tensor:
        calls.append(1)
        return x * x * x * scale

    x = torch.randn(5, requires_grad=True)
    plain = torch.autograd.grad(cube(x, 2.0).sum(), x)[0]
    calls.clear()
    y = recomputed(cube, x, 2.0)
    assert len(calls) == 1
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain)
    assert len(calls) == 2


def test_is_not_reentrant() -> None:
    """The reentrant kind runs forward without a graph and traces a second time."""
    x = torch.randn(5, requires_grad=True)
    inner: list[bool] = []

    def square(x: Tensor) -> Tensor:
        y = x * x
        inner.append(y.requires_grad)
        return y

    recomputed(square, x)
    assert inner == [True]
