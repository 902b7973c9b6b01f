"""A training run from its configuration to an exported, measured drafter."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError
from draftsmith.evaluate.acceptance import EvalResult
from draftsmith.evaluate.card import model_card, trained_on
from draftsmith.evaluate.export import export_zlab, load_zlab, verify_export
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.evaluate.statistics import compare
from draftsmith.pipeline.alarm import sound_alarm
from draftsmith.pipeline.chief import idle_report, masters_on_cpu
from draftsmith.pipeline.inputs import ON_POLICY, claim_folder, start_drafter, write_whole
from draftsmith.pipeline.resolve import Choices, resolve_drafter, resolve_init
from draftsmith.pipeline.run.roles import roles_of_ranks, settle_roles, with_roles
from draftsmith.pipeline.run.yardstick import Measures, RemoteYardstick, Yardstick, with_weights, yardstick_of
from draftsmith.pipeline.session import LocalCrew, capture_epoch, train_stage
from draftsmith.pipeline.show import print_choices
from draftsmith.pipeline.stage import (
    CONFIG,
    Inputs,
    RunConfig,
    Stage,
    Start,
    choose_batching,
    load_inputs,
    resolve_stage,
)
from draftsmith.pipeline.together import (
    ChiefCrew,
    Desk,
    claim_together,
    load_together,
    run_drafter_rank,
    run_target_rank,
)
from draftsmith.pipeline.world import PeerError, World, join_world

DRAFTER, EVALUATION = "drafter", "evaluation.json"


SMALL_RUN = (
    "This is a small run: a CPU sees too few labels in minutes to train a good drafter. It shows the whole way, from "
    "conversations to a drafter that serves; the same command on a GPU trains a real one."
)


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
    start: str = ""
    """The drafter that training went on from, by name."""
    paced: EvalResult | None = None
    """Measured again with fewer drafts a step, where steps were timed and fewer pay better."""


def train(config: RunConfig, console: Console) -> RunResult:
    """Run it all: load, prepare, choose, start, train, measure, export.

    Raises:
        DraftsmithError: whatever went wrong first, after what could be saved was saved.
    """
    started = time.perf_counter()
    if config.pipeline.threads:
        torch.set_num_threads(config.pipeline.threads)
    world = _join(config)
    if world is None:
        run = claim_folder(Path(config.out), resume=config.resume)
        config, placement = settle_roles(config)
        inputs = load_inputs(config, run, console, placement)
        if inputs.data is not None and not config.resume:
            sound_alarm(inputs.target, inputs.data.train, config.on_policy, console, run / ON_POLICY)
        stage = prepare_stage(config, run, inputs, console)
        result = _lead(stage, yardstick_of(stage), LocalCrew(stage))
    else:
        console.quiet = not world.roles.is_chief
        result = _train_in_ranks(world, config, console)
    return replace(result, seconds=time.perf_counter() - started)


def _lead(stage: Stage, yardstick: Measures, crew: LocalCrew | ChiefCrew) -> RunResult:
    """Measure, train, measure, export."""
    config, run = stage.config, stage.run
    record = {"config": asdict(config), "resolved": dict(stage.record.config)}
    write_whole(run / CONFIG, json.dumps(record, indent=1))
    before = yardstick.measure(stage.start.drafter, "before") if config.measure.measure_start else None
    team, chief = train_stage(stage, yardstick.during(), crew)
    weights = masters_on_cpu(team.drafters[0])
    steps = team.drafters[0].step
    trained = with_weights(stage.start.config, weights)
    after, paced = yardstick.measure(trained, "after"), None
    if config.measure.pace and after is not None and isinstance(yardstick, Yardstick):
        before, after, paced = _at_pace(yardstick, trained, before, after)
    folder = _export(stage, weights, after)
    results = {"before": before, "after": after, "paced": paced}
    body = {name: result.to_dict() for name, result in results.items() if result is not None}
    write_whole(run / EVALUATION, json.dumps(body))
    for line in idle_report(team):
        stage.console.print(f"[yellow]{line}[/yellow]")
    return RunResult(
        out=run,
        steps=steps,
        before=before,
        after=after,
        drafter=folder,
        seconds=0.0,
        last=chief.last,
        interrupted=steps < stage.batching.total_steps,
        start=config.drafter.init_from,
        paced=paced,
    )


def _at_pace(
    yardstick: Yardstick, trained: Drafter, before: EvalResult | None, after: EvalResult
) -> tuple[EvalResult | None, EvalResult, EvalResult | None]:
    """Both results with what verify steps cost here, and a third one where fewer drafts than all pay better."""
    costs = yardstick.costs(trained)
    before, after = None if before is None else before.with_costs(costs), after.with_costs(costs)
    assert after.pace is not None
    best = after.pace.num_drafts
    again = yardstick.measure(trained, f"after, {best} drafts", best) if best < len(costs) else None
    return before, after, again


def _join(config: RunConfig) -> World | None:
    """The ranks of this run; None for threads of this process. Open roles are chosen by the first rank for all."""
    try:
        reads = bool(config.data.features)
        return join_world(config.pipeline, lambda hosts: roles_of_ranks(config, hosts), reads_features=reads)
    except PeerError as error:
        raise SystemExit(1) from error


def _train_in_ranks(world: World, config: RunConfig, console: Console) -> RunResult:
    """This rank's part. A failure that another rank tells on its own console is not told twice."""
    try:
        with world:
            run, config = claim_together(world, config)
            if world.roles.feed == "targets":
                config = with_roles(config, world.roles.num_targets, world.roles.num_drafters)
            inputs = load_together(world, config, run, console)
            stage = replace(prepare_stage(config, run, inputs, console), stop=world.stop)
            if world.roles.is_chief:
                is_remote = world.roles.feed == "targets"
                yardstick = RemoteYardstick(stage, world) if is_remote else yardstick_of(stage)
                result = _lead(stage, yardstick, ChiefCrew(world))
            else:
                result = _help(stage, world)
            world.meet("done")
            return result
    except PeerError as error:
        if world.roles.is_chief and not error.is_told:
            raise
        raise SystemExit(1) from error


