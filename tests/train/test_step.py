"""The step on one fixed shape: exact against the exact-size step, blind to padding, the same on any buffer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafter.anchors import make_blocks, select_anchors
from draftsmith.drafter.layout import document_layout
from draftsmith.drafter.model import FULL, SLIDING
from draftsmith.drafter.objectives import LossConfig, LossKind
from draftsmith.errors import ConfigError
from draftsmith.records import FeatureBatch
from draftsmith.train.noise import noisy
from draftsmith.train.optim import OptimConfig
from draftsmith.train.step import StepConfig, accumulate, update
from tests.train.tiny import (
    LENGTHS,
    Tiny,
    no_totals,
    one_document,
    one_draw,
    relative,
    tiny_batch,
    tiny_shape,
    train,
    uniforms,
    with_layers,
)

KINDS: tuple[LossKind, ...] = ("ce", "kl", "tv", "lk")
TOTAL = sum(LENGTHS)


def padded_uniforms(short_T: Tensor, num_tokens: int) -> Tensor:
    """The same uniforms on a larger budget; padding gets the largest ones, which must not matter."""
    return torch.cat([short_T, torch.full((num_tokens - short_T.numel(),), 0.999999, dtype=torch.float64)])


def poisoned(batch: FeatureBatch) -> FeatureBatch:
    """Free buffers of the same shape: NaN in every float, absurd values in every other place."""
    buffers = FeatureBatch.allocate(batch.shape, "cpu")
    for tensor in buffers.tensors().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else True if tensor.dtype == torch.bool else 10**9)
    return buffers


@pytest.mark.parametrize("loss", [LossConfig(chunk_rows=64), LossConfig(loss="lk", weights="decay", chunk_rows=64)])
def test_padded_gradients_equal_unpadded_ones(loss: LossConfig) -> None:
    exact = tiny_batch(shape=tiny_shape(TOTAL))
    padded = tiny_batch(shape=tiny_shape(1024))
    u = uniforms(exact)
    small = one_draw(Tiny(loss=loss).build(), exact, u)
    large = one_draw(Tiny(loss=loss).build(), padded, padded_uniforms(u, 1024))
    assert float(small.sums[3]) > 50
    assert relative(large.grad_N, small.grad_N) < 1e-5
    assert relative(large.sums, small.sums) < 1e-6


@pytest.mark.parametrize("kinds", [(FULL, FULL), (SLIDING, SLIDING)])
def test_gradients_on_padding_rows_are_exactly_zero(kinds: tuple[str, ...]) -> None:
    state, batch = Tiny(config=with_layers(*kinds)).build(), tiny_batch()
    caught: list[Tensor] = []

    def watch(_module: Any, _inputs: Any, output: Tensor) -> None:
        output.register_hook(caught.append)

    state.drafter.fc.register_forward_hook(watch)
    one_draw(state, batch)
    (context_gradient_TH,) = caught
    features_gradient_TFH = context_gradient_TH @ state.drafter.fc.weight
    assert (features_gradient_TFH[TOTAL:] == 0).all()
    seen = (features_gradient_TFH[:TOTAL] != 0).any(1).sum()
    assert seen > 20


def test_finite_garbage_on_padding_changes_no_bit() -> None:
    """Padding rows are zero by contract; anything finite there is invisible all the same."""
    loss = LossConfig(loss="kl", chunk_rows=64)
    clean = tiny_batch()
    dirty = tiny_batch()
    assert dirty.last_hidden_TH is not None
    dirty.features_TFH[TOTAL:] = 1e4
    dirty.last_hidden_TH[TOTAL:] = -1e4
    dirty.token_ids_T[TOTAL:] = 17
    dirty.loss_mask_T[TOTAL:] = True
    a, b = one_draw(Tiny(loss=loss).build(), clean), one_draw(Tiny(loss=loss).build(), dirty)
    assert torch.equal(a.grad_N, b.grad_N)
    assert torch.equal(a.sums, b.sums)


def test_a_short_batch_after_a_long_one_equals_a_fresh_buffer() -> None:
    state = Tiny(loss=LossConfig(loss="kl", chunk_rows=64)).build()
    buffers = FeatureBatch.allocate(tiny_shape(), "cpu")
    buffers.copy_(tiny_batch((300, 200), seed=1))
    one_draw(state, buffers)
    short = tiny_batch((20, 30), seed=2)
    buffers.copy_(short)
    reused, fresh = one_draw(state, buffers), one_draw(state, short)
    assert torch.equal(reused.grad_N, fresh.grad_N)
    assert torch.equal(reused.sums, fresh.sums)


def test_C22_poisoned_free_buffers_never_reach_loss_or_gradients() -> None:
    batch = tiny_batch()
    buffers = poisoned(batch)
    buffers.copy_(batch)
    for name, tensor in buffers.tensors().items():
        assert torch.equal(tensor, batch.tensors()[name]), f"{name} was not overwritten everywhere"
    state = Tiny(loss=LossConfig(loss="kl", chunk_rows=64)).build()
    a, b = one_draw(state, buffers), one_draw(state, batch)
    assert torch.equal(a.grad_N, b.grad_N)
    assert bool(torch.isfinite(a.grad_N).all())


def check_nothing_to_learn(batch: FeatureBatch, kind: LossKind) -> None:
    state = Tiny(loss=LossConfig(loss=kind, chunk_rows=64), optim=OptimConfig(weight_decay=0.1)).build()
    trained = tiny_batch()
    accumulate(state, trained, uniforms(trained))
    update(state, no_totals(state))
    before = {name: value.clone() for name, value in state.optimizer.tensors().items()}
    weights, shadow = state.parameters.master_N.clone(), state.parameters.shadow_N.clone()

    draw = one_draw(state, batch)
    assert (draw.sums == 0).all()
    assert (draw.grad_N == 0).all()
    update(state, no_totals(state))
    assert torch.equal(state.parameters.master_N, weights)
    assert torch.equal(state.parameters.shadow_N, shadow)
    after = state.optimizer.tensors()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"step", "empty"}
    assert int(state.optimizer.empty) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_C10_no_eligible_token_is_a_finite_zero_and_moves_nothing(kind: LossKind) -> None:
    check_nothing_to_learn(tiny_batch(supervised=0.0), kind)


@pytest.mark.parametrize("lengths", [(), (1,), (1, 1, 1)], ids=["empty", "one token", "one-token documents"])
def test_batches_too_small_to_learn_from_move_nothing(lengths: tuple[int, ...]) -> None:
    check_nothing_to_learn(tiny_batch(lengths, supervised=1.0), "kl")


def test_two_tokens_are_one_label() -> None:
    draw = one_draw(Tiny().build(), tiny_batch((2,), supervised=1.0))
    assert float(draw.sums[3]) == 1
    assert bool(torch.isfinite(draw.grad_N).all())
    assert (draw.grad_N != 0).any()


def test_an_exactly_full_batch_with_fewer_eligible_tokens_than_anchors() -> None:
    """Unfilled places don't fall on the last token, and blocks that run past T weigh nothing there."""
    batch = tiny_batch((250, 262), supervised=0.0)
    batch.loss_mask_T[508:] = True
    draw = one_draw(Tiny().build(), batch)
    # Anchors 508, 509, 510 with labels 509..511, 510..511, 511.
    assert float(draw.sums[3]) == 6
    B = 8
    assert draw.sums[4 : 4 + B].tolist() == [0, 3, 2, 1, 0, 0, 0, 0]
    assert bool(torch.isfinite(draw.grad_N).all())


