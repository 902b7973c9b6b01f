"""From a resolved drafter to a TrainState on one device."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import cast

import torch

from draftsmith.drafter.loss import ChunkFunction, LossSpec, LossSums, fused_chunk
from draftsmith.drafter.mask import TILE
from draftsmith.drafter.model import CONTEXT, Drafter
from draftsmith.drafter.rope import inverse_frequencies
from draftsmith.errors import ConfigError
from draftsmith.records import BatchShape, FrozenEnds
from draftsmith.train.optim import OptimConfig, Optimizer
from draftsmith.train.parameters import FlatParameters
from draftsmith.train.step import StepConfig, TrainState


def check_sizes(config: StepConfig, shape: BatchShape, block_size: int) -> None:
    """Refuse sizes that the step can't compute with.

    Raises:
        ConfigError: more anchors than tokens, or (flex attention) sizes that are not whole mask tiles.
    """
    if not 0 < config.num_anchors <= shape.num_tokens:
        raise ConfigError(f"--anchors {config.num_anchors} is not between 1 and the token budget {shape.num_tokens}")
    if config.attention == "flex":
        if shape.num_tokens % TILE:
            raise ConfigError(f"--token-budget {shape.num_tokens} is not a multiple of {TILE}, as flex attention needs")
        if config.num_anchors * block_size % TILE:
            raise ConfigError(
                f"--anchors {config.num_anchors} x --block-size {block_size} is not a multiple of {TILE}, which flex "
                "attention needs: change --anchors"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """What a TrainState is built from, besides the drafter and the target's ends."""

    loss: LossSpec
    step: StepConfig
    optim: OptimConfig
    total_steps: int
    dtype: torch.dtype
    """Of the shadow that computes: bfloat16 on a GPU, float32 on the CPU."""
    compiled: bool
    freeze_context: bool = False
    """Train the layers and the last norm alone; batches then carry the context instead of features."""


def build_state(drafter: Drafter, ends: FrozenEnds, spec: StateSpec, device: torch.device) -> TrainState:
    """Allocate parameters, moments and sums on `device`; compile the forward and the loss chunk where asked.

    `drafter` arrives with its initial weights in fp32 on the CPU and is moved. The first step compiles.
    """
    parameters = FlatParameters.install(drafter, spec.dtype, device, CONTEXT if spec.freeze_context else ())
    drafter.context_is_given = spec.freeze_context
    inv_freq, factor = inverse_frequencies(drafter.config.rope, device)
    forward = torch.compile(drafter.forward, dynamic=False, fullgraph=True) if spec.compiled else drafter.forward
    chunk = chunk_function(spec.loss, ends, device)
    if spec.compiled:
        chunk = torch.compile(chunk, dynamic=False, fullgraph=True)
    return TrainState(
        config=spec.step,
        drafter=drafter,
        ends=ends,
        loss=spec.loss,
        parameters=parameters,
        optimizer=Optimizer.build(spec.optim, parameters, spec.total_steps, spec.compiled),
        inv_freq=inv_freq,
        rope_factor=factor,
        sums=torch.zeros(LossSums.num_sums(drafter.config.block_size), dtype=torch.float32, device=device),
        forward=forward,
        chunk=chunk,
    )


def chunk_function(loss: LossSpec, ends: FrozenEnds, device: torch.device) -> ChunkFunction:
    """How a chunk of logits becomes sums and a gradient: by kernels of our own where they apply, else `fused_chunk`."""
    plain_head = ends.logit_scale == 1.0 and ends.soft_cap is None
    if device.type == "cuda" and loss.config.loss == "ce" and plain_head:
        # Imported late: it needs Triton, which a CPU build of torch comes without.
        kernels = importlib.import_module("draftsmith.drafter.cross_entropy")
        return cast(ChunkFunction, kernels.text_chunk)
    return fused_chunk
