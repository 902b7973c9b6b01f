"""The captured step on a GPU: equal to the same functions uncaptured bit for bit, flat, and close to its references."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.drafter.objectives import LossConfig
from draftsmith.errors import CaptureError
from draftsmith.records import BatchShape, FeatureBatch
from draftsmith.train.checkpoint import CheckpointConfig, Position, RunRecord, load_checkpoint, restore
from draftsmith.train.checkpoint_writer import CheckpointWriter
from draftsmith.train.graph import CapturedStep, PlainStep, StepInputs
from tests.gpu import steps

pytestmark = pytest.mark.gpu

FILLS = ((700, 300, 41, 5, 420), (1,), (64,) * 16, (2048,), (1500, 2, 2, 300), (900, 1148))


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("loss", [LossConfig(chunk_rows=512), LossConfig(loss="kl", weights="decay", chunk_rows=512)])
def test_captured_equals_uncaptured_bit_for_bit_over_20_steps(loss: LossConfig) -> None:
    one, other = steps.captured(steps.state(loss)), steps.plain(steps.state(loss))
    assert torch.equal(one.state.parameters.master_N, other.state.parameters.master_N)
    for number in range(20):
        data = steps.batch(FILLS[number % len(FILLS)], number)
        for stepper in (one, other):
            steps.feed(stepper, data, number)
            stepper.accumulate()
            stepper.update()
        assert torch.equal(one.inputs.totals, other.inputs.totals), f"sums differ at step {number}"
        assert torch.equal(one.state.parameters.master_N, other.state.parameters.master_N), f"weights, step {number}"
    for name, tensor in one.state.optimizer.tensors().items():
        assert torch.equal(tensor, other.state.optimizer.tensors()[name]), name
    moved = one.state.parameters.named(one.state.parameters.master_N)["norm.weight"]
    assert (moved != 1).all()


def test_with_a_frozen_context_captured_equals_uncaptured_and_whole_training() -> None:
    """Captured against uncaptured to the bit; and the layers' gradients are those of training everything."""
    made = steps.state(freeze_context=True)
    one = CapturedStep(made, StepInputs.allocate(_narrow(), steps.BLOCK, steps.DEVICE), torch.cuda.current_stream())
    other = PlainStep(steps.state(freeze_context=True), StepInputs.allocate(_narrow(), steps.BLOCK, steps.DEVICE))
    for number in range(6):
        data = steps.with_context(steps.batch(FILLS[number % len(FILLS)], number))
        for stepper in (one, other):
            steps.feed(stepper, data, number)
            stepper.accumulate()
            stepper.update()
        assert torch.equal(one.state.parameters.master_N, other.state.parameters.master_N), f"weights, step {number}"
    data = steps.batch(steps.LENGTHS, 0)
    whole = steps.state()
    expected = whole.parameters.named(steps.gradients_of(whole, data)[0])
    frozen = steps.state(freeze_context=True)
    found = frozen.parameters.named(steps.gradients_of(frozen, steps.with_context(data))[0])
    assert found.keys() == expected.keys() - {"fc.weight", "hidden_norm.weight"}
    for name, gradient in found.items():
        assert _relative(gradient, expected[name]) < 2e-2, name


def _narrow() -> BatchShape:
    return replace(steps.shape(), num_taps=1)


def test_compiled_is_close_to_eager_dense() -> None:
    data = steps.batch(steps.LENGTHS, 0)
    compiled, _ = steps.gradients_of(steps.state(), data)
    eager, _ = steps.gradients_of(steps.state(attention="dense", compiled=False), data)
    exact = _in_float32(data)
    # Both round to bf16 along the way: neither may be further from fp32 than bf16 products are, nor from each other.
    assert _relative(compiled, exact) < 2e-2
    assert _relative(compiled, exact) < 1.5 * _relative(eager, exact) + 1e-3


def _in_float32(data: FeatureBatch) -> torch.Tensor:
    wide = steps.batch(steps.LENGTHS, 0, steps.shape(dtype=torch.float32))
    for name, tensor in wide.tensors().items():
        tensor.copy_(data.tensors()[name])
    return steps.gradients_of(steps.state(attention="dense", dtype=torch.float32, compiled=False), wide)[0]


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def test_padded_equals_unpadded_on_the_flex_path() -> None:
    lengths = (700, 300, 24)
    small, _ = steps.gradients_of(steps.state(), steps.batch(lengths, 0, steps.shape(1024)))
    data = steps.batch(lengths, 0, steps.shape(2048))
    state = steps.state()
    given = StepInputs.allocate(data.shape, steps.BLOCK, steps.DEVICE)
    # The same anchors: uniforms of the shorter budget, padding's don't matter.
    stepper = PlainStep(state, given)
    given.batch.copy_(data)
    given.uniforms_T[:1024] = draw_uniforms(0, 0, 0, 1024).to(steps.DEVICE)
    stepper.accumulate()
    assert _relative(state.parameters.grad_N, small) < 2e-3