def test_a_full_batch_equals_the_same_documents_with_padding() -> None:
    full = tiny_batch((250, 262))
    padded = tiny_batch((250, 262), tiny_shape(640))
    u = uniforms(full)
    a = one_draw(Tiny().build(), full, u)
    b = one_draw(Tiny().build(), padded, padded_uniforms(u, 640))
    assert relative(b.grad_N, a.grad_N) < 1e-5


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_a_document_alone_gives_its_share_of_the_packed_batch(kind: LossKind) -> None:
    """Every eligible token is an anchor, so that the share doesn't depend on the draw."""
    tiny = Tiny(loss=LossConfig(loss=kind, chunk_rows=64), step=StepConfig(num_anchors=160, attention="dense"))
    lengths = (50, 20, 1, 70)
    batch = tiny_batch(lengths, tiny_shape(160))
    packed = one_draw(tiny.build(), batch)
    grad_N, sums = torch.zeros_like(packed.grad_N), torch.zeros_like(packed.sums)
    for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        alone = one_draw(tiny.build(), one_document(batch, start, length))
        grad_N += alone.grad_N
        sums += alone.sums
    assert float(packed.sums[3]) > 400
    assert relative(sums, packed.sums) < 1e-5
    assert relative(grad_N, packed.grad_N) < 1e-5


