"""Builds the workers of a local run, device after device: rings, targets and hooks, drafters and graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.data.buckets import forward_rows
from draftsmith.data.loader import BatchOrder
from draftsmith.drafter.model import Drafter
from draftsmith.pipeline.buffers import FeatureRing, RingPlace
from draftsmith.pipeline.drafter_loop import DrafterTrainLoop, DrawPlan
from draftsmith.pipeline.inputs import context_of
from draftsmith.pipeline.placement import Placement
from draftsmith.pipeline.producing import Outlet, Producer
from draftsmith.pipeline.reduce import LocalGroup, LocalReducer, NoReduce, Reducer
from draftsmith.pipeline.resolve import Batching
from draftsmith.pipeline.settings import PipelineConfig
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.target_loop import TargetForwardLoop
from draftsmith.pipeline.team import Worker, joint_loop, make_stream, split_loops
from draftsmith.records import BatchShape, Document, FrozenEnds
from draftsmith.target.capture import PackedCapture
from draftsmith.target.compute import allow_graphs, check_fp8_device, layer_kinds, to_fp8, warm_up
from draftsmith.target.model import Target
from draftsmith.train.build import StateSpec, build_state, check_sizes
from draftsmith.train.graph import CapturedStep, PlainStep, StepInputs, Stepper
from draftsmith.train.step import TrainState

FP8_SAMPLE = 8
"""Documents that 8-bit targets are held against native ones on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Everything a local team is built from."""

    placement: Placement
    pipeline: PipelineConfig
    batching: Batching
    shape: BatchShape
    state: StateSpec
    drafter: Drafter
    """Initial weights, fp32 on the CPU; every drafter starts from a copy."""
    ends: FrozenEnds
    seed: int
    stop: Stop
    say: Callable[[str], None]
    fp8: bool = False
    """Whether targets run their large products in 8-bit floats; what is measured then answers for that target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The built workers."""

    producers: list[Producer]
    drafters: list[DrafterTrainLoop]
    streams: list[torch.cuda.Stream | None]
    """One per drafter: the stream it was captured on."""
    rings: list[FeatureRing]
    placement: Placement
    stop: Stop
    is_remote: bool = False
    """Whether the producers stand for targets in other processes."""

    @property
    def chief_worker(self) -> str:
        """Name of the thread that the first drafter runs in."""
        return "worker 0" if self.placement.joint else self.drafters[0].clock.name

    def close(self) -> None:
        """Take the producers' hooks off their targets."""
        for producer in self.producers:
            producer.close()

    def workers(self) -> list[Worker]:
        """Threads to run: one per worker, or one per device where roles are joint."""
        place = self.placement
        if place.joint:
            pairs = zip(self.producers, self.drafters, strict=True)
            loops = [joint_loop(producer, drafter, self.stop) for producer, drafter in pairs]
            names = [f"worker {index}" for index in range(len(loops))]
            devices, streams = list(place.drafters), list(self.streams)
        else:
            loops = split_loops(self.producers, self.drafters, self.rings, self.stop)
            names = [loop.clock.name for loop in (*self.producers, *self.drafters)]
            devices = [*place.targets, *place.drafters]
            streams = [*(make_stream(device) for device in place.targets), *self.streams]
        return [
            Worker(name=name, device=device, stream=stream, loop=loop)
            for name, device, stream, loop in zip(names, devices, streams, loops, strict=True)
        ]


def build_rings(plan: Blueprint) -> list[FeatureRing]:
    """A ring per drafter."""
    return [build_ring(plan, index) for index in range(len(plan.placement.drafters))]


def build_ring(plan: Blueprint, index: int) -> FeatureRing:
    """A drafter's ring: on its own device where every target shares or reaches it, else pinned on the host."""
    device = plan.placement.drafters[index]
    same = all(target == device for target in plan.placement.targets) or plan.placement.joint
    if device.type == "cpu" or same or _all_reach(plan.placement.targets, device):
        where, pin = device, False
    else:
        where, pin = torch.device("cpu"), True
    place = RingPlace(
        name=f"the ring of drafter {index}",
        device=where,
        pin=pin,
        num_slots=1 if plan.placement.joint else plan.pipeline.ring_slots,
        stall_seconds=plan.pipeline.stall_seconds,
    )
    plan.say(f"{place.name}: {place.num_slots} x {plan.shape.num_bytes / 1e9:.2f} GB on {where}{', pinned' * pin}")
    return FeatureRing(plan.shape, place, plan.stop)


def _all_reach(targets: Sequence[torch.device], device: torch.device) -> bool:
    """Whether every target GPU can write into `device`'s memory directly."""
    if device.type != "cuda" or any(target.type != "cuda" for target in targets):
        return False
    return all(target == device or torch.cuda.can_device_access_peer(target.index, device.index) for target in targets)


def build_drafters(
    plan: Blueprint, rings: list[FeatureRing], after_step: Callable[[int, bool], None]
) -> tuple[list[DrafterTrainLoop], list[torch.cuda.Stream | None]]:
    """Drafter after drafter: weights and moments, compile, capture, self-test. `after_step` is the first drafter's."""
    devices = plan.placement.drafters
    group = LocalGroup(len(devices), plan.stop, plan.pipeline.stall_seconds) if len(devices) > 1 else None
    loops: list[DrafterTrainLoop] = []
    streams: list[torch.cuda.Stream | None] = []
    for index in range(len(devices)):
        told = after_step if index == 0 else _nothing
        loop, stream = build_drafter(plan, index, rings[index], _local_reducer(group, index), told)
        loops.append(loop)
        streams.append(stream)
    return loops, streams


