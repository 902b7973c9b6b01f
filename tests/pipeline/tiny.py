"""Tiny runs of the pipeline: a hybrid target of the Qwen3.5 family, a drafter of one layer, 20 steps in a second."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.data.buckets import OrderConfig, choose_buckets
from draftsmith.data.loader import BatchOrder
from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.drafter.loss import LossSpec
from draftsmith.drafter.model import FULL, Drafter, DrafterConfig, init_weights
from draftsmith.drafter.objectives import LossConfig, resolve_gamma
from draftsmith.drafter.rope import RopeConfig
from draftsmith.pipeline.assemble import Blueprint, Team, build_drafters, build_rings, build_targets
from draftsmith.pipeline.placement import Placement
from draftsmith.pipeline.resolve import Batching
from draftsmith.pipeline.settings import PipelineConfig
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.team import run_workers
from draftsmith.records import BatchShape, Document
from draftsmith.target.capture import PackedCapture
from draftsmith.target.model import Target
from draftsmith.train.build import StateSpec, build_state
from draftsmith.train.graph import StepInputs
from draftsmith.train.optim import OptimConfig
from draftsmith.train.step import StepConfig, accumulate, update
from tests.families import HIDDEN, LAYERS, ROWS, documents_of, fresh_target

FAMILY = "qwen3_5"
CPU = torch.device("cpu")
TOKENS, BLOCK, TAPS, SEED = 96, 4, (1, LAYERS - 2), 3
LENGTHS = [20, 33, 9, 41, 12, 27, 18, 38, 14, 30, 22, 25, 17, 36, 11, 29]
CONFIG = DrafterConfig(
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    layer_types=(FULL,),
    sliding_window=0,
    block_size=BLOCK,
    mask_token_id=ROWS - 1,
    taps=TAPS,
    num_target_layers=LAYERS,
    vocab_size=ROWS,
    rope=RopeConfig(head_dim=16, theta=1e4, scaling={}, max_positions=512),
)
SHAPE = BatchShape(
    num_tokens=TOKENS,
    num_documents=8,
    num_taps=len(TAPS),
    hidden_size=HIDDEN,
    dtype=torch.float32,
    last_hidden=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What tests vary about a run."""

    targets: int = 1
    drafters: int = 1
    draws: int = 2
    accumulation: int = 1
    steps: int = 20
    slots: int = 2
    stall: float = 60.0
    joint: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run leaves: each step's mean loss over all drafters, and the last weights."""

    losses: list[float]
    master_N: Tensor


def documents() -> list[Document]:
    return documents_of(LENGTHS)


def order() -> BatchOrder:
    return BatchOrder(LENGTHS, choose_buckets(LENGTHS, 3), order_config())


def order_config() -> OrderConfig:
    return OrderConfig(token_budget=TOKENS, max_documents=SHAPE.num_documents, seed=SEED)


def drafter() -> Drafter:
    fresh = Drafter(CONFIG)
    init_weights(fresh, SEED)
    return fresh


def state_spec(steps: int) -> StateSpec:
    loss = LossConfig(chunk_rows=32)
    return StateSpec(
        loss=LossSpec(config=loss, gamma=resolve_gamma(loss, BLOCK), block_size=BLOCK),
        step=StepConfig(num_anchors=12, attention="dense"),
        optim=OptimConfig(lr=5e-3),
        total_steps=steps,
        dtype=torch.float32,
        compiled=False,
    )


def blueprint(sizes: Sizes, target: Target, stop: Stop | None = None) -> Blueprint:
    batching = Batching(
        order=order_config(),
        buckets=choose_buckets(LENGTHS, 3),
        num_anchors=12,
        draws_per_batch=sizes.draws,
        accumulation=sizes.accumulation,
        total_steps=sizes.steps,
    )
    return Blueprint(
        placement=Placement(
            targets=(CPU,) * sizes.targets, drafters=(CPU,) * sizes.drafters, joint=sizes.joint, why="test"
        ),
        pipeline=PipelineConfig(device="cpu", ring_slots=sizes.slots, stall_seconds=sizes.stall),
        batching=batching,
        shape=SHAPE,
        state=state_spec(sizes.steps),
        drafter=drafter(),
        ends=target.ends(),
        seed=SEED,
        stop=stop or Stop(),
        say=lambda _text: None,
    )


def no_step(_step: int, _last: bool) -> None:
    return


def team_of(plan: Blueprint, targets: Sequence[Target], after_step: Callable[[int, bool], None] = no_step) -> Team:
    rings = build_rings(plan)
    drafters, streams = build_drafters(plan, rings, after_step)
    producers = build_targets(plan, targets, documents(), order(), rings)
    return Team(
        producers=producers, drafters=drafters, streams=streams, rings=rings, placement=plan.placement, stop=plan.stop
    )


def targets_of(count: int) -> list[Target]:
    """Separate models of equal weights: a target serves one thread."""
    return [fresh_target(FAMILY) for _ in range(count)]


class LossLog:
    """After every step: the mean loss over all drafters since the step before."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.team: Team | None = None

    def __call__(self, _step: int, _last: bool) -> None:
        assert self.team is not None
        totals = self.team.drafters[0].stepper.inputs.totals
        self.losses.append(float(totals[0] / totals[1]))
        totals.zero_()


def run_threads(
    sizes: Sizes, targets: Sequence[Target] | None = None, start: Callable[[Team], None] | None = None
) -> Trace:
    """The run with a thread per worker."""
    models = targets or targets_of(sizes.targets)
    plan, log = blueprint(sizes, models[0]), LossLog()
    log.team = team = team_of(plan, models, log)
    if start is not None:
        start(team)
    try:
        run_workers(team.workers(), plan.stop, lambda: None)
    finally:
        team.close()
    masters = [loop.stepper.state.parameters.master_N for loop in team.drafters]
    assert all(torch.equal(master, masters[0]) for master in masters)
    return Trace(log.losses, masters[0].clone())


def run_by_hand(sizes: Sizes, first_step: int = 0, last_step: int | None = None) -> Trace:
    """The same run written out: no ring, no thread, no loop of ours; or some steps of it, as a resume or stop does."""
    target = fresh_target(FAMILY)
    plan = blueprint(replace(sizes, targets=1), target)
    state = build_state(copy.deepcopy(plan.drafter), plan.ends, plan.state, CPU)
    inputs = StepInputs.allocate(SHAPE, BLOCK, CPU)
    batches, texts, losses = order(), documents(), list[float]()
    with PackedCapture(target, TAPS, SHAPE) as capture:
        for step in range(first_step, sizes.steps if last_step is None else last_step):
            gradients: list[Tensor] = []
            sums: list[Tensor] = []
            for index in range(sizes.drafters):
                for draw in range(step * sizes.accumulation, (step + 1) * sizes.accumulation):
                    number = draw // sizes.draws * sizes.drafters + index
                    batch = capture.run(batches.batch(number), texts)
                    accumulate(state, batch, draw_uniforms(SEED, number, draw % sizes.draws, TOKENS))
                gradients.append(state.parameters.grad_N.clone())
                sums.append(state.sums.clone())
                state.parameters.grad_N.zero_()
                state.sums.zero_()
            for gradient, part in zip(gradients, sums, strict=True):
                state.parameters.grad_N.add_(gradient)
                state.sums.add_(part)
            losses.append(float(state.sums[0].double() / state.sums[1].double()))
            update(state, inputs.totals)
    return Trace(losses, state.parameters.master_N.clone())
