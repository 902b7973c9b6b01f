"""A training run from its configuration to an exported, measured drafter."""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from draftsmith.data.loader import BatchOrder
from draftsmith.drafter.model import Drafter, DrafterConfig
from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.evaluate.acceptance import EvalConfig, EvalResult, Progress, evaluate_prompts, plain_answers
from draftsmith.evaluate.decode import Plain
from draftsmith.evaluate.export import export_zlab, load_zlab, verify_export
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.evaluate.prompts import Prompt
from draftsmith.evaluate.statistics import compare
from draftsmith.pipeline.assemble import Blueprint, Team, build_drafters, build_rings, build_targets
from draftsmith.pipeline.chief import Chief, Measure, Measured, Rhythm, idle_report, masters_on_cpu
from draftsmith.pipeline.documents import prompt_of
from draftsmith.pipeline.inputs import capture_features, claim_folder, start_drafter
from draftsmith.pipeline.producing import Producer
from draftsmith.pipeline.resolve import Choices, resolve_drafter
from draftsmith.pipeline.show import ProgressView, print_choices, train_text
from draftsmith.pipeline.stage import Inputs, RunConfig, Stage, Start, load_inputs, resolve_stage
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.store import ShardReadLoop, StoreIndex
from draftsmith.pipeline.team import run_workers
from draftsmith.target.compute import uncompiled
from draftsmith.target.model import load_target
from draftsmith.train.checkpoint import Checkpoint, discard_after, load_checkpoint, restore
from draftsmith.train.checkpoint_writer import CheckpointWriter
from draftsmith.train.metrics import MetricsWriter, Sink, open_wandb
from draftsmith.train.resume import compare_resume

CONFIG, DRAFTER, FEATURES, EVALUATION = "config.json", "drafter", "features", "evaluation.json"


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
class Yardstick:
    """The prompts that a run measures itself on, and the target's own answers, decoded once."""

    stage: Stage
    prompts: list[Prompt]
    config: EvalConfig
    plains: list[Plain]

    def measure(self, drafter: Drafter, name: str) -> EvalResult | None:
        """The true loop's result; None where there is nothing to measure on."""
        if not self.prompts:
            return None
        with ProgressView(self.stage.console, f"measuring {name}", len(self.prompts)) as view:

            def tell(done: int, _total: int, tau: float) -> None:
                view.update(done, f"tau {tau:.2f}")

            return self._answer(drafter, name, tell)

    def _answer(self, drafter: Drafter, name: str, tell: Progress | None) -> EvalResult:
        target = self.stage.target
        beside = copy.deepcopy(drafter).to(target.device)
        with uncompiled(target):
            return evaluate_prompts(target, beside, self.prompts, self.config, tell, self.plains, name)

    def during(self) -> Measure | None:
        """For the chief: a score and the numbers of its log line."""
        if not self.prompts:
            return None

        def measure(_step: int, weights: dict[str, Tensor]) -> Measured:
            drafter = _with_weights(self.stage.start.config, weights)
            result = self._answer(drafter, "during", None)
            return result.summary.tau.value, result.to_dict()["summary"]

        return measure


def train(config: RunConfig, console: Console) -> RunResult:
    """Run it all: load, prepare, choose, start, train, measure, export.

    Raises:
        DraftsmithError: whatever went wrong first, after what could be saved was saved.
    """
    started = time.perf_counter()
    if config.pipeline.threads:
        torch.set_num_threads(config.pipeline.threads)
    run = claim_folder(Path(config.out), resume=config.resume)
    stage = prepare_stage(config, run, load_inputs(config, run, console), console)
    record = {"config": asdict(config), "resolved": dict(stage.record.config)}
    (run / CONFIG).write_text(json.dumps(record, indent=1), encoding="utf-8")
    yardstick = _yardstick(stage)
    before = yardstick.measure(stage.start.drafter, "before") if config.measure.measure_start else None
    team, chief = _train(stage, yardstick.during())
    weights = masters_on_cpu(team.drafters[0])
    steps = team.drafters[0].step
    after = yardstick.measure(_with_weights(stage.start.config, weights), "after")
    folder = _export(stage, weights)
    results = {"before": before, "after": after}
    body = {name: result.to_dict() for name, result in results.items() if result is not None}
    (run / EVALUATION).write_text(json.dumps(body), encoding="utf-8")
    for line in idle_report(team):
        console.print(f"[yellow]{line}[/yellow]")
    return RunResult(
        out=run,
        steps=steps,
        before=before,
        after=after,
        drafter=folder,
        seconds=time.perf_counter() - started,
        last=chief.last,
        interrupted=steps < stage.batching.total_steps,
    )


def prepare_stage(config: RunConfig, run: Path, inputs: Inputs, console: Console) -> Stage:
    """Start the drafter, choose what was left open, and say what was chosen and why."""
    choices = Choices()
    choices.note("workers", inputs.placement.describe(), inputs.placement.why)
    if config.drafter.init_from:
        drafter_config, drafter = load_zlab(config.drafter.init_from)
        choices.note("drafter", config.drafter.init_from, "its own architecture wins")
    else:
        drafter_config = resolve_drafter(config.drafter, inputs.target.facts, choices)
        seed = config.batch.seed
        drafter = start_drafter(drafter_config, config.drafter, inputs.target, seed, console.print)
    start = Start(config=drafter_config, drafter=drafter)
    stage = resolve_stage(config, run, console, inputs, start, choices)
    print_choices(console, choices)
    return stage


