"""Both ways to compute the frozen head's loss against one dense float64 computation."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from draftsmith.drafter.loss import LossSpec, LossSums, chunked_loss, head_logits
from draftsmith.drafter.model import guesses
from draftsmith.drafter.objectives import LossConfig, LossKind, PlaceWeights
from draftsmith.records import FrozenEnds

A, B, H, V = 10, 4, 16, 60
KINDS: tuple[LossKind, ...] = ("ce", "kl", "tv", "lk")
WEIGHTS: tuple[PlaceWeights, ...] = ("decay", "dpace")
METHODS: tuple[Literal["fused", "recompute"], ...] = ("fused", "recompute")
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"head_bias_V": torch.linspace(-1, 1, V)},
    "scale": {"logit_scale": 0.25},
    "cap": {"soft_cap": 3.0},
    "all": {"head_bias_V": torch.linspace(-1, 1, V), "logit_scale": 1.5, "soft_cap": 2.0},
}


@dataclass(frozen=True, slots=True)
class Inputs:
    hidden_QH: Tensor
    labels_Q: Tensor
    supervised_AB: Tensor
    teacher_QH: Tensor


def inputs() -> Inputs:
    generator = torch.Generator().manual_seed(0)
    supervised = torch.rand(A, B, generator=generator) < 0.8
    supervised = supervised.int().cumprod(1).bool()
    supervised[:, 0] = False
    return Inputs(
        hidden_QH=torch.randn(A * B, H, generator=generator),
        labels_Q=torch.randint(0, V, (A * B,), generator=generator),
        supervised_AB=supervised,
        teacher_QH=torch.randn(A * B, H, generator=generator),
    )


def ends(**extra: Any) -> FrozenEnds:
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(1)) * 0.5
    return FrozenEnds(embedding_VH=weight, head_VH=weight, **extra)


def spec(kind: LossKind, weights: PlaceWeights, method: Literal["fused", "recompute"], rows: int = 12) -> LossSpec:
    config = LossConfig(loss=kind, weights=weights, loss_method=method, chunk_rows=rows)
    return LossSpec(config=config, gamma=3.0, block_size=B)


def dense(kind: LossKind, weights: PlaceWeights, given: Inputs, head: FrozenEnds) -> tuple[Tensor, Tensor, Tensor]:
    """Numerator, denominator and gradient in float64 by autograd, from the formulae, block by block."""
    hidden = given.hidden_QH.double().requires_grad_()

    def log_probabilities(x: Tensor) -> Tensor:
        bias = 0.0 if head.head_bias_V is None else head.head_bias_V.double()
        logits = head.logit_scale * (x @ head.head_VH.double().T + bias)
        if head.soft_cap is not None:
            logits = head.soft_cap * torch.tanh(logits / head.soft_cap)
        return logits.log_softmax(-1)

    log_p, log_t = log_probabilities(hidden), log_probabilities(given.teacher_QH.double())
    numerator = torch.zeros((), dtype=torch.float64)
    denominator = torch.zeros((), dtype=torch.float64)
    for block in range(A):
        places = [k for k in range(B) if given.supervised_AB[block, k]]
        ce = {k: -log_p[block * B + k, given.labels_Q[block * B + k]] for k in places}
        confidence = {k: 0.5 + 0.5 * float((-ce[k]).exp().detach()) for k in places}
        for k in places:
            t, p = log_t[block * B + k].exp(), log_p[block * B + k].exp()
            kl = (t * (log_t[block * B + k] - log_p[block * B + k])).sum()
            tv = 0.5 * (p - t).abs().sum()
            lam = torch.exp(-3 * (1 - tv)).detach()
            loss = {"ce": ce[k], "kl": kl, "tv": tv, "lk": lam * kl + (1 - lam) * tv}[kind]
            if weights == "decay":
                weight = float(torch.exp(torch.tensor(-(k - 1) / 3.0, dtype=torch.float64)))
                denominator += weight
            else:
                survival = itertools.accumulate((confidence[m] for m in places), lambda a, b: a * b)
                weight = sum(value for m, value in zip(places, survival, strict=True) if m >= k)
                denominator += 1
            numerator = numerator + weight * loss
    return numerator.detach(), denominator, torch.autograd.grad(numerator, hidden)[0]


def chunked(
    how: LossSpec,
    head: FrozenEnds,
    hidden_QH: Tensor,
    labels_Q: Tensor,
    supervised_AB: Tensor,
    teacher_QH: Tensor | None,
) -> LossSums:
    """The loss of whole blocks: place 0, which is known, is cut off as the step does."""
    hidden_GH, labels_G = guesses(hidden_QH, how.block_size), guesses(labels_Q, how.block_size)
    teacher_GH = None if teacher_QH is None else guesses(teacher_QH, how.block_size)
    return chunked_loss(how, head, hidden_GH, labels_G, supervised_AB[:, 1:], teacher_GH)


def run(how: LossSpec, given: Inputs, head: FrozenEnds) -> tuple[LossSums, Tensor]:
    hidden = given.hidden_QH.clone().requires_grad_()
    teacher = given.teacher_QH if how.config.distilled else None
    sums = chunked(how, head, hidden, given.labels_Q, given.supervised_AB, teacher)
    return sums, torch.autograd.grad(sums.numerator, hidden)[0]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_dense_loss_and_gradient_in_float64(
    kind: LossKind, weights: PlaceWeights, method: Literal["fused", "recompute"], head: str
) -> None:
    given, extra = inputs(), ends(**HEADS[head])
    numerator, denominator, gradient = dense(kind, weights, given, extra)
    sums, ours = run(spec(kind, weights, method), given, extra)
    torch.testing.assert_close(sums.numerator.double(), numerator, rtol=2e-5, atol=0)
    torch.testing.assert_close(sums.denominator.double(), denominator, rtol=1e-6, atol=0)
    assert float((ours - gradient).abs().max()) < 1e-5 * float(gradient.abs().max())


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_C14_every_path_and_block_size_shares_one_normaliser(weights: PlaceWeights, block_size: int) -> None:
    """A head that knows nothing costs exactly ln V, times D-PACE's weights: the known place 0 is in no denominator."""
    num_blocks = 160 // block_size
    supervised_AB = torch.ones(num_blocks, block_size, dtype=torch.bool)
    supervised_AB[:, 0] = False
    labels_Q = torch.arange(160) % V
    head = FrozenEnds(embedding_VH=torch.zeros(V, H), head_VH=torch.zeros(V, H))
    found: list[Tensor] = []
    gradients: list[Tensor] = []
    for method in METHODS:
        config = LossConfig(weights=weights, loss_method=method, chunk_rows=32)
        how = LossSpec(config=config, gamma=3.0, block_size=block_size)
        sums = chunked(how, head, torch.zeros(160, H), labels_Q, supervised_AB, None)
        found.append(sums.numerator / sums.denominator)
        hidden = torch.randn(160, H, generator=torch.Generator().manual_seed(2)).requires_grad_()
        sums = chunked(how, ends(), hidden, labels_Q, supervised_AB, None)
        gradients.append(torch.autograd.grad(sums.numerator / sums.denominator, hidden)[0])
    expected = math.log(V)
    if weights == "dpace":
        confidence = 0.5 + 0.5 / V
        places = range(1, block_size)
        expected *= sum(confidence**m for k in places for m in range(k, block_size)) / len(places)
    torch.testing.assert_close(torch.stack(found), torch.full((2,), expected))
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [1, 4, 7, 12, 40, 2048])
def test_the_size_of_chunks_changes_nothing(method: Literal["fused", "recompute"], rows: int) -> None:
    given = inputs()
    sums, gradient = run(spec("kl", "dpace", method, rows), given, ends())
    whole, whole_gradient = run(spec("kl", "dpace", method, 2048), given, ends())
    torch.testing.assert_close(sums.vector, whole.vector)
    torch.testing.assert_close(gradient, whole_gradient)


