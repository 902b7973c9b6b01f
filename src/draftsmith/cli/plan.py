"""`draftsmith plan`: what a run will need and how fast it will go, from the target's config alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.cli.parse import parse, peek, without
from draftsmith.config import build_config, merge, read_recipe
from draftsmith.data.prepared import ACCOUNT_FILE, load_prepared
from draftsmith.errors import ConfigError
from draftsmith.pipeline.run.roles import plan_job
from draftsmith.pipeline.stage import RunConfig
from draftsmith.plan.corpus import ASSUMED_SUPERVISED, ASSUMED_TOKENS, assumed_corpus, corpus_of
from draftsmith.plan.hardware import Hardware, parse_hardware, this_machine
from draftsmith.plan.make import Asked, Plan, make_plan
from draftsmith.plan.saved import to_toml
from draftsmith.plan.show import hours, print_plan
from draftsmith.plan.split import peak_memory
from draftsmith.plan.workload import Corpus, Job
from draftsmith.target.weigh import weigh_target

ABOUT = """Plan a run before it runs: memory of every GPU by buffer, tokens a second, the fastest split, hours, and
what other choices would change. Reads the target's config only: no weights, no GPU.

Takes every flag of train, and --recipe. --data takes a folder from draftsmith prepare; otherwise --tokens stands in.
--save writes the plan as a recipe: draftsmith train --plan FILE runs it."""
UNNAMED = "CHATS"
"""Stands for the data that nobody named."""
ALWAYS = frozenset({"target.target_compute", "loss.loss", "loss.weights", "batch.accumulation", "batch.epochs"})
"""What a saved plan says where it is the default too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """Hardware and data sizes, beside everything that train takes."""

    run: RunConfig
    hardware: str = ""
    """Cards of one host: 8xh100, 7x96GB, or 7x96GB@250 with the TFLOP/s that one sustains."""
    measure: bool = False
    """Take this machine's GPUs and time a matrix product on one (seconds) instead of --hardware."""
    hosts: int = 1
    """Equal hosts, for runs under torchrun."""
    link_gbps: float = 400.0
    """Gigabits a second between hosts."""
    tokens: int = ASSUMED_TOKENS
    """Tokens of the data, where --data is not a prepared folder: 100,000 conversations of 2,000."""
    supervised_share: float = ASSUMED_SUPERVISED
    """Share of them that assistants wrote, likewise."""
    save: str = ""
    """Write the plan as a recipe to this file."""

    def __post_init__(self) -> None:
        if not 0 < self.supervised_share <= 1:
            raise ConfigError(f"--supervised-share {self.supervised_share} is not between 0 and 1")
        if self.tokens < 1:
            raise ConfigError(f"--tokens {self.tokens} is not 1 or more")


def configure_plan(arguments: Sequence[str]) -> PlanCommand:
    """The command from a recipe, if one is named, and flags.

    Raises:
        ConfigError: no target, or settings that contradict each other.
    """
    recipe = peek(arguments, "--recipe")
    rest = without(arguments, "--recipe")
    tables = read_recipe(Path(recipe)) if recipe is not None else {}
    over: dict[str, Any] = {"out": peek(rest, "--out") or str(tables.get("out", "run"))}
    asks_help = "-h" in rest or "--help" in rest
    target = peek(rest, "--target") or ("smollm2" if asks_help else None)
    if target is not None:
        over["target"] = {"target": target}
    elif "target" not in tables:
        raise ConfigError("no target to plan for: give --target T (a hub id, a folder, configs/qwen3-8b) or --recipe")
    data = {flag: value for flag in ("data", "features") if (value := peek(rest, f"--{flag}"))}
    if data or "data" not in tables:
        over["data"] = data or {"data": UNNAMED}
    run = build_config(merge(tables, over), recipe or "the command line")
    return parse(PlanCommand, "plan", rest, ABOUT, PlanCommand(run=run))


def plan(arguments: Sequence[str]) -> int:
    """Print the plan; 1 where it doesn't fit."""
    command = configure_plan(arguments)
    console = Console()
    made = plan_of(command)
    print_plan(made, console, left_out(command.run, made))
    if command.save:
        path = Path(command.save)
        path.write_text(plan_toml(command, made), encoding="utf-8")
        console.print(f"saved: run it with draftsmith train --plan {path}", highlight=False)
    return 0 if made.fits else 1