def test_draws_and_batches_add_up_and_divide_once_by_the_global_sum() -> None:
    """C14, C15: a batch with few labels doesn't weigh more per label than one with many."""
    rich, poor = tiny_batch(seed=1), tiny_batch(seed=2, supervised=0.3)
    state = Tiny(optim=OptimConfig(clip=1e9)).build()
    parts = [
        one_draw(state, batch, uniforms(batch, number, draw))
        for batch, number, draw in ((rich, 0, 0), (rich, 0, 1), (poor, 1, 0))
    ]
    for batch, number, draw in ((rich, 0, 0), (rich, 0, 1), (poor, 1, 0)):
        accumulate(state, batch, uniforms(batch, number, draw))
    total_N = parts[0].grad_N + parts[1].grad_N + parts[2].grad_N
    denominator = sum(float(part.sums[1]) for part in parts)
    torch.testing.assert_close(state.parameters.grad_N, total_N, rtol=1e-5, atol=1e-6)
    assert float(state.sums[1]) == pytest.approx(denominator)
    totals = no_totals(state)
    update(state, totals)
    assert float(state.optimizer.grad_norm) == pytest.approx(float(total_N.norm()) / denominator, rel=1e-5)
    assert float(totals[1]) == pytest.approx(denominator)
    assert (state.sums == 0).all()
    assert (state.parameters.grad_N == 0).all()


def test_fresh_draws_of_one_batch_differ() -> None:
    state, batch = Tiny().build(), tiny_batch()
    a, b = (one_draw(state, batch, uniforms(batch, 0, draw)) for draw in (0, 1))
    assert not torch.equal(a.grad_N, b.grad_N)


def test_the_teacher_of_place_k_is_the_state_of_the_token_before_it() -> None:
    """With the teacher's own states at a + k - 1 as the drafter's output, the divergence is exactly 0."""
    state, batch = Tiny(loss=LossConfig(loss="kl", chunk_rows=64)).build(), tiny_batch()
    assert batch.last_hidden_TH is not None
    last_hidden_TH = batch.last_hidden_TH
    layout = document_layout(batch.lengths_D, batch.shape.num_tokens)
    anchors = select_anchors(batch.loss_mask_T, layout.document_ids_T, uniforms(batch), state.config.num_anchors)

    def loss_when_reading(offset: int) -> float:
        index_GH = (
            (anchors.index_A[:, None] + torch.arange(1, 8) + offset).clamp(0, batch.shape.num_tokens - 1).view(-1)
        )

        def forward(*_: Any) -> Tensor:
            touched = sum((leaf.sum() * 0 for leaf in state.parameters.leaves), torch.zeros(()))
            return last_hidden_TH[index_GH] + touched

        return float(one_draw(replace(state, forward=forward), batch).sums[0])

    assert loss_when_reading(-1) == pytest.approx(0, abs=1e-3)
    assert loss_when_reading(0) > 10
    assert loss_when_reading(-2) > 10


def test_places_with_weight_are_the_hand_worked_labels() -> None:
    """One document of 12, supervised 3..6 and 9..11: anchors 3, 4, 5, 9, 10 and labels 4, 5, 6, 5, 6, 6, 10, 11, 11."""
    batch = tiny_batch((12,), supervised=0.0)
    batch.loss_mask_T[3:7] = True
    batch.loss_mask_T[9:12] = True
    layout = document_layout(batch.lengths_D, 512)
    anchors = select_anchors(batch.loss_mask_T, layout.document_ids_T, uniforms(batch), 32)
    blocks = make_blocks(anchors, layout, batch.token_ids_T, batch.loss_mask_T, 8, 255)
    assert blocks.index_AB[blocks.supervised_AB].tolist() == [4, 5, 6, 5, 6, 6, 10, 11, 11]
    draw = one_draw(Tiny().build(), batch)
    assert draw.sums[4:12].tolist() == [0, 5, 3, 1, 0, 0, 0, 0]


def test_a_distilled_loss_without_last_hidden_states_is_refused() -> None:
    batch = tiny_batch(shape=tiny_shape(last_hidden=False))
    with pytest.raises(AssertionError, match="last hidden states"):
        one_draw(Tiny(loss=LossConfig(loss="kl")).build(), batch)


