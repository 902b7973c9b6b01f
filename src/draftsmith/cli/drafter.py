"""`draftsmith evaluate`, `draftsmith export` and `draftsmith verify`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import tyro
from rich.console import Console
from rich.markup import escape

from draftsmith.cli.parse import parse, peek
from draftsmith.config import build_config, read_run
from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.evaluate.acceptance import EvalConfig, EvalResult, Progress, evaluate_prompts, plain_answers, render
from draftsmith.evaluate.card import model_card, trained_on
from draftsmith.evaluate.decode import DecodeLimits
from draftsmith.evaluate.export import check_against_target, export_zlab, verify_export
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.evaluate.parity import independent_code
from draftsmith.evaluate.parity import verify as verify_drafter
from draftsmith.evaluate.prompts import BUILT_IN, Prompt, encode_prompt, load_prompts
from draftsmith.evaluate.server import Server
from draftsmith.evaluate.serving import ServingConfig, verify_server
from draftsmith.evaluate.source import DRAFTER, Which, checkpoint_of, drafter_of, open_drafter, run_of
from draftsmith.evaluate.speculators import export_speculators, verify_speculators
from draftsmith.pipeline.placement import place
from draftsmith.pipeline.run import EVALUATION, RunConfig
from draftsmith.pipeline.settings import PipelineConfig
from draftsmith.pipeline.show import ProgressView
from draftsmith.target.model import Target, TargetConfig, load_target
from draftsmith.train.checkpoint import load_checkpoint

EVALUATE = """Measure drafters by the draft-verify loop: tau with its interval, survival by place, speed against plain
decoding, and whether every answer is the target's own. Several drafters answer the same prompts and are compared.

A drafter is a run's folder, one of its checkpoints, a drafter's folder, a hub id, or smollm2-drafter (bundled). A run
knows its target and its template arguments."""
EXPORT = """Write a run's drafter in a layout that engines load, with a model card, and read it back: a folder that
would serve otherwise than it trained is refused."""
VERIFY = """Does a drafter serve as it trained? Checked with independent code (the dflash package): config, outputs,
logits on real prompts, then steps and text of full decoding. Exit status 1 where they differ.

--server URL replays the prompts through a running vLLM or SGLang instead, and compares its answers and its acceptance,
place by place, with the loop here. The server must be idle otherwise; serve in float32 for identical counts.

