"""A training run from its configuration to an exported, measured drafter."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from draftsmith.data.loader import BatchOrder
from draftsmith.data.prepare import PrepareConfig
from draftsmith.drafter.model import Drafter, DrafterConfig
from draftsmith.drafter.objectives import LossConfig
from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.evaluate.acceptance import EvalConfig, EvalResult, evaluate_prompts, plain_answers
from draftsmith.evaluate.export import export_zlab, load_zlab, verify_export
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.evaluate.prompts import Prompt
from draftsmith.evaluate.statistics import compare
from draftsmith.pipeline.assemble import Blueprint, Team, build_drafters, build_rings, build_targets
from draftsmith.pipeline.chief import Chief, Measured, Rhythm, idle_report, masters_on_cpu
from draftsmith.pipeline.documents import prompt_of
from draftsmith.pipeline.inputs import (
    TrainingData,
    capture_features,
    claim_folder,
    compute_dtype,
    epoch_index,
    load_data,
    start_drafter,
)
from draftsmith.pipeline.placement import Placement, place
from draftsmith.pipeline.resolve import (
    Batching,
    Choices,
    batch_shape,
    resolve_batching,
    resolve_drafter,
    resolve_loss,
    resolve_step,
)
from draftsmith.pipeline.settings import BatchOptions, DataOptions, DrafterOptions, MeasureOptions, PipelineConfig
from draftsmith.pipeline.show import ProgressView, print_choices, train_text
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.store import ShardReadLoop, StoreIndex, read_index
from draftsmith.pipeline.team import Producer, run_workers
from draftsmith.records import BatchShape
from draftsmith.target.model import Target, TargetConfig, load_target
from draftsmith.train.build import StateSpec
from draftsmith.train.checkpoint import Checkpoint, CheckpointConfig, RunRecord, load_checkpoint, restore
from draftsmith.train.checkpoint_writer import CheckpointWriter
from draftsmith.train.metrics import MetricsConfig, MetricsWriter, Sink, open_wandb
from draftsmith.train.optim import OptimConfig
from draftsmith.train.resume import compare_resume

CONFIG, DRAFTER, FEATURES, EVALUATION = "config.json", "drafter", "features", "evaluation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a person can say about a training run, by part."""

    out: str
    """The run's folder: log, checkpoints, drafter."""
    target: TargetConfig
    data: DataOptions
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    loss: LossConfig = field(default_factory=LossConfig)
    batch: BatchOptions = field(default_factory=BatchOptions)
    optim: OptimConfig = field(default_factory=OptimConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    resume: bool = False
    """Continue the run in `out` from its newest checkpoint."""
    allow_changed: tuple[str, ...] = ()
    """With --resume: parts that may differ from the checkpoint (data, target, mask-token, architecture, objective)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    out: Path
    steps: int
    before: EvalResult | None
    after: EvalResult | None
    drafter: Path
    seconds: float
    last: Mapping[str, Any]
    """The last log line's numbers."""
    interrupted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run with everything resolved, before its workers are built."""

    config: RunConfig
    run: Path
    console: Console
    target: Target
    data: TrainingData
    placement: Placement
    drafter_config: DrafterConfig
    drafter: Drafter
    batching: Batching
    shape: BatchShape
    state: StateSpec
    record: RunRecord
    stop: Stop


def train(config: RunConfig, console: Console) -> RunResult:
    """Run it all: load, prepare, choose, start, train, measure, export.

    Raises:
        DraftsmithError: whatever went wrong first, after what could be saved was saved.
    """
    started = time.perf_counter()
    if config.pipeline.threads:
        torch.set_num_threads(config.pipeline.threads)
    stage = _prepare_stage(config, console)
    prompts, evaluation = _prompts(stage)
    with console.status("decoding the held-out prompts plainly"):
        plains = plain_answers(stage.target, prompts, evaluation)

    def measure(drafter: Drafter, name: str) -> EvalResult:
        with ProgressView(console, f"measuring {name}", len(prompts)) as view:
            return evaluate_prompts(
                stage.target,
                drafter,
                prompts,
                evaluation,
                lambda done, _total, tau: view.update(done, f"tau {tau:.2f}"),
                plains,
                name,
            )

    before = measure(stage.drafter, "before") if config.measure.measure_start and prompts else None

    def measure_weights(_step: int, weights: dict[str, Tensor]) -> Measured:
        result = measure(_with_weights(stage.drafter_config, weights), "during")
        return result.summary.tau.value, result.to_dict()

    team, chief = _train(stage, measure_weights if prompts else None)
    weights = masters_on_cpu(team.drafters[0])
    steps = team.drafters[0].step
    after = measure(_with_weights(stage.drafter_config, weights), "after") if prompts else None
    folder = _export(stage, weights)
    _write_evaluation(stage.run, before, after)
    for line in idle_report(team):
        console.print(f"[yellow]{line}[/yellow]")
    return RunResult(
        out=stage.run,
        steps=steps,
        before=before,
        after=after,
        drafter=folder,
        seconds=time.perf_counter() - started,
        last=chief.last,
        interrupted=steps < stage.batching.total_steps,
    )


def _prepare_stage(config: RunConfig, console: Console) -> Stage:
    """Load and resolve everything, and say what was chosen."""
    run = claim_folder(Path(config.out), resume=config.resume)
    placement = place(config.pipeline, reads_features=bool(config.data.features))
    with console.status(f"loading target {config.target.target}"):
        target = load_target(config.target, placement.targets[0])
    data = load_data(config.data, config.prepare, target, run, console)
    choices = Choices()
    choices.note("workers", placement.describe(), placement.why)
    if config.drafter.init_from:
        drafter_config, drafter = load_zlab(config.drafter.init_from)
        choices.note("drafter", config.drafter.init_from, "its own architecture wins")
    else:
        drafter_config = resolve_drafter(config.drafter, target.facts, choices)
        drafter = start_drafter(drafter_config, config.drafter, target, config.batch.seed, console.print)
    loss = resolve_loss(config.loss, drafter_config.block_size, choices)
    batching = resolve_batching(
        config.batch,
        drafter_config,
        data.train.lengths,
        data.train.num_supervised(),
        placement.on_gpu,
        len(placement.drafters),
        choices,
    )
    dtype = compute_dtype(placement.on_gpu)
    state = StateSpec(
        loss=loss,
        step=resolve_step(config.pipeline, batching.num_anchors, placement.on_gpu, choices),
        optim=config.optim,
        total_steps=batching.total_steps,
        dtype=dtype,
        compiled=placement.on_gpu,
    )
    print_choices(console, choices)
    resolved = _resolved(config, target, drafter_config, loss.gamma, batching, data, placement)
    (run / CONFIG).write_text(json.dumps({"config": asdict(config), "resolved": resolved}, indent=1), encoding="utf-8")
    return Stage(
        config=config,
        run=run,
        console=console,
        target=target,
        data=data,
        placement=placement,
        drafter_config=drafter_config,
        drafter=drafter,
        batching=batching,
        shape=batch_shape(batching, drafter_config, dtype, config.loss.distilled),
        state=state,
        record=RunRecord(config=resolved, data_fingerprint=data.fingerprint),
        stop=Stop(),
    )


def _resolved(
    config: RunConfig,
    target: Target,
    drafter: DrafterConfig,
    gamma: float,
    batching: Batching,
    data: TrainingData,
    placement: Placement,
) -> dict[str, Any]:
    """What a checkpoint pins down, by the names that a resume compares."""
    return {
        "target": {"name": target.facts.name, "template": target.facts.template_hash, "adapter": config.target.adapter},
        "data": data.fingerprint,
        "mask-token": drafter.mask_token_id,
        "architecture": json.loads(json.dumps(asdict(drafter), default=dict)),
        "objective": {**asdict(config.loss), "gamma": gamma},
        "batching": asdict(batching),
        "gpus": placement.describe(),
        "threads": torch.get_num_threads(),
    }


def _prompts(stage: Stage) -> tuple[list[Prompt], EvalConfig]:
    """What is measured on: the prompts named, or the conversations held out."""
    options = stage.config.measure
    evaluation = EvalConfig(
        prompts=options.prompts or ("held-out",),
        num_prompts=options.num_prompts,
        max_new_tokens=options.max_new_tokens,
        template_kwargs=stage.config.prepare.tokenize.template_kwargs,
    )
    if options.prompts:
        return evaluation.load(), evaluation
    held_out = stage.data.held_out
    count = min(len(held_out), options.num_prompts or len(held_out))
    ids = [tuple(prompt_of(held_out[index])) for index in range(count)]
    return [Prompt(source="held-out", token_ids=prompt) for prompt in ids if prompt], evaluation


def _train(stage: Stage, measure: Any) -> tuple[Team, Chief]:
    """Build the team, train to the end or to the first failure or signal."""
    config, console = stage.config, stage.console
    order = BatchOrder(stage.data.train.lengths, stage.batching.buckets, stage.batching.order)
    store = _store(stage, order)
    checkpoint = load_checkpoint(stage.run) if config.resume else None
    if checkpoint is not None:
        for remark in compare_resume(checkpoint.record.config, stage.record.config, set(config.allow_changed)):
            console.print(f"[yellow]{remark}[/yellow]")
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if config.metrics.wandb_project:
            sinks.append(open_wandb(config.metrics.wandb_project, stage.run, stage.record.config))
        writer = stack.enter_context(
            MetricsWriter(
                stage.run,
                position=checkpoint.position.metrics_bytes if checkpoint else 0,
                resumed_step=checkpoint.position.step if checkpoint else 0,
                sinks=sinks,
            )
        )
        total = stage.batching.total_steps
        done = checkpoint.position.step if checkpoint else 0
        view = ProgressView(console, "training", total, done)
        rhythm = Rhythm(
            log_every=config.metrics.log_every,
            save_every=config.checkpoint.save_every,
            eval_every=config.measure.eval_every,
            total_steps=total,
        )
        chief = Chief(
            rhythm, writer, measure, lambda line: view.update(int(line["step"]), train_text(line)), stage.stop
        )
        team = _build_team(stage, order, store, chief)
        saver = stack.enter_context(
            CheckpointWriter(stage.run, config.checkpoint, team.drafters[0].stepper.state, stage.record)
        )
        if checkpoint is not None:
            _continue(team, checkpoint, console)
        chief.join(team, saver)
        stack.enter_context(view)
        stack.enter_context(Signals(stage.stop, console))
        try:
            run_workers(team.workers(), stage.stop, lambda: None)
        finally:
            if stage.stop.failed:
                chief.rescue()
    return team, chief


def _store(stage: Stage, order: BatchOrder) -> tuple[Path, StoreIndex] | None:
    """Features on disk, captured first where asked to."""
    data, taps = stage.config.data, stage.drafter_config.taps
    if data.features:
        folder = Path(data.features)
        index = read_index(folder)
        if index.shape != stage.shape or index.taps != taps or index.target != stage.target.facts.name:
            raise ConfigError(
                f"{folder} holds features of {index.target}, taps {list(index.taps)}, {index.num_tokens:,} tokens; "
                f"this run needs {stage.target.facts.name}, {list(taps)}, {stage.shape.num_tokens:,}: capture again"
            )
        return folder, index
    if not data.cache_features:
        return None
    folder = stage.run / FEATURES
    index = epoch_index(stage.shape, order, stage.target, taps, stage.data.fingerprint)
    started, seen = time.perf_counter(), 0
    with ProgressView(stage.console, "capturing features", index.num_batches) as view:

        def tell(done: int, _total: int, tokens: int) -> None:
            nonlocal seen
            seen += tokens
            view.update(done, f"{seen / (time.perf_counter() - started):,.0f} tokens/s")

        capture_features(folder, stage.target, taps, stage.data.train, order, index, tell)
    return folder, index


def _build_team(stage: Stage, order: BatchOrder, store: tuple[Path, StoreIndex] | None, chief: Chief) -> Team:
    """Rings, drafters, then targets, each compiled and captured before the next."""
    plan = Blueprint(
        placement=stage.placement,
        pipeline=stage.config.pipeline,
        batching=stage.batching,
        shape=stage.shape,
        state=stage.state,
        drafter=stage.drafter,
        ends=stage.target.ends(),
        seed=stage.config.batch.seed,
        stop=stage.stop,
        say=stage.console.print,
    )
    rings = build_rings(plan)
    drafters, streams = build_drafters(plan, rings, chief.after_step)
    if store is not None:
        folder, index = store
        seed = stage.config.batch.seed
        names = range(len(stage.placement.targets))
        producers: list[Producer] = [
            ShardReadLoop(f"reader {i}", folder, index, rings, seed, stage.stop) for i in names
        ]
    else:
        devices = stage.placement.targets[1:]
        targets = [stage.target, *(load_target(stage.config.target, device) for device in devices)]
        producers = build_targets(plan, targets, stage.data.train, order, rings)
    return Team(
        producers=producers, drafters=drafters, streams=streams, rings=rings, placement=stage.placement, stop=stage.stop
    )


def _continue(team: Team, checkpoint: Checkpoint, console: Console) -> None:
    """Put every drafter and ring where the checkpoint was taken."""
    position = checkpoint.position
    for drafter, ring in zip(team.drafters, team.rings, strict=True):
        restore(drafter.stepper.state, checkpoint)
        drafter.draws_done = position.step * drafter.plan.accumulation
        ring.start_at(drafter.draws_done // drafter.plan.draws_per_batch)
    console.print(f"continuing from step {position.step:,} ({checkpoint.path.name})")


def _with_weights(config: DrafterConfig, weights: Mapping[str, Tensor]) -> Drafter:
    drafter = Drafter(config)
    drafter.load_state_dict(dict(weights))
    return drafter


def _export(stage: Stage, weights: dict[str, Tensor]) -> Path:
    """The z-lab folder, read back and checked."""
    info = ExportInfo.of(stage.target.facts, stage.target.ends())
    out = export_zlab(stage.drafter, weights, info, stage.run / DRAFTER, torch.bfloat16)
    verify_export(out, stage.drafter_config, stage.target.facts)
    return out


def _write_evaluation(run: Path, before: EvalResult | None, after: EvalResult | None) -> None:
    results = {"before": before, "after": after}
    body = {name: result.to_dict() for name, result in results.items() if result is not None}
    (run / EVALUATION).write_text(json.dumps(body), encoding="utf-8")


def verdict(result: RunResult) -> str:
    """One sentence on whether training made the drafter better, beyond the interval."""
    if result.before is None or result.after is None:
        return "not measured: there were no prompts to measure on"
    return compare("after", result.after.answers, "before", result.before.answers).verdict


class Signals:
    """SIGINT and SIGTERM ask the run to finish its step, save and end; a second one ends it at once."""

    def __init__(self, stop: Stop, console: Console) -> None:
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


def dry_run_config(config: RunConfig, out: Path) -> RunConfig:
    """The same run cut to three steps, one checkpoint, one export and one short evaluation, in a folder of its own."""
    if config.resume:
        raise CheckpointError("--dry-run starts anew: drop --resume")
    return replace(
        config,
        out=str(out),
        batch=replace(config.batch, max_steps=3),
        checkpoint=replace(config.checkpoint, save_every=3),
        metrics=replace(config.metrics, log_every=1, wandb_project=""),
        measure=replace(config.measure, num_prompts=1, max_new_tokens=16, eval_every=0),
    )
