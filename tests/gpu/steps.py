"""States and batches on a GPU for the tests of the captured step: group 3, block 8, a full and a sliding layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.drafter.loss import LossSpec
from draftsmith.drafter.model import FULL, SLIDING, Drafter, DrafterConfig, init_weights
from draftsmith.drafter.objectives import LossConfig
from draftsmith.drafter.rope import RopeConfig
from draftsmith.records import BatchShape, FeatureBatch, FrozenEnds
from draftsmith.train.build import StateSpec, build_state
from draftsmith.train.graph import CapturedStep, PlainStep, StepInputs, Stepper
from draftsmith.train.optim import OptimConfig
from draftsmith.train.step import StepConfig, TrainState

VOCAB, HIDDEN, BLOCK, ANCHORS = 1024, 192, 8, 128
CONFIG = DrafterConfig(
    hidden_size=HIDDEN,
    intermediate_size=384,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    layer_types=(SLIDING, FULL),
    sliding_window=64,
    block_size=BLOCK,
    mask_token_id=VOCAB - 1,
    taps=(0, 2, 4),
    num_target_layers=8,
    vocab_size=VOCAB,
    rope=RopeConfig(head_dim=64, theta=1e5, scaling={}, max_positions=8192),
)
DEVICE = torch.device("cuda", 0)
LENGTHS = (700, 300, 41, 5, 420)


def shape(num_tokens: int = 2048, dtype: torch.dtype = torch.bfloat16) -> BatchShape:
    return BatchShape(
        num_tokens=num_tokens, num_documents=16, num_taps=3, hidden_size=HIDDEN, dtype=dtype, last_hidden=True
    )


def batch(lengths: Sequence[int], seed: int, batch_shape: BatchShape | None = None) -> FeatureBatch:
    """Random documents on the CPU; the values depend on the seed alone, not on the budget."""
    made = FeatureBatch.allocate(batch_shape or shape(), "cpu")
    generator = torch.Generator().manual_seed(seed)
    used = sum(lengths)
    made.lengths_D[: len(lengths)] = torch.tensor(list(lengths))
    made.num_tokens.fill_(used)
    made.token_ids_T[:used] = torch.randint(0, VOCAB - 1, (used,), generator=generator)
    made.loss_mask_T[:used] = torch.rand(used, generator=generator) < 0.9
    made.features_TFH[:used] = torch.randn(used, 3 * HIDDEN, generator=generator).to(made.shape.dtype)
    assert made.last_hidden_TH is not None
    made.last_hidden_TH[:used] = torch.randn(used, HIDDEN, generator=generator).to(made.shape.dtype)
    return made


def state(
    loss: LossConfig | None = None,
    attention: str = "flex",
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = True,
    checkpoint_layers: bool = False,
    freeze_context: bool = False,
) -> TrainState:
    generator = torch.Generator().manual_seed(3)
    embedding = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.5).to(DEVICE, dtype)
    head = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.1).to(DEVICE, dtype)
    drafter = Drafter(CONFIG)
    init_weights(drafter, 0)
    chosen = loss or LossConfig(chunk_rows=512)
    step = StepConfig(num_anchors=ANCHORS, attention="flex", checkpoint_layers=checkpoint_layers)
    if attention == "dense":
        step = replace(step, attention="dense")
    spec = StateSpec(
        loss=LossSpec(config=chosen, gamma=4.0, block_size=BLOCK),
        step=step,
        optim=OptimConfig(lr=3e-3, schedule="constant", warmup=0.0),
        total_steps=1000,
        dtype=dtype,
        compiled=compiled,
        freeze_context=freeze_context,
    )
    return build_state(drafter, FrozenEnds(embedding_VH=embedding, head_VH=head), spec, DEVICE)


def inputs(dtype: torch.dtype = torch.bfloat16, num_tokens: int = 2048) -> StepInputs:
    return StepInputs.allocate(shape(num_tokens, dtype), BLOCK, DEVICE)


def captured(made: TrainState) -> CapturedStep:
    return CapturedStep(made, inputs(), torch.cuda.current_stream())


def plain(made: TrainState) -> PlainStep:
    return PlainStep(made, inputs(made.parameters.shadow_N.dtype))


def with_context(data: FeatureBatch) -> FeatureBatch:
    """A batch that carries the context of its features, as the drafter of `state()` makes it."""
    drafter = Drafter(CONFIG)
    init_weights(drafter, 0)
    with torch.no_grad():
        context_TH = drafter.to(DEVICE, data.shape.dtype).context(data.features_TFH.to(DEVICE))
    return replace(data, shape=replace(data.shape, num_taps=1), features_TFH=context_TH)


def feed(stepper: Stepper, data: FeatureBatch, number: int, draw: int = 0) -> None:
    stepper.inputs.batch.copy_(data)
    stepper.inputs.uniforms_T.copy_(draw_uniforms(0, number, draw, data.shape.num_tokens))


def gradients_of(made: TrainState, data: FeatureBatch, number: int = 0) -> tuple[Tensor, Tensor]:
    """fp32 gradients and sums of one draw, state left as it was."""
    given = StepInputs.allocate(data.shape, BLOCK, DEVICE)
    stepper = PlainStep(made, given)
    feed(stepper, data, number)
    stepper.accumulate()
    result = made.parameters.grad_N.clone(), made.sums.clone()
    made.parameters.grad_N.zero_()
    made.sums.zero_()
    return result
