"""Training itself: a team built and run, its log and checkpoints, signals. Measuring is handed in."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from draftsmith.data.loader import BatchOrder
from draftsmith.pipeline.assemble import Blueprint, Team, build_drafters, build_rings, build_targets, stage_capture
from draftsmith.pipeline.chief import Chief, Measure, Rhythm
from draftsmith.pipeline.drafter_loop import DrafterTrainLoop
from draftsmith.pipeline.inputs import capture_features
from draftsmith.pipeline.live import TrainView
from draftsmith.pipeline.producing import Producer
from draftsmith.pipeline.show import ProgressView
from draftsmith.pipeline.stage import Stage
from draftsmith.pipeline.store import ShardReadLoop, StoreIndex
from draftsmith.pipeline.team import run_workers
from draftsmith.pipeline.utilisation import open_sampler
from draftsmith.target.model import load_target
from draftsmith.train.checkpoint import Checkpoint, checkpoint_folders, discard_after, load_checkpoint, restore
from draftsmith.train.checkpoint_writer import CheckpointWriter
from draftsmith.train.metrics import MetricsWriter, Sink, open_wandb
from draftsmith.train.resume import compare_resume

FEATURES = "features"
AfterStep = Callable[[int, bool], None]


class Requests(Protocol):
    """What a signal asks for an orderly end: a Stop, or the world of a distributed run."""

    @property
    def requested(self) -> bool: ...

    def request(self) -> None: ...


class Crew(Protocol):
    """How the workers of a run are built and run: threads here, or ranks."""

    @property
    def signals(self) -> Requests:
        """Who hears of a signal."""
        ...

    def build(self, stage: Stage, after_step: AfterStep) -> Team:
        """The team whose first drafter calls `after_step`."""
        ...

    def start(self, team: Team, checkpoint: Checkpoint | None) -> None:
        """Everything is built and stands where the checkpoint says."""
        ...

    def run(self, team: Team) -> None:
        """Train to the end, or raise the first failure."""
        ...


class LocalCrew:
    """Threads of this process."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    @property
    def signals(self) -> Requests:
        """The run's own stop."""
        return self._stage.stop

    def build(self, stage: Stage, after_step: AfterStep) -> Team:
        """Rings, drafters, then targets, each compiled and captured before the next."""
        order = stage.order()
        return build_team(stage, order, stage.inputs.store or _cached(stage, order), after_step)

    def start(self, team: Team, checkpoint: Checkpoint | None) -> None:
        """What was zeroed and copied on other streams while building is done."""
        for device in {*team.placement.targets, *team.placement.drafters}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def run(self, team: Team) -> None:
        """A thread per worker."""
        run_workers(team.workers(), team.stop, _nothing)


def train_stage(stage: Stage, measure: Measure | None, crew: Crew) -> tuple[Team, Chief]:
    """Build the team, train to the end or to the first failure or signal.

    Raises:
        DraftsmithError: the first failure, after the last whole step was saved where that could be.
    """
    config, console, total = stage.config, stage.console, stage.batching.total_steps
    checkpoint = _newest(stage) if config.resume else None
    if checkpoint is not None:
        for name in discard_after(stage.run, checkpoint.position.step):
            console.print(f"[yellow]left out {name}: newer than the checkpoint that can be read[/yellow]")
        for remark in compare_resume(checkpoint.record.config, stage.record.config, set(config.allow_changed)):
            console.print(f"[yellow]{remark}[/yellow]")
    with ExitStack() as stack:
        writer = stack.enter_context(_writer(stage, checkpoint))
        view = TrainView(console, total, checkpoint.position.step if checkpoint else 0)
        rhythm = Rhythm(
            log_every=config.metrics.log_every,
            save_every=config.checkpoint.save_every,
            eval_every=config.measure.eval_every,
            total_steps=total,
            strict=config.pipeline.strict,
        )
        chief = Chief(rhythm, writer, measure, view.show, stage.stop)
        team = crew.build(stage, chief.after_step)
        stack.callback(team.close)
        state, extra = team.drafters[0].stepper.state, {"totals": team.drafters[0].stepper.inputs.totals}
        saver = stack.enter_context(CheckpointWriter(stage.run, config.checkpoint, state, stage.record, extra))
        if checkpoint is not None:
            for drafter in team.drafters:
                continue_from(drafter, checkpoint)
            console.print(f"continuing from step {checkpoint.position.step:,} ({checkpoint.path.name})")
        devices = [*team.placement.targets, *team.placement.drafters]
        chief.join(team, saver, stack.enter_context(open_sampler(devices, console.print)))
        stack.enter_context(view)
        stack.enter_context(Signals(crew.signals, console))
        crew.start(team, checkpoint)
        try:
            crew.run(team)
        finally:
            if stage.stop.failed:
                chief.rescue()
    return team, chief


