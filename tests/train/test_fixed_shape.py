"""What makes the step capturable, on a CPU: no look at values, no new buffer, one compilation, no [Q, V] tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.drafter.anchors import Anchors
from draftsmith.drafter.layout import document_layout
from draftsmith.drafter.loss import LossSpec, fused_chunk
from draftsmith.drafter.mask import MaskShape, block_mask, context_ranges
from draftsmith.drafter.model import FULL
from draftsmith.drafter.objectives import LossConfig, LossKind
from draftsmith.records import FeatureBatch
from draftsmith.train.step import StepConfig, TrainState, accumulate, make_masks, update
from tests.train.tiny import (
    CONFIG,
    Tiny,
    no_totals,
    one_draw,
    relative,
    tiny_batch,
    tiny_ends,
    tiny_shape,
    uniforms,
    with_layers,
)

# torch's own compiler scripts a helper of its own on first use.
IGNORE_SCRIPT = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
FILLS = [(), (1,), (512,), (511, 1), (1, 1, 1, 1, 1, 1, 1, 1), (2, 2), (64,) * 8, (300, 3), (7, 200, 150, 100)]


def batch_number(number: int) -> FeatureBatch:
    """Batches of very different fill and supervision, in turn."""
    return tiny_batch(FILLS[number % len(FILLS)], seed=number, supervised=(0.0, 0.1, 0.9, 1.0)[number % 4])


def steered(state: TrainState) -> dict[str, Tensor]:
    """Every tensor that a graph would hold the address of."""
    flat, optimizer = state.parameters, state.optimizer
    fixed = {
        "master": flat.master_N,
        "grad": flat.grad_N,
        "shadow": flat.shadow_N,
        "sums": state.sums,
        "inv_freq": state.inv_freq,
        "lr": optimizer.lr,
        "grad_norm": optimizer.grad_norm,
        "grad_scale": optimizer.grad_scale,
        "found_inf": optimizer.found_inf,
    }
    leaves = {f"leaf.{i}": leaf.data for i, leaf in enumerate(flat.leaves)}
    return fixed | leaves | optimizer.tensors()


@contextmanager
def fake_step(loss: LossConfig, step: StepConfig) -> Iterator[tuple[TrainState, FeatureBatch, Tensor]]:
    """A state, a batch and uniforms that have shapes and no values: whoever asks for one raises."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        state = Tiny(loss=loss, step=step).build(tiny_ends())
        yield state, FeatureBatch.allocate(tiny_shape(), "cpu"), torch.zeros(512, dtype=torch.float64)


@pytest.mark.parametrize("method", ["fused", "recompute"])
@pytest.mark.parametrize("kind", ["ce", "lk"])
def test_accumulate_and_update_never_ask_for_a_value(kind: LossKind, method: Any) -> None:
    loss = LossConfig(loss=kind, loss_method=method, chunk_rows=64)
    step = StepConfig(num_anchors=32, attention="dense", checkpoint_layers=kind == "lk", feature_noise=0.1)
    with fake_step(loss, step) as (state, batch, u):
        accumulate(state, batch, u)
        update(state, no_totals(state))


def test_block_masks_never_ask_for_a_value() -> None:
    with fake_step(LossConfig(), StepConfig(num_anchors=32, attention="flex")) as (state, _, _):
        layout = document_layout(torch.zeros(8, dtype=torch.int64), 512)
        anchors = Anchors(index_A=torch.zeros(32, dtype=torch.int64), valid_A=torch.zeros(32, dtype=torch.bool))
        assert set(make_masks(state, anchors, layout)) == set(CONFIG.layer_types)


DYNAMIC: dict[str, Callable[[Tensor], object]] = {
    "nonzero": torch.nonzero,
    "item": lambda lengths_D: lengths_D[0].item(),
    "repeat_interleave": lambda lengths_D: torch.arange(8).repeat_interleave(lengths_D),
    "boolean index": lambda lengths_D: lengths_D[lengths_D > 0],
}