A drafter is a run's folder, a drafter's folder, a hub id, or smollm2-drafter (bundled)."""
Device = Literal["auto", "cpu", "cuda"]
Kwargs = Mapping[str, bool | int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateCommand:
    """Drafters, their target, and how they are measured."""

    drafters: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """The drafters."""
    target: TargetConfig
    measure: EvalConfig = field(default_factory=EvalConfig)
    block_size: int = 0
    """Draft smaller blocks than trained (the known token included), as a server told to does; 0 takes the trained size.
    The drafter then sees less than in training and guesses worse: --max-drafts leaves it its whole block."""
    save: str = ""
    """Write the results to this file, as JSON."""
    device: Device = "auto"
    """Where to run: auto takes a GPU where there is one."""

    def __post_init__(self) -> None:
        if self.block_size < 0 or self.block_size == 1:
            raise ConfigError(
                f"--block-size {self.block_size} drafts nothing: give 2 or more, or 0 for the trained size"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCommand:
    """Which weights, in which layout, where to."""

    run: Annotated[str, tyro.conf.Positional]
    """A run's folder, or one of its checkpoints."""
    out: str
    """The folder to write."""
    layout: Literal["zlab", "speculators"] = "zlab"
    """zlab: SGLang, vLLM and the dflash package; speculators: vLLM's own format, which names the target."""
    checkpoint: Which = "newest"
    """Of a run: its newest checkpoint, or the best one measured (--eval-every)."""
    verify: bool = True
    """Read the folder back and hold it against what was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCommand:
    """A drafter, its target, and prompts to decode."""

    drafter: Annotated[str, tyro.conf.Positional] = ""
    """The drafter."""
    target: TargetConfig
    prompts: tuple[str, ...] = (BUILT_IN,)
    """Prompt sets: JSONL files or names."""
    num_prompts: int = 4
    """Most prompts of each set; 0 takes all."""
    max_new_tokens: int = 48
    """Longest answer of full decoding, in tokens."""
    template_kwargs: Kwargs = field(default_factory=dict[str, "bool | int | str"])
    """Arguments of the chat template as you serve with; other ones than in training are a mismatch."""
    serving: ServingConfig = field(default_factory=ServingConfig)
    device: Device = "auto"
    """Where to run: auto takes a GPU where there is one."""

    def __post_init__(self) -> None:
        if self.num_prompts < 0:
            raise ConfigError(f"--num-prompts {self.num_prompts} is below 0; 0 takes all")
        if not self.prompts:
            raise ConfigError("no prompts to verify with: name a JSONL file or a set with --prompts")
        DecodeLimits(max_new_tokens=self.max_new_tokens)


def evaluate(arguments: Sequence[str]) -> int:
    """Measure, print, save."""
    console = Console()
    run = _run_named(arguments)
    default = EvaluateCommand(target=_target(run, arguments), measure=EvalConfig(template_kwargs=_kwargs(run)))
    command = parse(EvaluateCommand, "evaluate", arguments, EVALUATE, default)
    if not command.drafters:
        raise ConfigError("no drafter to measure: draftsmith evaluate RUN_OR_DRAFTER [MORE ...] --target T")
    config = command.measure
    prompts = config.load()
    named = [open_drafter(source, command.block_size) for source in command.drafters]
    names = [one.name for one in named]
    if len(set(names)) < len(names):
        names = list(command.drafters)
    target = _load(command.target, command.device, console)
    for source, one in zip(command.drafters, named, strict=True):
        check_against_target(one.drafter.config, target.facts, source)
    with console.status(f"decoding {len(prompts)} prompts plainly, to compare with"):
        plains = plain_answers(target, prompts, config) if config.plain else None
    results: list[EvalResult] = []
    for name, one in zip(names, named, strict=True):
        drafter = one.drafter.to(target.device, target.ends().embedding_VH.dtype)
        with ProgressView(console, f"measuring {escape(name)}", len(prompts)) as view:
            tell = _teller(view)
            results.append(evaluate_prompts(target, drafter, prompts, config, tell, plains, name))
    console.print(render(results))
    if command.save:
        sizes = [{"block_size": one.drafter.config.block_size} for one in named]
        body = [result.to_dict() | size for result, size in zip(results, sizes, strict=True)]
        _write(Path(command.save), json.dumps(body))
        console.print(f"saved: {escape(command.save)}", highlight=False)
    return 0


def export(arguments: Sequence[str]) -> int:
    """Write the folder and say how to serve it."""
    command = parse(ExportCommand, "export", arguments, EXPORT)
    console = Console()
    run = run_of(command.run)
    if run is None:
        raise CheckpointError(f"{command.run} holds no run with checkpoints: give the folder of draftsmith train --out")
    tables = read_run(run)
    path = Path(command.run).expanduser()
    checkpoint = checkpoint_of(run, command.checkpoint) if path == run else load_checkpoint(path)
    drafter = drafter_of(checkpoint)
    config = build_config(tables, f"{run}'s config")
    target = _load(config.target, "cpu", console)
    kwargs = config.prepare.tokenize.template_kwargs
    info = ExportInfo.of(target.facts, target.ends(), type(target.model).__name__, kwargs)
    card = model_card(
        drafter.config,
        info.target,
        recipe=tables,
        data=trained_on(config.data.data or config.data.features, checkpoint.record.data_fingerprint),
        evaluation=_measured(run),
        name=command.out,
    )
    zlab = command.layout == "zlab"
    write, read_back = (export_zlab, verify_export) if zlab else (export_speculators, verify_speculators)
    out = write(drafter, None, info, Path(command.out), torch.bfloat16, card)
    if command.verify:
        read_back(out, drafter.config, target.facts, checkpoint.masters)
    console.print(f"{escape(str(out))}: {checkpoint.path.name} of {escape(str(run))}, layout {command.layout}")
    serving = card[card.index("```bash") : card.index("## Training")].replace("```bash\n", "").replace("```\n", "")
    console.print(escape(serving.strip()), highlight=False, soft_wrap=True)  # to be copied: never wrapped
    return 0


def verify(arguments: Sequence[str]) -> int:
    """Print the verdict; 1 where the drafter would serve otherwise than it trained."""
    console = Console()
    run = _run_named(arguments)
    default = VerifyCommand(target=_target(run, arguments), template_kwargs=_kwargs(run))
    command = parse(VerifyCommand, "verify", arguments, VERIFY, default)
    if not command.drafter:
        raise ConfigError("no drafter to verify: draftsmith verify DRAFTER --target T")
    if not command.serving.server:
        independent_code()
    prompts = [prompt for source in command.prompts for prompt in load_prompts(source, command.num_prompts)]
    exact = replace(command.target, dtype="float32") if command.target.dtype == "auto" else command.target
    target = _load(exact, command.device, console)
    if command.serving.server:
        return _verify_server(command, target, prompts, console)
    ids = [encode_prompt(target, prompt, command.template_kwargs) for prompt in prompts]
    folder = Path(command.drafter).expanduser() / DRAFTER
    source = folder if run is not None and folder.is_dir() else command.drafter
    found = verify_drafter(source, target, ids, command.max_new_tokens, command.template_kwargs)
    console.print(escape(str(found)), highlight=False)
    return 0 if found.passed else 1


def _verify_server(command: VerifyCommand, target: Target, prompts: Sequence[Prompt], console: Console) -> int:
    drafter = open_drafter(command.drafter).drafter
    check_against_target(drafter.config, target.facts, command.drafter)
    drafter = drafter.to(target.device, target.ends().embedding_VH.dtype)
    with Server(command.serving.server) as server, console.status(f"replaying {len(prompts)} prompts"):
        found = verify_server(
            server,
            target,
            drafter,
            prompts,
            command.max_new_tokens,
            command.serving.tolerance,
            command.template_kwargs,
        )
    console.print(escape(str(found)), highlight=False)
    return 0 if found.passed else 1


def _run_named(arguments: Sequence[str]) -> Path | None:
    """The run that the first argument naming one belongs to."""
    runs = [run_of(argument) for argument in arguments if not argument.startswith("-")]
    return next((run for run in runs if run is not None), None)


def _config(run: Path | None) -> RunConfig | None:
    return None if run is None else build_config(read_run(run), f"{run}'s config")


def _target(run: Path | None, arguments: Sequence[str]) -> TargetConfig:
    """The target to start from: the one named, a run's own, or none but for --help."""
    named = peek(arguments, "--target")
    config = _config(run)
    if named is not None and (config is None or config.target.target != named):
        return TargetConfig(target=named)
    if config is not None:
        return config.target
    if "-h" in arguments or "--help" in arguments:
        return TargetConfig(target="smollm2")
    raise ConfigError(
        "no target given: name the one that the drafter is for with --target (a hub id, folder or smollm2)"
    )


def _kwargs(run: Path | None) -> Kwargs:
    config = _config(run)
    return {} if config is None else config.prepare.tokenize.template_kwargs


def _load(config: TargetConfig, device: Device, console: Console) -> Target:
    where = place(PipelineConfig(device=device)).targets[0]
    with console.status(f"loading target {escape(config.target)}"):
        return load_target(config, where)


def _teller(view: ProgressView) -> Progress:
    def tell(done: int, _total: int, tau: float) -> None:
        view.update(done, f"tau {tau:.2f}")

    return tell


def _measured(run: Path) -> Mapping[str, Any] | None:
    """What the run measured last, from its evaluation.json."""
    path = run / EVALUATION
    if not path.is_file():
        return None
    body = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
    return body.get("after")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
