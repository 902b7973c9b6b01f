"""Tiny drafters, batches and states for tests of the step: two layers, 256 tokens of vocabulary, blocks of 8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.drafter.loss import LossSpec
from draftsmith.drafter.model import FULL, SLIDING, Drafter, DrafterConfig, init_weights
from draftsmith.drafter.objectives import LossConfig, resolve_gamma
from draftsmith.drafter.rope import RopeConfig
from draftsmith.records import BatchShape, FeatureBatch, FrozenEnds
from draftsmith.train.build import StateSpec, build_state
from draftsmith.train.optim import OptimConfig
from draftsmith.train.step import StepConfig, TrainState, accumulate, update

VOCAB, HIDDEN, BLOCK, TAPS = 256, 48, 8, 2
LENGTHS = (100, 60, 33, 1, 150)

CONFIG = DrafterConfig(
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    layer_types=(FULL, SLIDING),
    sliding_window=16,
    block_size=BLOCK,
    mask_token_id=VOCAB - 1,
    taps=(0, 2),
    num_target_layers=4,
    vocab_size=VOCAB,
    rope=RopeConfig(head_dim=8, theta=1e4, scaling={}, max_positions=512),
)
LOSS = LossConfig(chunk_rows=64)
STEP = StepConfig(num_anchors=32, attention="dense")
OPTIM = OptimConfig(lr=1e-2, schedule="constant", warmup=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """What a tiny state is made of, with the choices that tests vary."""

    config: DrafterConfig = CONFIG
    loss: LossConfig = LOSS
    step: StepConfig = STEP
    optim: OptimConfig = OPTIM
    dtype: torch.dtype = torch.float32
    total_steps: int = 50
    compiled: bool = False
    freeze_context: bool = False

    def build(self, ends: FrozenEnds | None = None) -> TrainState:
        drafter = Drafter(self.config)
        init_weights(drafter, 0)
        block_size = self.config.block_size
        spec = StateSpec(
            loss=LossSpec(config=self.loss, gamma=resolve_gamma(self.loss, block_size), block_size=block_size),
            step=self.step,
            optim=self.optim,
            total_steps=self.total_steps,
            dtype=self.dtype,
            compiled=self.compiled,
            freeze_context=self.freeze_context,
        )
        return build_state(drafter, ends or tiny_ends(self.config, self.dtype), spec, torch.device("cpu"))


def tiny_ends(config: DrafterConfig = CONFIG, dtype: torch.dtype = torch.float32) -> FrozenEnds:
    generator = torch.Generator().manual_seed(7)
    size = (config.vocab_size, config.hidden_size)
    embedding = torch.randn(size, generator=generator) * 0.5
    head = torch.randn(size, generator=generator) * 0.2
    return FrozenEnds(embedding_VH=embedding.to(dtype), head_VH=head.to(dtype))


def tiny_shape(num_tokens: int = 512, *, last_hidden: bool = True, dtype: torch.dtype = torch.float32) -> BatchShape:
    return BatchShape(
        num_tokens=num_tokens,
        num_documents=8,
        num_taps=TAPS,
        hidden_size=HIDDEN,
        dtype=dtype,
        last_hidden=last_hidden,
    )


def tiny_batch(
    lengths: Sequence[int] = LENGTHS, shape: BatchShape | None = None, *, seed: int = 0, supervised: float = 0.9
) -> FeatureBatch:
    """Random documents of `lengths`; what a document holds depends on `seed` and its place in the packing only."""
    batch = FeatureBatch.allocate(shape or tiny_shape(), "cpu")
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    batch.lengths_D[: len(lengths)] = torch.tensor(lengths, dtype=torch.int64)
    batch.token_ids_T[:total] = torch.randint(0, VOCAB - 1, (total,), generator=generator)
    batch.loss_mask_T[:total] = torch.rand(total, generator=generator) < supervised
    batch.features_TFH[:total] = torch.randn(total, TAPS * HIDDEN, generator=generator).to(batch.shape.dtype)
    if batch.last_hidden_TH is not None:
        batch.last_hidden_TH[:total] = torch.randn(total, HIDDEN, generator=generator).to(batch.shape.dtype)
    batch.num_tokens.fill_(total)
    return batch


def one_document(batch: FeatureBatch, start: int, length: int) -> FeatureBatch:
    """A fresh batch of the same shape that holds only the tokens [start, start + length), as one document."""
    alone = FeatureBatch.allocate(batch.shape, "cpu")
    rows, place = slice(start, start + length), slice(0, length)
    theirs = batch.tensors()
    for name in ("token_ids_T", "loss_mask_T", "features_TFH", "last_hidden_TH"):
        alone.tensors()[name][place] = theirs[name][rows]
    alone.lengths_D[0] = length
    alone.num_tokens.fill_(length)
    return alone


def uniforms(batch: FeatureBatch, number: int = 0, draw: int = 0) -> Tensor:
    return draw_uniforms(0, number, draw, batch.shape.num_tokens)


def no_totals(state: TrainState) -> Tensor:
    return torch.zeros_like(state.sums, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Draw:
    """What one draw leaves behind."""

    grad_N: Tensor
    sums: Tensor


def one_draw(state: TrainState, batch: FeatureBatch, uniforms_T: Tensor | None = None) -> Draw:
    """Gradients of the numerator and sums of one draw, taken off the state, which is left as before."""
    accumulate(state, batch, uniforms(batch) if uniforms_T is None else uniforms_T)
    draw = Draw(state.parameters.grad_N.clone(), state.sums.clone())
    state.parameters.grad_N.zero_()
    state.sums.zero_()
    return draw


def train(state: TrainState, batch: FeatureBatch, steps: int) -> list[float]:
    """Mean loss of each step over `steps` draws of one batch."""
    losses: list[float] = []
    for number in range(steps):
        accumulate(state, batch, uniforms(batch, number))
        losses.append(float(state.sums[0] / state.sums[1]))
        update(state, no_totals(state))
    return losses


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest entry of `b`."""
    return float((a - b).abs().max() / b.abs().max())


def with_layers(*layer_types: str) -> DrafterConfig:
    return replace(CONFIG, layer_types=layer_types)