@pytest.mark.parametrize("operation", DYNAMIC)
def test_fake_tensors_would_notice(operation: str) -> None:
    """The guard of the tests above can fail: each usual data-dependent operation raises under it."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        lengths_D = torch.zeros(8, dtype=torch.int64)
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            DYNAMIC[operation](lengths_D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_over_fifty_batches_no_buffer_moves_or_changes_shape(dtype: torch.dtype) -> None:
    state = Tiny(dtype=dtype, loss=LossConfig(loss="kl", chunk_rows=64)).build()
    buffers, totals, u = (
        FeatureBatch.allocate(tiny_shape(dtype=dtype), "cpu"),
        no_totals(state),
        torch.zeros(512).double(),
    )

    def places() -> dict[str, tuple[int, torch.Size, torch.dtype]]:
        held = steered(state) | buffers.tensors() | {"totals": totals, "uniforms": u}
        return {name: (value.data_ptr(), value.shape, value.dtype) for name, value in held.items()}

    before = places()
    for number in range(50):
        source = batch_number(number)
        for name, buffer in buffers.tensors().items():
            buffer.copy_(source.tensors()[name])
        u.copy_(uniforms(buffers, number))
        accumulate(state, buffers, u)
        update(state, totals)
        assert places() == before
    assert int(state.optimizer.step) == 50
    assert 0 < int(state.optimizer.empty) < 50
    assert int(state.optimizer.skipped) == 0
    assert bool(torch.isfinite(state.parameters.master_N).all())


def compiled(state: TrainState, backend: str) -> TrainState:
    return replace(
        state,
        forward=torch.compile(state.drafter.forward, dynamic=False, fullgraph=True, backend=backend),
        chunk=torch.compile(fused_chunk, dynamic=False, fullgraph=True, backend=backend),
    )


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


@IGNORE_SCRIPT
@pytest.mark.usefixtures("fresh_compiler")
def test_D05_a_compiled_step_compiles_once_for_every_fill() -> None:
    """Two graphs, forward and chunk; `error_on_recompile` turns a third into an error."""
    state, eager = compiled(Tiny().build(), "aot_eager"), Tiny().build()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(12):
            batch = batch_number(number)
            ours, theirs = one_draw(state, batch), one_draw(eager, batch)
            assert torch.equal(ours.sums, theirs.sums)
            torch.testing.assert_close(ours.grad_N, theirs.grad_N)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.long
@IGNORE_SCRIPT
@pytest.mark.usefixtures("fresh_compiler")
def test_the_step_as_built_compiled_stays_close_to_eager() -> None:
    tiny = Tiny(config=with_layers(FULL), loss=LossConfig(loss="lk", chunk_rows=64))
    state, eager = replace(tiny, compiled=True).build(), tiny.build()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(50):
            batch = batch_number(number)
            ours, theirs = one_draw(state, batch), one_draw(eager, batch)
            torch.testing.assert_close(ours.sums, theirs.sums, rtol=1e-5, atol=1e-5)
            if float(theirs.sums[3]):
                assert relative(ours.grad_N, theirs.grad_N) < 1e-5
            else:
                assert (ours.grad_N == 0).all()
    assert counters["stats"]["unique_graphs"] == 2


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.numel())
        return out


@pytest.mark.parametrize("method", ["fused", "recompute"])
@pytest.mark.parametrize("kind", ["ce", "kl", "tv", "lk"])
def test_D12_no_tensor_is_larger_than_a_chunk_of_logits(kind: LossKind, method: Any) -> None:
    """16 anchors of 8 places over a vocabulary of 8,192 in chunks of 32 rows: [Q, V] would be four times as large."""
    vocab, rows, anchors = 8192, 32, 16
    config = replace(with_layers(FULL), vocab_size=vocab, num_heads=2)
    step = StepConfig(num_anchors=anchors, attention="dense")
    tiny = Tiny(config=config, step=step, loss=LossConfig(loss=kind, loss_method=method, chunk_rows=rows))
    batch = tiny_batch((70, 40), tiny_shape(128))
    state = tiny.build()
    # The head itself is larger than a chunk here; its views and its transpose are not made by the step.
    bound = max(rows * vocab, vocab * config.hidden_size)
    with Sizes() as sizes:
        accumulate(state, batch, uniforms(batch))
        update(state, no_totals(state))
    assert rows * vocab <= sizes.largest <= bound < anchors * 8 * vocab


def test_masks_are_static_in_shape_whatever_the_anchors() -> None:
    shape = MaskShape(num_tokens=512, num_anchors=32, block_size=8, group=3, window=None)

    def sizes(lengths: list[int], filled: int) -> list[torch.Size]:
        layout = document_layout(torch.tensor(lengths), 512)
        valid_A = torch.arange(32) < filled
        anchors = Anchors(index_A=torch.where(valid_A, torch.arange(32), 0), valid_A=valid_A)
        mask = block_mask(context_ranges(anchors, layout), shape)
        tensors = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        return [tensor.shape for tensor in tensors if tensor is not None]

    assert sizes([512, 0], 32) == sizes([33, 100], 5) == sizes([0, 0], 0)
    assert len(sizes([512, 0], 32)) == 4


def test_the_number_of_chunks_is_fixed_by_the_shape() -> None:
    spec = LossSpec(config=LossConfig(chunk_rows=64), gamma=4.0, block_size=8)
    calls: list[int] = []

    def counted(*args: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return fused_chunk(*args)

    state = replace(Tiny().build(), chunk=counted, loss=spec)
    per_batch: list[int] = []
    for number in range(6):
        one_draw(state, batch_number(number))
        per_batch.append(len(calls))
        calls.clear()
    assert per_batch == [4] * 6