def test_a_non_finite_step_is_skipped_counted_and_forgotten() -> None:
    good, bad = tiny_batch(seed=1), tiny_batch(seed=2)
    bad.features_TFH[5, 7] = float("nan")
    state, clean = Tiny().build(), Tiny().build()
    totals, clean_totals = no_totals(state), no_totals(state)
    for batch, number in ((good, 0), (bad, 1), (good, 2)):
        accumulate(state, batch, uniforms(batch, number))
        update(state, totals)
    for number in (0, 2):
        accumulate(clean, good, uniforms(good, number))
        update(clean, clean_totals)
    assert int(state.optimizer.skipped) == 1
    assert torch.equal(state.parameters.master_N, clean.parameters.master_N)
    assert torch.equal(totals, clean_totals), "one NaN would hide the rest of a logging window"


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SLIDING)])
def test_checkpointed_layers_give_identical_losses_and_gradients(kinds: tuple[str, ...]) -> None:
    tiny = Tiny(config=with_layers(*kinds))
    batch = tiny_batch()
    kept = one_draw(tiny.build(), batch)
    step = replace(tiny.step, checkpoint_layers=True)
    remade = one_draw(replace(tiny, step=step).build(), batch)
    assert torch.equal(kept.sums, remade.sums)
    assert torch.equal(kept.grad_N, remade.grad_N)


def noised(half_width: float) -> Tiny:
    step = StepConfig(num_anchors=32, attention="dense", feature_noise=half_width)
    return Tiny(loss=LossConfig(loss="kl", chunk_rows=64), step=step)


def test_negative_feature_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--feature-noise -0\.5 is below 0; 0 turns it off"):
        noised(-0.5)


def test_feature_noise_leaves_labels_and_buffers_bit_identical() -> None:
    batch = tiny_batch()
    before = {name: tensor.clone() for name, tensor in batch.tensors().items()}
    plain, noise = one_draw(noised(0.0).build(), batch), one_draw(noised(0.5).build(), batch)
    assert not torch.equal(plain.grad_N, noise.grad_N)
    assert torch.equal(plain.sums[3:12], noise.sums[3:12]), "labels"
    for name, tensor in batch.tensors().items():
        assert torch.equal(tensor, before[name]), name


def test_feature_noise_reaches_the_drafter_and_nothing_else() -> None:
    batch, state = tiny_batch(), noised(0.5).build()
    seen: list[Tensor] = []

    def forward(block_QH: Tensor, features_TFH: Tensor, *rest: Any) -> Tensor:
        seen.append(features_TFH)
        return state.drafter(block_QH, features_TFH, *rest)

    one_draw(replace(state, forward=forward), batch)
    assert torch.equal(seen[0], noisy(batch.features_TFH, uniforms(batch), 0.5))


def test_a_step_changes_nothing_it_reads() -> None:
    state, batch = noised(0.5).build(), tiny_batch()
    u = uniforms(batch)
    before = {name: tensor.clone() for name, tensor in (batch.tensors() | {"uniforms": u}).items()}
    ends = state.ends.head_VH.clone(), state.ends.embedding_VH.clone()
    accumulate(state, batch, u)
    update(state, no_totals(state))
    for name, tensor in (batch.tensors() | {"uniforms": u}).items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(state.ends.head_VH, ends[0])
    assert torch.equal(state.ends.embedding_VH, ends[1])


def test_block_embeddings_are_scaled_as_engines_scale_them() -> None:
    tiny, batch = Tiny(), tiny_batch()
    ends = tiny.build().ends
    scaled = one_draw(tiny.build(replace(ends, embedding_scale=4.0)), batch)
    by_hand = one_draw(tiny.build(replace(ends, embedding_VH=ends.embedding_VH * 4.0)), batch)
    assert torch.equal(scaled.grad_N, by_hand.grad_N)


def test_bf16_compute_moves_fp32_norms() -> None:
    tiny = Tiny(dtype=torch.bfloat16, optim=OptimConfig(lr=1e-4, schedule="constant", warmup=0.0))
    state, batch = tiny.build(), tiny_batch(shape=tiny_shape(dtype=torch.bfloat16))
    losses = train(state, batch, 3)
    assert all(loss == loss for loss in losses)
    for name, weight in state.parameters.named(state.parameters.master_N).items():
        if weight.ndim == 1:
            assert (weight != 1).all(), name
    assert torch.equal(state.parameters.shadow_N, state.parameters.master_N.bfloat16())