def test_padding_gets_no_gradient() -> None:
    data = steps.batch(steps.LENGTHS, 0)
    clean = steps.gradients_of(steps.state(), data)
    used = sum(steps.LENGTHS)
    loud = steps.batch(steps.LENGTHS, 0)
    loud.features_TFH[used:] = 1e4
    loud.token_ids_T[used:] = 7
    loud.loss_mask_T[used:] = True
    assert loud.last_hidden_TH is not None
    loud.last_hidden_TH[used:] = 1e4
    for mine, theirs in zip(steps.gradients_of(steps.state(), loud), clean, strict=True):
        assert torch.equal(mine, theirs)


def test_fresh_anchors_at_every_replay_and_inputs_untouched() -> None:
    stepper = steps.captured(steps.state())
    data = steps.batch(steps.LENGTHS, 0)
    seen = []
    for draw in range(3):
        steps.feed(stepper, data, 0, draw)
        before = {name: tensor.clone() for name, tensor in stepper.inputs.tensors().items()}
        stepper.accumulate()
        for name, tensor in stepper.inputs.tensors().items():
            assert torch.equal(tensor, before[name]), f"{name} was changed by a replay"
        seen.append(stepper.state.sums[2].item())
        stepper.state.sums.zero_()
        stepper.state.parameters.grad_N.zero_()
    assert len(set(seen)) == 3


def test_a_changed_input_is_refused_by_name() -> None:
    stepper = steps.captured(steps.state())
    whole = stepper.inputs
    moved = replace(whole.batch, features_TFH=whole.batch.features_TFH.clone())
    stepper.inputs = replace(whole, batch=moved)
    with pytest.raises(CaptureError, match="features_TFH changed"):
        stepper.accumulate()


def test_flat_no_allocations_no_syncs() -> None:
    stepper = steps.captured(steps.state())
    slots = []
    for number, lengths in enumerate(FILLS):
        data = steps.batch(lengths, number)
        slot = StepInputs.allocate(data.shape, steps.BLOCK, steps.DEVICE).batch
        slot.copy_(data)
        slots.append(slot)
    for slot in slots:
        stepper.inputs.batch.copy_(slot)
        stepper.accumulate()
        stepper.update()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    level, calls = torch.cuda.memory_allocated(), stats["allocation.all.allocated"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for turn in range(30):
            stepper.inputs.batch.copy_(slots[turn % len(slots)], non_blocking=True)
            stepper.accumulate()
            stepper.update()
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == calls
    assert torch.cuda.memory_allocated() == level
    assert not [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]


def test_a_non_finite_step_is_skipped_on_the_device() -> None:
    stepper = steps.captured(steps.state())
    good, bad = steps.batch(steps.LENGTHS, 0), steps.batch(steps.LENGTHS, 1)
    bad.features_TFH[3] = float("nan")
    steps.feed(stepper, good, 0)
    stepper.accumulate()
    stepper.update()
    before = stepper.state.parameters.master_N.clone()
    moments = {name: tensor.clone() for name, tensor in stepper.state.optimizer.tensors().items() if "adamw" in name}
    steps.feed(stepper, bad, 1)
    stepper.accumulate()
    stepper.update()
    assert torch.equal(stepper.state.parameters.master_N, before)
    assert int(stepper.state.optimizer.skipped) == 1
    for name, tensor in moments.items():
        assert torch.equal(stepper.state.optimizer.tensors()[name], tensor), name


def test_replay_after_a_restore_continues_exactly(tmp_path: Path) -> None:
    stepper = steps.captured(steps.state())

    def advance(first: int, last: int) -> None:
        for number in range(first, last):
            steps.feed(stepper, steps.batch(FILLS[number % len(FILLS)], number), number)
            stepper.accumulate()
            stepper.update()

    record = RunRecord(config={}, data_fingerprint="x")
    with CheckpointWriter(tmp_path, CheckpointConfig(), stepper.state, record) as writer:
        advance(0, 5)
        writer.save(Position(step=5, batch=5, draw=0, metrics_bytes=0))
        advance(5, 12)
    straight = stepper.state.parameters.master_N.clone()
    addresses = stepper.state.parameters.master_N.data_ptr()
    restore(stepper.state, load_checkpoint(tmp_path))
    assert stepper.state.parameters.master_N.data_ptr() == addresses
    assert not torch.equal(stepper.state.parameters.master_N, straight)
    advance(5, 12)
    assert torch.equal(stepper.state.parameters.master_N, straight)


def test_checkpointed_layers_give_the_same_step() -> None:
    data = steps.batch(steps.LENGTHS, 0)
    kept, _ = steps.gradients_of(steps.state(), data)
    again, _ = steps.gradients_of(steps.state(checkpoint_layers=True), data)
    assert _relative(again, kept) < 1e-2


def test_both_loss_methods_agree() -> None:
    data = steps.batch(steps.LENGTHS, 0)
    for loss in ("ce", "kl", "tv", "lk"):
        fused, sums = steps.gradients_of(steps.state(LossConfig(loss=loss, chunk_rows=512)), data)
        plain_loss = LossConfig(loss=loss, chunk_rows=512, loss_method="recompute")
        recomputed, others = steps.gradients_of(steps.state(plain_loss), data)
        assert _relative(fused, recomputed) < 2e-2, loss
        assert torch.allclose(sums, others, rtol=1e-3), loss