def _help(stage: Stage, world: World) -> RunResult:
    """A rank that leads nothing: train along, or produce features and, as the first target, measure."""
    steps = 0
    if not world.roles.is_target:
        steps = run_drafter_rank(world, stage)
    elif world.roles.index > 0:
        run_target_rank(world, stage, None)
    else:
        yardstick = yardstick_of(stage)
        world.tell("prompts", str(len(yardstick.prompts)))
        if stage.config.measure.measure_start and yardstick.prompts:
            Desk(world, stage, yardstick.answer).wait()
        run_target_rank(world, stage, yardstick.answer)
        if yardstick.prompts:
            Desk(world, stage, yardstick.answer).wait()
    return RunResult(
        out=stage.run,
        steps=steps,
        before=None,
        after=None,
        drafter=stage.run / DRAFTER,
        seconds=0.0,
        last={},
        interrupted=False,
    )


def prepare_stage(config: RunConfig, run: Path, inputs: Inputs, console: Console) -> Stage:
    """Start the drafter, choose what was left open, and say what was chosen and why."""
    choices = Choices()
    choices.note("workers", inputs.placement.describe(), inputs.placement.why)
    if config.drafter.init_from:
        drafter_config, drafter = load_zlab(config.drafter.init_from)
        choices.note("drafter", config.drafter.init_from, "its own architecture wins")
        batching = choose_batching(config, inputs, drafter_config, choices)
    else:
        drafter_config = resolve_drafter(config.drafter, inputs.target.facts, choices)
        batching = choose_batching(config, inputs, drafter_config, choices)
        init = resolve_init(config.drafter.init, batching.total_steps, choices)
        drafter = start_drafter(drafter_config, init, inputs.target, config.batch.seed, console.print)
    start = Start(config=drafter_config, drafter=drafter)
    stage = resolve_stage(config, run, console, inputs, start, batching, choices)
    print_choices(console, choices)
    for remark in stage.placement.remarks:
        console.print(f"[yellow]{remark}[/yellow]", highlight=False)
    if not stage.placement.on_gpu and not config.drafter.init_from:
        console.print(f"[yellow]{SMALL_RUN}[/yellow]", highlight=False)
    return stage


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
    return capture_epoch(stage, out, order)[0]


def _export(stage: Stage, weights: dict[str, Tensor], measured: EvalResult | None) -> Path:
    """The z-lab folder with its model card, read back and checked."""
    config, target, out = stage.config, stage.target, stage.run / DRAFTER
    info = ExportInfo.of(target.facts, target.ends(), template_kwargs=config.prepare.tokenize.template_kwargs)
    card = model_card(
        stage.start.config,
        info.target,
        recipe=asdict(config),
        data=trained_on(config.data.data or config.data.features, stage.record.data_fingerprint),
        evaluation=None if measured is None else measured.to_dict(),
        name=str(out),
    )
    export_zlab(stage.start.drafter, weights, info, out, torch.bfloat16, card)
    verify_export(out, stage.start.config, stage.target.facts, weights)
    return out


def verdict(result: RunResult) -> str:
    """One sentence on whether training made the drafter better, beyond the interval."""
    if result.before is None or result.after is None:
        return "not measured: there were no prompts to measure on"
    found = compare("after", result.after.answers, "before", result.before.answers)
    if not result.start:
        return found.verdict
    size = f"{found.tau.value:+.2f} ± {found.tau.half_width:.2f} tokens a step"
    if found.tau.low > 0:
        return f"better than the start, {result.start}: {size}"
    return f"not better than the start ({size}): keep {result.start}"