def _yardstick(stage: Stage) -> Yardstick:
    """What is measured on: the prompts named, or the conversations held out."""
    options, data = stage.config.measure, stage.inputs.data
    config = EvalConfig(
        prompts=options.prompts or ("held-out",),
        num_prompts=options.num_prompts,
        max_new_tokens=options.max_new_tokens,
        template_kwargs=stage.config.prepare.tokenize.template_kwargs,
    )
    prompts: list[Prompt] = []
    if options.prompts:
        prompts = config.load()
    elif data is not None:
        count = min(len(data.held_out), options.num_prompts or len(data.held_out))
        ids = [tuple(prompt_of(data.held_out[index])) for index in range(count)]
        prompts = [Prompt(source="held-out", token_ids=prompt) for prompt in ids if prompt]
    with stage.console.status(f"decoding {len(prompts)} prompts plainly, to compare with"):
        plains = plain_answers(stage.target, prompts, config)
    return Yardstick(stage=stage, prompts=prompts, config=config, plains=plains)


def _train(stage: Stage, measure: Measure | None) -> tuple[Team, Chief]:
    """Build the team, train to the end or to the first failure or signal."""
    config, console, total = stage.config, stage.console, stage.batching.total_steps
    order = stage.order()
    store = stage.inputs.store or _cached(stage, order)
    checkpoint = load_checkpoint(stage.run) if config.resume else None
    if checkpoint is not None:
        for name in discard_after(stage.run, checkpoint.position.step):
            console.print(f"[yellow]left out {name}: newer than the checkpoint that can be read[/yellow]")
        for remark in compare_resume(checkpoint.record.config, stage.record.config, set(config.allow_changed)):
            console.print(f"[yellow]{remark}[/yellow]")
    with ExitStack() as stack:
        writer = stack.enter_context(_writer(stage, checkpoint))
        view = ProgressView(console, "training", total, checkpoint.position.step if checkpoint else 0)
        rhythm = Rhythm(
            log_every=config.metrics.log_every,
            save_every=config.checkpoint.save_every,
            eval_every=config.measure.eval_every,
            total_steps=total,
        )

        def show(line: Mapping[str, Any]) -> None:
            view.update(int(line["step"]), train_text(line))

        chief = Chief(rhythm, writer, measure, show, stage.stop)
        team = _build_team(stage, order, store, chief.after_step)
        stack.callback(team.close)
        state, extra = team.drafters[0].stepper.state, {"totals": team.drafters[0].stepper.inputs.totals}
        saver = stack.enter_context(CheckpointWriter(stage.run, config.checkpoint, state, stage.record, extra))
        if checkpoint is not None:
            _continue(team, checkpoint, console)
        chief.join(team, saver)
        stack.enter_context(view)
        stack.enter_context(Signals(stage.stop, console))
        for device in {*stage.placement.targets, *stage.placement.drafters}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # buffers were zeroed and weights copied on other streams
        try:
            run_workers(team.workers(), stage.stop, _nothing)
        finally:
            if stage.stop.failed:
                chief.rescue()
    return team, chief


def _nothing() -> None:
    return


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
    return _capture(stage, stage.run / FEATURES, order)


def _capture(stage: Stage, folder: Path, order: BatchOrder) -> tuple[Path, StoreIndex]:
    data = stage.inputs.data
    assert data is not None
    index = stage.epoch_index(order, data)
    started, seen = time.perf_counter(), 0
    with ProgressView(stage.console, "capturing features", index.num_batches) as view:

        def tell(done: int, _total: int, tokens: int) -> None:
            nonlocal seen
            seen += tokens
            view.update(done, f"{seen / (time.perf_counter() - started):,.0f} tokens/s")

        capture_features(folder, stage.target, stage.start.config.taps, data.train, order, index, tell)
    return folder, index


def capture_only(config: RunConfig, console: Console) -> Path:
    """Capture one epoch's features into `config.out`, going on where an earlier try stopped.

    Raises:
        ConfigError: no conversations named.
    """
    if not config.data.data:
        raise ConfigError("nothing to capture: give --data CHATS")
    out = Path(config.out)
    stage = prepare_stage(config, out, load_inputs(config, None, console), console)
    order = stage.order()
    assert order is not None
    return _capture(stage, out, order)[0]


def _build_team(
    stage: Stage,
    order: BatchOrder | None,
    store: tuple[Path, StoreIndex] | None,
    after_step: Callable[[int, bool], None],
) -> Team:
    """Rings, drafters, then targets, each compiled and captured before the next."""
    plan = Blueprint(
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
    )
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


def _continue(team: Team, checkpoint: Checkpoint, console: Console) -> None:
    """Put every drafter, and its ring, where the checkpoint was taken."""
    position = checkpoint.position
    for drafter in team.drafters:
        restore(drafter.stepper.state, checkpoint, {"totals": drafter.stepper.inputs.totals})
        drafter.start_at(position.step)
    console.print(f"continuing from step {position.step:,} ({checkpoint.path.name})")


def _with_weights(config: DrafterConfig, weights: Mapping[str, Tensor]) -> Drafter:
    drafter = Drafter(config)
    drafter.load_state_dict(dict(weights))
    return drafter


def _export(stage: Stage, weights: dict[str, Tensor]) -> Path:
    """The z-lab folder, read back and checked."""
    info = ExportInfo.of(stage.target.facts, stage.target.ends())
    out = export_zlab(stage.start.drafter, weights, info, stage.run / DRAFTER, torch.bfloat16)
    verify_export(out, stage.start.config, stage.target.facts)
    return out


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