@pytest.mark.parametrize(("rows", "block_size", "expected"), [(2048, 16, 128), (2048, 10, 204), (5, 8, 1), (1, 8, 1)])
def test_chunks_hold_whole_blocks(rows: int, block_size: int, expected: int) -> None:
    config = LossConfig(chunk_rows=rows)
    assert LossSpec(config=config, gamma=4.0, block_size=block_size).chunk_blocks == expected


def test_statistics_by_hand() -> None:
    """Three blocks of 4; the head is the identity, so that the largest entry of a hidden state is the guess."""
    eye = torch.eye(5)
    head = FrozenEnds(embedding_VH=eye, head_VH=eye)
    guessed = [[9, 1, 2, 3], [9, 1, 4, 3], [9, 0, 2, 3]]
    hidden = torch.stack([eye[guess % 5] * 4 for block in guessed for guess in block])
    labels = torch.tensor([0, 1, 2, 3] * 3)
    supervised = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 1]]).bool()
    how = LossSpec(config=LossConfig(weights="decay"), gamma=4.0, block_size=4)
    vector = chunked(how, head, hidden, labels, supervised, None).vector
    assert vector.numel() == LossSums.num_sums(4) == 16
    ce_right = -float(torch.tensor([4.0, 0, 0, 0, 0]).log_softmax(0)[0])
    assert float(vector[2]) == pytest.approx(6 * ce_right + 2 * (ce_right + 4), rel=1e-5)
    assert float(vector[3]) == 8
    assert vector[4:8].tolist() == [0, 3, 3, 2], "labels per place"
    assert vector[8:12].tolist() == [0, 2, 2, 2], "right guesses per place"
    assert vector[12:16].tolist() == [0, 2, 1, 0], "right with every earlier place right"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_C10_no_label_at_all_gives_zero_attached_to_the_graph(
    kind: LossKind, method: Literal["fused", "recompute"]
) -> None:
    given = replace(inputs(), supervised_AB=torch.zeros(A, B, dtype=torch.bool))
    sums, gradient = run(spec(kind, "dpace", method), given, ends())
    assert (sums.vector == 0).all()
    assert (gradient == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_rows_without_a_label_get_a_gradient_of_exactly_zero(method: Literal["fused", "recompute"]) -> None:
    given = inputs()
    _, gradient = run(spec("lk", "dpace", method), given, ends())
    assert (gradient[~given.supervised_AB.reshape(-1)] == 0).all()
    assert (gradient[given.supervised_AB.reshape(-1)] != 0).any(1).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_scaled_loss_has_a_scaled_gradient(method: Literal["fused", "recompute"]) -> None:
    given = inputs()
    _, gradient = run(spec("ce", "decay", method), given, ends())
    hidden = given.hidden_QH.clone().requires_grad_()
    sums = chunked(spec("ce", "decay", method), ends(), hidden, given.labels_Q, given.supervised_AB, None)
    (thrice,) = torch.autograd.grad(3 * sums.numerator, hidden)
    torch.testing.assert_close(thrice, 3 * gradient)


def test_C12_no_gradient_reaches_the_teacher_or_the_head() -> None:
    given, extra = inputs(), ends()
    teacher = given.teacher_QH.clone().requires_grad_()
    hidden = given.hidden_QH.clone().requires_grad_()
    sums = chunked(spec("kl", "decay", "fused"), extra, hidden, given.labels_Q, given.supervised_AB, teacher)
    assert torch.autograd.grad(sums.numerator, teacher, allow_unused=True) == (None,)
    assert not extra.head_VH.requires_grad


def test_logits_are_fp32_whatever_computes_them() -> None:
    half = ends()
    half = replace(half, head_VH=half.head_VH.bfloat16())
    assert head_logits(torch.zeros(2, H, dtype=torch.bfloat16), half).dtype == torch.float32


@pytest.mark.parametrize("method", METHODS)
def test_bf16_stays_close_to_float64(method: Literal["fused", "recompute"]) -> None:
    given, exact_ends = inputs(), ends()
    rounded = replace(
        given, hidden_QH=given.hidden_QH.bfloat16().float(), teacher_QH=given.teacher_QH.bfloat16().float()
    )
    half = replace(exact_ends, head_VH=exact_ends.head_VH.bfloat16())
    numerator, _, gradient = dense("kl", "decay", rounded, replace(half, head_VH=half.head_VH.float()))
    low = replace(rounded, hidden_QH=rounded.hidden_QH.bfloat16(), teacher_QH=rounded.teacher_QH.bfloat16())
    sums, ours = run(spec("kl", "decay", method), low, half)
    torch.testing.assert_close(sums.numerator.double(), numerator, rtol=2e-2, atol=0)
    assert float((ours.double() - gradient).norm() / gradient.norm()) < 2e-2
