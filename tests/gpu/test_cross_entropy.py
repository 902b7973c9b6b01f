"""The cross-entropy kernels against the compiled-or-eager chunk that they stand in for, and against float64."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafter.loss import LossSpec, fused_chunk
from draftsmith.drafter.objectives import LossConfig, PlaceWeights
from draftsmith.records import FrozenEnds
from draftsmith.train.build import chunk_function
from tests.gpu.steps import DEVICE

pytestmark = pytest.mark.gpu

BLOCKS, SIZE, HIDDEN = 24, 8, 64


def given(vocab: int, *, bias: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[FrozenEnds, Tensor, Tensor, Tensor]:
    """Ends, hidden states, labels of which some are the argmax, and which places count."""
    generator = torch.Generator(DEVICE).manual_seed(vocab)
    made: dict[str, Any] = {"generator": generator, "device": DEVICE}
    head = (torch.randn(vocab, HIDDEN, **made) * 0.5).to(dtype)
    ends = FrozenEnds(embedding_VH=head, head_VH=head)
    if bias:
        ends = replace(ends, head_bias_V=torch.randn(vocab, **made).to(dtype))
    hidden = torch.randn(BLOCKS * (SIZE - 1), HIDDEN, **made).to(dtype)
    labels = torch.randint(0, vocab, (hidden.shape[0],), **made)
    best = torch.nn.functional.linear(hidden, head, ends.head_bias_V).argmax(-1)
    return ends, hidden, torch.where(labels % 2 == 0, best, labels), torch.rand(BLOCKS, SIZE - 1, **made) < 0.8


@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize(("vocab", "bias"), [(50, False), (2048, True), (2049, False), (151_936, True)])
def test_kernels_give_the_sums_and_the_gradient_of_the_plain_chunk(
    vocab: int, bias: bool, weights: PlaceWeights
) -> None:
    ends, hidden, labels, guessed = given(vocab, bias=bias)
    spec = LossSpec(config=LossConfig(weights=weights), gamma=4.0, block_size=SIZE)
    kernels = chunk_function(spec, ends, DEVICE)
    assert kernels is not fused_chunk
    sums, gradient = kernels(spec, ends, hidden, labels, guessed, None)
    expected, expected_gradient = fused_chunk(spec, ends, hidden, labels, guessed, None)
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)
    assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < 5e-3  # bf16, rounded once


def test_the_gradient_is_that_of_float64() -> None:
    ends, hidden, labels, guessed = given(5000, bias=False, dtype=torch.float32)
    spec = LossSpec(config=LossConfig(weights="decay"), gamma=4.0, block_size=SIZE)
    _, gradient = chunk_function(spec, ends, DEVICE)(spec, ends, hidden, labels, guessed, None)
    exact = hidden.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact @ ends.head_VH.double().T, labels, reduction="none")
    place = torch.arange(SIZE - 1, device=DEVICE, dtype=torch.float64)
    (torch.exp(-place / 4.0) * guessed * losses.view(BLOCKS, -1)).sum().backward()
    assert exact.grad is not None
    assert float((gradient - exact.grad).norm() / exact.grad.norm()) < 1e-3  # products may run in tf32


def test_the_first_of_several_largest_is_the_guess() -> None:
    """Rounded to bf16, the largest logits are often several; a label counts as right where argmax would choose it."""
    kernels = importlib.import_module("draftsmith.drafter.cross_entropy")
    logits = torch.zeros(6, 9000, device=DEVICE, dtype=torch.bfloat16)
    logits[:, 5000] = logits[:, 7] = logits[:, 8999] = 1.0
    labels = torch.tensor([7, 5000, 8999, 0, 7, 8], device=DEVICE)
    _, _, right = kernels.statistics(logits, labels)
    assert right.tolist() == [True, False, False, False, True, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_reaches_the_gradient(bad: float) -> None:
    kernels = importlib.import_module("draftsmith.drafter.cross_entropy")
    logits = torch.randn(2, 5000, device=DEVICE).bfloat16()
    logits[1, 4500] = bad
    labels = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    lse, ce, _ = kernels.statistics(logits, labels)
    gradient = kernels.gradient_(logits, labels, lse, torch.ones(2, device=DEVICE))
    assert bool(torch.isfinite(ce[0]))
    assert bool(torch.isfinite(gradient[0]).all())
    assert not bool(torch.isfinite(gradient[1]).all())


@pytest.mark.parametrize("extra", [{"logit_scale": 0.5}, {"soft_cap": 30.0}])
def test_heads_that_scale_or_cap_take_the_plain_chunk(extra: dict[str, float]) -> None:
    ends = replace(given(50, bias=False)[0], **extra)
    spec = LossSpec(config=LossConfig(), gamma=4.0, block_size=SIZE)
    assert chunk_function(spec, ends, DEVICE) is fused_chunk