def _newest(stage: Stage) -> Checkpoint | None:
    """The newest checkpoint that can be read; None where a run was killed before it wrote its first."""
    if not checkpoint_folders(stage.run / "checkpoints"):
        stage.console.print("[yellow]no checkpoint was written yet: starting from step 0[/yellow]")
        return None
    return load_checkpoint(stage.run)


def _nothing() -> None:
    return


def blueprint_of(stage: Stage) -> Blueprint:
    """What workers are built from."""
    return Blueprint(
        placement=stage.placement,
        pipeline=stage.config.pipeline,
        batching=stage.batching,
        shape=stage.shape,
        state=stage.state,
        drafter=stage.start.drafter,
        ends=stage.target.ends(),
        seed=stage.config.batch.seed,
        stop=stage.stop,
        say=stage.console.print,
        fp8=stage.config.target.target_compute == "fp8",
    )


def build_team(
    stage: Stage,
    order: BatchOrder | None,
    store: tuple[Path, StoreIndex] | None,
    after_step: AfterStep,
) -> Team:
    """Rings, drafters, then targets, each compiled and captured before the next."""
    plan = blueprint_of(stage)
    rings = build_rings(plan)
    drafters, streams = build_drafters(plan, rings, after_step)
    producers: list[Producer] = []
    if store is not None:
        folder, index = store
        for number in range(len(stage.placement.targets)):
            producers.append(ShardReadLoop(f"reader {number}", folder, index, rings, plan.seed))
    else:
        assert order is not None
        assert stage.inputs.data is not None
        others = stage.placement.targets[1:]
        targets = [stage.target, *(load_target(stage.config.target, device) for device in others)]
        producers = build_targets(plan, targets, stage.inputs.data.train, order, rings)
    return Team(
        producers=producers, drafters=drafters, streams=streams, rings=rings, placement=stage.placement, stop=stage.stop
    )


def continue_from(drafter: DrafterTrainLoop, checkpoint: Checkpoint) -> None:
    """Put a drafter, and its ring, where the checkpoint was taken."""
    restore(drafter.stepper.state, checkpoint, {"totals": drafter.stepper.inputs.totals})
    drafter.start_at(checkpoint.position.step)


def _writer(stage: Stage, checkpoint: Checkpoint | None) -> MetricsWriter:
    sinks: list[Sink] = []
    if stage.config.metrics.wandb_project:
        sinks.append(open_wandb(stage.config.metrics.wandb_project, stage.run, stage.record.config))
    if checkpoint is None:
        return MetricsWriter(stage.run, sinks=sinks)
    position = checkpoint.position
    return MetricsWriter(stage.run, position=position.metrics_bytes, resumed_step=position.step, sinks=sinks)


def _cached(stage: Stage, order: BatchOrder | None) -> tuple[Path, StoreIndex] | None:
    """Features of one epoch in the run's folder, captured now where asked to."""
    if not stage.config.data.cache_features or order is None:
        return None
    return capture_epoch(stage, stage.run / FEATURES, order)


def capture_epoch(stage: Stage, folder: Path, order: BatchOrder) -> tuple[Path, StoreIndex]:
    """Capture the features of one epoch into `folder`, going on where an earlier try stopped."""
    data = stage.inputs.data
    assert data is not None
    index = stage.epoch_index(order, data)
    started, seen = time.perf_counter(), 0
    with ProgressView(stage.console, "capturing features", index.num_batches) as view:

        def tell(done: int, _total: int, tokens: int) -> None:
            nonlocal seen
            seen += tokens
            view.update(done, f"{seen / (time.perf_counter() - started):,.0f} tokens/s")

        with stage_capture(blueprint_of(stage), stage.target) as capture:
            capture_features(folder, capture, data.train, order, index, tell)
    return folder, index


class Signals:
    """SIGINT and SIGTERM ask the run to finish its step, save and end; a second one ends it at once."""

    def __init__(self, stop: Requests, console: Console) -> None:
        self._stop, self._console = stop, console
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._stop.requested:
            os._exit(128 + number)
        self._stop.request()
        self._console.print("finishing the step, then saving; once more to end at once")
