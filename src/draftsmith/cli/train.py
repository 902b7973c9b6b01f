"""`draftsmith train` and `draftsmith capture`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from draftsmith.cli.parse import parse, peek, without
from draftsmith.config import build_config, merge, read_recipe, read_run
from draftsmith.errors import ConfigError
from draftsmith.evaluate.acceptance import render
from draftsmith.pipeline.run import RunConfig, RunResult, capture_only, verdict
from draftsmith.pipeline.run import train as run_training
from draftsmith.pipeline.stage import dry_run_config

ABOUT = """Train a DFlash drafter: conversations in, a drafter that vLLM and SGLang serve out, its acceptance measured.

Bare `draftsmith train --target T --data chats.jsonl --out run` chooses everything else and says what it chose and why.
--recipe FILE.toml takes settings from a recipe, flags override it; --plan FILE.toml takes what draftsmith plan saved.
--resume RUN continues a run. --dry-run does three real steps, a checkpoint, an export and a short evaluation in a
temporary folder, then says whether all is well."""

CAPTURE = """Capture a target's features to disk, to train from with train --features. Takes every flag of train, and
--recipe FILE.toml, --plan FILE.toml, --resume RUN."""


def configure(arguments: Sequence[str], verb: str, about: str) -> tuple[RunConfig, list[str]]:
    """The RunConfig of a command line: recipe or run first, then flags; with the flags left of it."""
    # A plan is a recipe too: laid over the one it was made from, where both are named.
    recipes = [path for path in (peek(arguments, "--recipe"), peek(arguments, "--plan")) if path is not None]
    resumed = peek(arguments, "--resume")
    if recipes and resumed is not None:
        raise ConfigError("--recipe and --resume contradict each other: a resumed run has its own settings")
    rest = list(arguments)
    for flag in ("--recipe", "--plan", "--resume"):
        rest = without(rest, flag)
    default: RunConfig | None = None
    if recipes or resumed is not None:
        tables = read_run(Path(resumed)) if resumed is not None else {}
        for path in recipes:
            tables = merge(tables, read_recipe(Path(path)))
        if resumed is not None:
            tables = merge(tables, {"out": resumed, "resume": True})
        default = build_config(merge(tables, _peeked(rest)), recipes[-1] if recipes else f"{resumed}'s config")
    return parse(RunConfig, verb, rest, about, default), rest


def _peeked(arguments: Sequence[str]) -> dict[str, Any]:
    """What a recipe may leave open, from the flags."""
    over: dict[str, Any] = {}
    for flag, table in (("target", "target"), ("data", "data"), ("features", "data")):
        value = peek(arguments, f"--{flag}")
        if value is not None:
            over = merge(over, {table: {flag: value}})
    out = peek(arguments, "--out")
    return over if out is None else merge(over, {"out": out})


def train(arguments: Sequence[str]) -> int:
    """Run it and print how it ended."""
    console = Console()
    is_dry = "--dry-run" in arguments
    config, _ = configure([argument for argument in arguments if argument != "--dry-run"], "train", ABOUT)
    if is_dry:
        return _dry_run(config, console)
    result = run_training(config, console)
    print_result(result, console)
    return 0


def _dry_run(config: RunConfig, console: Console) -> int:
    with tempfile.TemporaryDirectory(prefix="draftsmith-dry-run-") as folder:
        result = run_training(dry_run_config(config, Path(folder) / "run"), console)
    console.print(
        f"[bold green]dry run passed[/bold green]: {result.steps} steps, a checkpoint, an export read back, an "
        "evaluation. Drop --dry-run to train",
        highlight=False,
    )
    return 0


def print_result(result: RunResult, console: Console) -> None:
    """The table before and after, the verdict, and where everything lies."""
    results = [found for found in (result.after, result.before) if found is not None]
    if results:
        console.print(render(results))
    if result.paced is not None:
        console.print(render(result.paced))
    if result.start:
        console.print(f"[bold]{escape(verdict(result))}[/bold]", highlight=False, soft_wrap=True)
    if result.interrupted:
        console.print(
            f"[yellow]stopped at step {result.steps}; go on with: draftsmith train --resume {result.out}[/yellow]"
        )
    console.print(
        f"drafter: {result.drafter}   log: {result.out / 'metrics.jsonl'}   {result.seconds / 60:.1f} min",
        soft_wrap=True,
    )


def capture(arguments: Sequence[str]) -> int:
    """Write one epoch's features to `--out`."""
    config, _ = configure(arguments, "capture", CAPTURE)
    console = Console()
    folder = capture_only(config, console)
    console.print(f"features: {folder}\ntrain from them with: draftsmith train --features {folder} ...", soft_wrap=True)
    return 0
