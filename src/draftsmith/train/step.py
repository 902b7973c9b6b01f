"""The training step in three pieces: `accumulate` (one draw), a reduce between drafters, `update`.

Both functions here are of tensors with fixed shapes and read nothing on the host, so the same code runs plainly on a
CPU, compiled, under FakeTensorMode (which refuses any data-dependent operation) and captured as CUDA graphs.

Buffers belong to the TrainState; a call changes only `parameters`, `optimizer` and `sums`, never the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.drafter.anchors import Anchors, make_blocks, select_anchors
from draftsmith.drafter.layout import DocumentLayout, document_layout
from draftsmith.drafter.loss import ChunkFunction, LossSpec, chunked_loss, fused_chunk
from draftsmith.drafter.mask import MaskShape, block_mask, context_ranges, dense_mask
from draftsmith.drafter.model import Drafter, Mask, guesses
from draftsmith.drafter.rope import RopeTable, rope_table
from draftsmith.errors import ConfigError
from draftsmith.records import FeatureBatch, FrozenEnds
from draftsmith.train.noise import noisy
from draftsmith.train.optim import Optimizer
from draftsmith.train.parameters import FlatParameters

Forward = Callable[[Tensor, Tensor, RopeTable, RopeTable, dict[str, Mask], bool, bool], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """The fixed sizes of a step and how it computes."""

    num_anchors: int
    attention: Literal["dense", "flex"]
    """flex on a GPU; dense (SDPA, boolean mask) on the CPU, where flex attention has no backward, or if asked for."""
    checkpoint_layers: bool = False
    feature_noise: float = 0.0
    """Half-width of uniform noise on a copy of the features; 0 turns it off."""

    def __post_init__(self) -> None:
        if self.feature_noise < 0:
            raise ConfigError(f"--feature-noise {self.feature_noise} is below 0; 0 turns it off")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Everything a step reads and writes on one device."""

    config: StepConfig
    drafter: Drafter
    ends: FrozenEnds
    loss: LossSpec
    parameters: FlatParameters
    optimizer: Optimizer
    inv_freq: Tensor
    rope_factor: float
    sums: Tensor
    """LossSums vector added up since the last update."""
    forward: Forward
    chunk: ChunkFunction = fused_chunk


def accumulate(state: TrainState, batch: FeatureBatch, uniforms_T: Tensor) -> None:
    """One draw: from lengths to gradients of the numerator, added to `parameters.grad_N`, and sums to `state.sums`."""
    config, drafter, ends = state.config, state.drafter.config, state.ends
    dtype = state.parameters.shadow_N.dtype
    layout = document_layout(batch.lengths_D, batch.shape.num_tokens)
    anchors = select_anchors(batch.loss_mask_T, layout.document_ids_T, uniforms_T, config.num_anchors)
    blocks = make_blocks(
        anchors, layout, batch.token_ids_T, batch.loss_mask_T, drafter.block_size, drafter.mask_token_id
    )
    block_QH = (F.embedding(blocks.input_ids_Q, ends.embedding_VH) * ends.embedding_scale).to(dtype)
    features_TFH = noisy(batch.features_TFH.to(dtype), uniforms_T, config.feature_noise)
    hidden_GH = state.forward(
        block_QH,
        features_TFH,
        rope_table(layout.positions_T, state.inv_freq, state.rope_factor, dtype),
        rope_table(blocks.positions_Q, state.inv_freq, state.rope_factor, dtype),
        make_masks(state, anchors, layout),
        config.checkpoint_layers,
        True,
    )
    teacher_GH = None
    if state.loss.config.distilled:
        assert batch.last_hidden_TH is not None, "a distilled loss needs batches that carry last hidden states"
        # What follows token a + k - 1 is what place k is to guess.
        teacher_GH = batch.last_hidden_TH[(blocks.index_AB[:, 1:] - 1).clamp(min=0).reshape(-1)].to(dtype)
    labels_G, guessed_AG = guesses(blocks.labels_Q, drafter.block_size), blocks.supervised_AB[:, 1:]
    sums = chunked_loss(state.loss, ends, hidden_GH, labels_G, guessed_AG, teacher_GH, state.chunk)
    gradients = torch.autograd.grad(sums.numerator, state.parameters.leaves, allow_unused=True)
    state.parameters.add_gradients(gradients)
    state.sums.add_(sums.vector.detach())


def update(state: TrainState, totals: Tensor) -> None:
    """Apply the accumulated gradients: divide by the global denominator, clip, AdamW, publish, zero in place.

    `totals` collects the sums for the log before they are zeroed (fp64, same layout as `state.sums`); a step that is
    skipped for a non-finite gradient adds nothing, or one NaN would hide the rest of the window.
    """
    state.optimizer.apply(state.parameters, state.sums[1])
    totals.add_(torch.where(state.optimizer.found_inf > 0, 0.0, state.sums))
    state.sums.zero_()


def make_masks(state: TrainState, anchors: Anchors, layout: DocumentLayout) -> dict[str, Mask]:
    """Who sees whom, per layer type in use."""
    drafter = state.drafter.config
    ranges = context_ranges(anchors, layout)
    masks: dict[str, Mask] = {}
    for kind in sorted(set(drafter.layer_types)):
        shape = MaskShape(
            num_tokens=layout.document_ids_T.numel(),
            num_anchors=state.config.num_anchors,
            block_size=drafter.block_size,
            group=drafter.group if state.config.attention == "flex" else 1,
            window=drafter.window(kind),
        )
        masks[kind] = block_mask(ranges, shape) if state.config.attention == "flex" else dense_mask(ranges, shape)
    return masks