def test_bf16_gradients_stay_close_to_fp32() -> None:
    batch = tiny_batch(shape=tiny_shape(dtype=torch.bfloat16))
    exact = one_draw(Tiny().build(), batch)
    half = one_draw(Tiny(dtype=torch.bfloat16).build(), batch)
    assert float((half.grad_N - exact.grad_N).norm() / exact.grad_N.norm()) < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind: LossKind) -> None:
    tiny = Tiny(loss=LossConfig(loss=kind, chunk_rows=64), optim=OptimConfig(lr=3e-3, schedule="constant", warmup=0))
    losses = train(tiny.build(), tiny_batch((100, 60), tiny_shape(160)), 30)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_C17_the_drafter_is_fed_the_true_token_and_masks_never_its_own_guesses() -> None:
    """Two drafters that guess differently read the same blocks, and the tokens asked of them follow the true one."""
    batch, read = tiny_batch(), list[tuple[Tensor, Tensor]]()
    guesses: list[Tensor] = []
    head_VH = Tiny().build().ends.head_VH
    for seed in (0, 1):
        state = Tiny().build()
        with torch.no_grad():
            scramble = torch.randn(state.parameters.shadow_N.shape, generator=torch.Generator().manual_seed(seed))
            state.parameters.shadow_N.add_(0.2 * scramble)
        plain = state.forward

        def watched(block_QH: Tensor, features_TFH: Tensor, *rest: Any, plain: Any = plain) -> Tensor:
            read.append((block_QH.clone(), features_TFH.clone()))
            hidden_GH = plain(block_QH, features_TFH, *rest)
            guesses.append((hidden_GH @ head_VH.T).argmax(-1))
            return hidden_GH

        one_draw(replace(state, forward=watched), batch)
    assert len(read) == 2, "one forward a draw: nothing could be fed back"
    assert (guesses[0] != guesses[1]).float().mean() > 0.5
    assert torch.equal(read[0][0], read[1][0])
    assert torch.equal(read[0][1], batch.features_TFH)
    layout = document_layout(batch.lengths_D, batch.shape.num_tokens)
    anchors = select_anchors(batch.loss_mask_T, layout.document_ids_T, uniforms(batch), 32)
    embedding = Tiny().build().ends.embedding_VH
    block_ABH = read[0][0].view(32, 8, -1)
    assert torch.equal(block_ABH[:, 0], embedding[batch.token_ids_T[anchors.index_A]])
    assert torch.equal(block_ABH[:, 1:], embedding[-1].expand_as(block_ABH[:, 1:])), "the mask token is the last one"


@pytest.mark.parametrize("loss", [LossConfig(chunk_rows=64), LossConfig(loss="lk", chunk_rows=64)])
def test_with_a_frozen_context_the_layers_get_the_very_gradients_they_would_have(loss: LossConfig) -> None:
    """The batch carries the context; fc and hidden_norm keep their bits through weight decay and all."""
    batch = tiny_batch()
    whole = Tiny(loss=loss, optim=OptimConfig(weight_decay=0.1)).build()
    frozen = Tiny(loss=loss, optim=OptimConfig(weight_decay=0.1), freeze_context=True).build()
    given = FeatureBatch.allocate(replace(batch.shape, num_taps=1), "cpu")
    with torch.no_grad():
        context_TH = whole.drafter.context(batch.features_TFH)
    source = replace(batch, shape=given.shape, features_TFH=context_TH)
    given.copy_(source)
    expected, found = one_draw(whole, batch), one_draw(frozen, given)
    assert torch.equal(found.sums, expected.sums)
    gradients = whole.parameters.named(expected.grad_N)
    for name, gradient in frozen.parameters.named(found.grad_N).items():
        assert torch.equal(gradient, gradients[name]), name
    before = {name: weight.clone() for name, weight in frozen.parameters.named(frozen.parameters.master_N).items()}
    for number in range(3):
        accumulate(frozen, given, uniforms(given, number))
        update(frozen, no_totals(frozen))
    after = frozen.parameters.named(frozen.parameters.master_N)
    assert {name for name in before if torch.equal(before[name], after[name])} == {"fc.weight", "hidden_norm.weight"}