def _local_reducer(group: LocalGroup | None, index: int) -> Callable[[TrainState], Reducer]:
    return lambda state: NoReduce() if group is None else LocalReducer(group, index, state)


def build_drafter(
    plan: Blueprint,
    index: int,
    ring: FeatureRing,
    reducer_of: Callable[[TrainState], Reducer],
    after_step: Callable[[int, bool], None],
) -> tuple[DrafterTrainLoop, torch.cuda.Stream | None]:
    """Drafter `index` on its device, with the stream it was captured on.

    Raises:
        ConfigError: sizes that the step can't compute with.
    """
    device = plan.placement.drafters[index]
    check_sizes(plan.state.step, plan.shape, plan.drafter.config.block_size)
    stream = make_stream(device)
    if stream is None:
        stepper = _build_stepper(plan, device)
    else:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stepper = _build_stepper(plan, device)
            stream.synchronize()
    draws = draw_plan(plan, index)
    reducer = reducer_of(stepper.state)
    return DrafterTrainLoop(f"drafter {index}", stepper, ring, draws, reducer, plan.stop, after_step), stream


def draw_plan(plan: Blueprint, index: int) -> DrawPlan:
    """Which draws drafter `index` makes."""
    return DrawPlan(
        seed=plan.seed,
        drafter=index,
        num_drafters=len(plan.placement.drafters),
        draws_per_batch=plan.batching.draws_per_batch,
        accumulation=plan.batching.accumulation,
        total_steps=plan.batching.total_steps,
    )


def _nothing(_step: int, _is_last: bool) -> None:
    return


def _build_stepper(plan: Blueprint, device: torch.device) -> Stepper:
    ends = ends_on(plan.ends, device, plan.state.dtype)
    state = build_state(copy.deepcopy(plan.drafter), ends, plan.state, device)
    inputs = StepInputs.allocate(plan.shape, plan.drafter.config.block_size, device)
    if device.type != "cuda" or plan.pipeline.capture == "off":
        return PlainStep(state, inputs)
    stepper = CapturedStep(state, inputs, torch.cuda.current_stream(device))
    plan.say(f"drafter step captured on {device} in {stepper.capture_seconds:.0f} s")
    return stepper


def ends_on(ends: FrozenEnds, device: torch.device, dtype: torch.dtype) -> FrozenEnds:
    """The target's embedding and head on a drafter's device and in its dtype; shared where they are there already."""
    tied = ends.head_VH is ends.embedding_VH
    embedding = ends.embedding_VH.to(device=device, dtype=dtype)
    return FrozenEnds(
        embedding_VH=embedding,
        head_VH=embedding if tied else ends.head_VH.to(device=device, dtype=dtype),
        head_bias_V=None if ends.head_bias_V is None else ends.head_bias_V.to(device=device, dtype=dtype),
        logit_scale=ends.logit_scale,
        soft_cap=ends.soft_cap,
        embedding_scale=ends.embedding_scale,
    )


def build_targets(
    plan: Blueprint,
    targets: Sequence[Target],
    documents: Sequence[Document],
    order: BatchOrder,
    rings: Sequence[Outlet],
    first: int = 0,
) -> list[Producer]:
    """Target after target, numbered from `first`: layers compiled for the bucket shapes on GPUs, stagings, hooks."""
    taps = plan.drafter.config.taps
    shapes = [(forward_rows(bucket, plan.batching.order), bucket) for bucket in plan.batching.buckets]
    producers: list[Producer] = []
    for index, target in enumerate(targets, start=first):
        if plan.fp8:
            check_fp8_device(target.device)
            report = to_fp8(target, documents[:FP8_SAMPLE], taps)
            errors = ", ".join(f"{error:.1%}" for error in report.relative_error)
            plan.say(
                f"target {index}: {report.num_replaced} products in 8-bit floats; features differ by {errors} a tap, "
                f"the likeliest next token agrees for {report.top1_agreement:.1%} of tokens"
            )
        if target.device.type == "cuda":
            allow_graphs(shapes=len(shapes), layer_kinds=layer_kinds(target), devices=len(targets))
            with torch.cuda.device(target.device):
                warm = warm_up(target, None if plan.shape.last_hidden else taps[-1], shapes)
            plan.say(f"target {index} compiled for {len(shapes)} shapes in {sum(warm.seconds.values()):.0f} s")
        stagings = [stage_capture(plan, target) for _ in range(2 if target.device.type == "cuda" else 1)]
        producers.append(TargetForwardLoop(f"target {index}", stagings, order, documents, rings))
    return producers


def stage_capture(plan: Blueprint, target: Target) -> PackedCapture:
    """A target's staging batch: of features, or of the context that the drafter's frozen part makes of them."""
    context = None
    if plan.state.freeze_context:
        context = context_of(plan.drafter, target.device, plan.shape.dtype)
    return PackedCapture(target, plan.drafter.config.taps, plan.shape, context)
