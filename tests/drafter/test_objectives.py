"""Objectives and place weights against hand-worked numbers and float64 autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafter.objectives import (
    LossConfig,
    LossKind,
    place_weights,
    resolve_gamma,
    row_gradient,
    row_loss,
)
from draftsmith.errors import ConfigError

KINDS: tuple[LossKind, ...] = ("ce", "kl", "tv", "lk")


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_gamma_follows_the_paper_for_its_block_sizes(block_size: int, gamma: float) -> None:
    assert resolve_gamma(LossConfig(), block_size) == gamma


@pytest.mark.parametrize(("block_size", "gamma"), [(9, 4.5), (13, 6.0), (4, 2.0), (2, 1.0), (32, 7 + 16 / 3)])
def test_gamma_interpolates_and_continues_elsewhere(block_size: int, gamma: float) -> None:
    assert resolve_gamma(LossConfig(), block_size) == pytest.approx(gamma)


def test_a_given_gamma_wins() -> None:
    assert resolve_gamma(LossConfig(gamma=3.0), 16) == 3.0


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"gamma": 0.0}, "--gamma 0.0 is not above 0; leave it out"),
        ({"gamma": -1.0}, "--gamma -1.0"),
        ({"dpace_alpha": 1.5}, "--dpace-alpha 1.5 is not between 0 and 1"),
        ({"chunk_rows": 0}, "--chunk-rows 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        LossConfig(**options)


def test_only_cross_entropy_does_without_the_target() -> None:
    assert [LossConfig(loss=kind).distilled for kind in KINDS] == [False, True, True, True]


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_decay_weights_by_hand(block_size: int, gamma: float) -> None:
    supervised = torch.ones(1, block_size - 1, dtype=torch.bool)
    config = LossConfig(weights="decay")
    gamma_used = resolve_gamma(config, block_size)
    weights, total = place_weights(config, gamma_used, supervised, torch.zeros(1, block_size - 1))
    by_hand = [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]
    assert weights[0].tolist() == pytest.approx(by_hand)
    assert weights[0, 0] == 1.0
    assert float(total) == pytest.approx(sum(by_hand))


def test_decay_weights_of_a_block_of_eight_as_numbers() -> None:
    supervised = torch.tensor([[True, True, True, True, False, False, False]])
    weights, total = place_weights(LossConfig(weights="decay"), 4.0, supervised, torch.zeros(1, 7))
    assert weights[0].tolist() == pytest.approx([1, 0.778801, 0.606531, 0.472367, 0, 0, 0], abs=1e-6)
    assert float(total) == pytest.approx(2.857698, abs=1e-6)


def test_dpace_weights_by_hand() -> None:
    """q = .5, .2, .8 at places 1..3, alpha .5: s = .75, .6, .9; P = .75, .45, .405; w_k = the sum from k on."""
    supervised = torch.tensor([[True, True, True], [True, True, False], [False] * 3])
    q = torch.tensor([[0.5, 0.2, 0.8]] * 3)
    weights, total = place_weights(LossConfig(weights="dpace"), 4.0, supervised, -q.log())
    assert weights[0].tolist() == pytest.approx([1.605, 0.855, 0.405])
    assert weights[1].tolist() == pytest.approx([1.2, 0.45, 0])
    assert weights[2].tolist() == [0, 0, 0]
    assert float(total) == 5.0, "normalised by the number of labels, not by the weights"


def test_dpace_passes_over_a_place_without_a_label() -> None:
    """s = .75, 1, .9: what isn't asked can't be missed."""
    supervised, q = torch.tensor([[True, False, True]]), torch.tensor([[0.5, 0.2, 0.8]])
    weights, _ = place_weights(LossConfig(weights="dpace"), 4.0, supervised, -q.log())
    assert weights[0].tolist() == pytest.approx([1.425, 0, 0.675])


def test_dpace_with_alpha_one_counts_the_labels_from_a_place_on() -> None:
    supervised = torch.tensor([[True, True, True]])
    weights, _ = place_weights(LossConfig(dpace_alpha=1.0), 4.0, supervised, torch.full((1, 3), 3.0))
    assert weights[0].tolist() == [3, 2, 1]


def test_dpace_weights_carry_no_gradient() -> None:
    ce = torch.rand(2, 8, requires_grad=True)
    weights, _ = place_weights(LossConfig(), 4.0, torch.ones(2, 8, dtype=torch.bool), ce)
    assert not weights.requires_grad


def test_a_hopeless_place_never_turns_weights_into_nan() -> None:
    supervised = torch.tensor([[True, True, False]])
    for ce in (0.0, 1e4, float("inf")):
        weights, _ = place_weights(LossConfig(dpace_alpha=0.0), 4.0, supervised, torch.full((1, 3), ce))
        assert bool(torch.isfinite(weights).all())


def two_class(kind: LossKind) -> tuple[float, float]:
    """p = (.75, .25) against t = (.5, .5), label 1."""
    logits = torch.tensor([[0.75, 0.25]]).log()
    loss, ce = row_loss(kind, logits, torch.tensor([1]), torch.tensor([[0.5, 0.5]]).log())
    return float(loss), float(ce)


def test_kinds_by_hand_on_two_tokens() -> None:
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    tv = 1 - (0.5 + 0.25)
    lam = math.exp(-3 * 0.75)
    by_hand = {"ce": math.log(4), "kl": kl, "tv": tv, "lk": lam * kl + (1 - lam) * tv}
    for kind in KINDS:
        loss, ce = two_class(kind)
        assert loss == pytest.approx(by_hand[kind], rel=1e-5)
        assert ce == pytest.approx(math.log(4), rel=1e-5)


def random_rows(rows: int, vocab: int, closeness: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and teacher logits that differ by `closeness`."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float32) * 2
    teacher = logits + closeness * torch.randn(rows, vocab, generator=generator)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    return logits.to(dtype), labels, teacher.to(dtype)


def autograd_of_row_loss(kind: LossKind, logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    loss, _ = row_loss(kind, leaf, labels, teacher)
    return torch.autograd.grad(loss.sum(), leaf)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_out_gradient_is_autograd_of_the_loss(kind: LossKind) -> None:
    logits, labels, teacher = random_rows(12, 50, 1.0, torch.float64)
    by_autograd = autograd_of_row_loss(kind, logits, labels, teacher)
    torch.testing.assert_close(row_gradient(kind, logits, labels, teacher), by_autograd, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_C13_gradients_hold_where_drafter_and_target_nearly_agree(kind: LossKind) -> None:
    """32,768 tokens at an acceptance of about 0.97, where p - t cancels: a bf16 softmax is off by 7-31%."""
    logits, labels, teacher = random_rows(4, 32_768, 0.08, torch.float32)
    p, t = logits.double().softmax(-1), teacher.double().softmax(-1)
    acceptance = torch.minimum(p, t).sum(-1)
    assert 0.95 < float(acceptance.min()) <= float(acceptance.max()) < 0.985
    exact = row_gradient(kind, logits.double(), labels, teacher.double())
    ours = row_gradient(kind, logits, labels, teacher)
    assert ours.dtype == torch.float32
    assert float((ours - exact).norm() / exact.norm()) < 1e-4
    exact_loss = row_loss(kind, logits.double(), labels, teacher.double())[0]
    torch.testing.assert_close(row_loss(kind, logits, labels, teacher)[0].double(), exact_loss, rtol=1e-3, atol=0)


def test_the_mixing_factor_of_lk_is_held_constant() -> None:
    """Gradients through lam would be those of another objective."""
    logits, labels, teacher = random_rows(3, 20, 1.0, torch.float64)
    kl, tv = (autograd_of_row_loss(kind, logits, labels, teacher) for kind in ("kl", "tv"))
    lam = torch.exp(-3 * (1 - row_loss("tv", logits, labels, teacher)[0]))[:, None]
    torch.testing.assert_close(row_gradient("lk", logits, labels, teacher), lam * kl + (1 - lam) * tv)


@pytest.mark.parametrize("kind", ["kl", "tv", "lk"])
def test_a_distilled_kind_never_falls_back_to_cross_entropy(kind: LossKind) -> None:
    logits, labels, _ = random_rows(2, 5, 1.0, torch.float32)
    for function in (row_loss, row_gradient):
        with pytest.raises(AssertionError, match="target's logits"):
            function(kind, logits, labels, None)
