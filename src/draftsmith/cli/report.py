"""`draftsmith report`: one HTML page about one run or several."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import tyro
from rich.console import Console

from draftsmith.cli.parse import parse
from draftsmith.errors import ConfigError
from draftsmith.pipeline.run import RunConfig
from draftsmith.report.page import write_report
from draftsmith.report.runs import read_runs

ABOUT = """Write one HTML page about runs: loss and tau over steps, labels and time, survival by place, memory, where
time went, data, evaluation. Several runs are overlaid. PNGs of the curves lie beside the page."""
LEFT_OUT = ("resume", "allow_changed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCommand:
    """Which runs, and where the page goes."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: str = ""
    """The page; by default report.html in the folder of the first run."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("no run to report: draftsmith report RUN [RUN ...]")


def report(arguments: Sequence[str]) -> int:
    """Write the page and say where it is."""
    command = parse(ReportCommand, "report", arguments, ABOUT)
    runs = read_runs([Path(run) for run in command.runs])
    out = Path(command.out) if command.out else runs[0].folder / "report.html"
    commands = {run.name: command_of(run.config) for run in runs if run.config}
    written = write_report(runs, out, commands)
    Console().print(f"report: {out}   {len(written) - 1} pictures in {written[1].parent}", highlight=False)
    return 0


def command_of(tables: Mapping[str, Any]) -> str:
    """The `draftsmith train` command that has these settings: flags for whatever isn't the default."""
    return shlex.join(["draftsmith", "train", *_flags(RunConfig, tables)])


def _flags(kind: Any, table: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    hints = get_type_hints(kind)
    for field in fields(kind):
        if field.name not in table or field.name in LEFT_OUT:
            continue
        value = table[field.name]
        if is_dataclass(hints[field.name]):
            found += _flags(hints[field.name], value)
        elif value != _plain(field.default if field.default_factory is MISSING else field.default_factory()):
            found += _flag(field.name.replace("_", "-"), value)
    return found


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, cast(list[Any], value))]
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value).items()
        return [f"--{name}", *(str(each) for pair in pairs for each in pair)]
    return [f"--{name}", str(value)]