def plan_of(command: PlanCommand) -> Plan:
    """The plan of a parsed command."""
    machine = _hardware(command)
    if command.run.target.target_compute == "fp8" and not (machine.card.fp8 or command.run.data.features):
        raise ConfigError(
            f"{machine.card.name} has no 8-bit products: drop --target-compute fp8, or name a newer card (--hardware)"
        )
    job = job_of(command)
    pipeline = command.run.pipeline
    asked = Asked(
        targets=0 if pipeline.targets == "auto" else pipeline.targets,
        drafters=0 if pipeline.drafters == "auto" else pipeline.drafters,
        joint=pipeline.colocate,
        from_disk=bool(command.run.data.features),
    )
    return make_plan(job, machine, asked)


def _hardware(command: PlanCommand) -> Hardware:
    if bool(command.hardware) == command.measure:
        raise ConfigError("say what to plan for: either --hardware (8xh100, 7x96GB), or --measure on this machine")
    if command.measure:
        return replace(this_machine(command.link_gbps), hosts=command.hosts)
    return parse_hardware(command.hardware, command.hosts, command.link_gbps)


def job_of(command: PlanCommand) -> Job:
    """Sizes and rates of the run, as `draftsmith train` on GPUs would choose them."""
    return plan_job(command.run, weigh_target(command.run.target), _corpus(command))


def _corpus(command: PlanCommand) -> Corpus:
    """From a prepared folder, or as assumed."""
    folder = Path(command.run.data.data)
    if not (folder / ACCOUNT_FILE).is_file():
        source = "assumed; prepare the data and give the folder as --data, or say --tokens"
        return assumed_corpus(command.tokens, command.supervised_share, source)
    data = load_prepared(folder)
    return corpus_of(data.lengths, data.account.supervised_tokens, command.run.batch.num_buckets, str(folder))


def left_out(run: RunConfig, made: Plan) -> list[str]:
    """What was asked for and isn't in the figures."""
    said: list[str] = []
    drafter = made.job.drafter
    if run.pipeline.device == "cpu":
        said.append("--device cpu: this plan is for the GPUs of --hardware, and --save writes it for them")
    if run.data.cache_features:
        said.append(
            "--cache-features: planned as if the target ran in every epoch; it runs in one, the others only train"
        )
    if run.drafter.init_from:
        said.append(
            f"--init-from: planned as {drafter.num_layers} layers, block {drafter.block_size}, taps "
            f"{list(drafter.taps)}; the config of {run.drafter.init_from} decides"
        )
    if run.target.device_map:
        said.append("--device-map: planned as one target on each GPU")
    return said


def plan_toml(command: PlanCommand, made: Plan) -> str:
    """The plan as a recipe: what was asked for and what it decided, with its figures as comments."""
    run, job, split = command.run, made.job, made.split
    corpus = job.corpus
    data = f"# data: {corpus.source}\n"
    if corpus.is_assumed:
        data = (
            f"# data assumed: {corpus.tokens / 1e6:,.0f}M tokens, {corpus.supervised / corpus.tokens:.0%} supervised; "
            "without draws_per_batch the real data decide it\n"
        )
    return (
        f"# {job.target.facts.name} on {made.hardware.describe()}\n"
        f"# expected: {split.rate:,.0f} tokens/s, {hours(made.hours)}, {peak_memory(split) / 1e9:.0f} GB\n{data}"
        + to_toml(decided(run, made), ALWAYS, frozenset({"data.data"}) if run.data.data == UNNAMED else frozenset())
    )


def decided(run: RunConfig, made: Plan) -> RunConfig:
    """The run with the plan's choices in the place of what was left open."""
    job, split, drafter = made.job, made.split, made.job.drafter
    batch = replace(
        run.batch, token_budget=job.shape.num_tokens, anchors=job.num_anchors, draws_per_batch=job.draws_per_batch
    )
    pipeline = replace(run.pipeline, device="auto" if run.pipeline.device == "cpu" else run.pipeline.device)
    if split.from_disk:
        pipeline = replace(pipeline, targets="auto", drafters=split.drafters)
    elif not split.joint:
        pipeline = replace(pipeline, targets=split.targets, drafters=split.drafters)
    elif made.hardware.num_gpus > 1:
        pipeline = replace(pipeline, targets="auto", drafters="auto", colocate=True)
    options = run.drafter
    if not options.init_from:  # else the architecture is that drafter's
        options = replace(
            options,
            layers=drafter.num_layers,
            num_heads=drafter.num_heads,
            num_kv_heads=drafter.num_kv_heads,
            head_dim=drafter.head_dim,
            intermediate_size=drafter.intermediate_size,
            block_size=drafter.block_size,
            taps=drafter.taps,
        )
    return replace(run, batch=batch, pipeline=pipeline, drafter=options)
