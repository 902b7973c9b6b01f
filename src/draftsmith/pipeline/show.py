"""What a person sees of a run: what was chosen and why, progress with the numbers that matter, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from draftsmith.pipeline.resolve import Choices


def print_choices(console: Console, choices: Choices) -> None:
    """The resolved values, one a line, each with its reason."""
    table = Table(title="What this run uses, and why", title_justify="left", box=None, pad_edge=False)
    table.add_column("setting", style="bold", no_wrap=True)
    table.add_column("value")
    table.add_column("why", style="dim")
    for choice in choices.made:
        table.add_row(choice.name, choice.value, choice.why)
    console.print(table)


class ProgressView:
    """One progress bar with a line of numbers; plain lines now and then where the output is no terminal."""

    def __init__(self, console: Console, title: str, total: int, done: int = 0) -> None:
        self._console, self._title, self._total = console, title, total
        self._text = ""
        self._lines_every = max(1, total // 20)
        self._last_line = done
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task(title, total=total, completed=done, text="")

    def __enter__(self) -> ProgressView:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, done: int, text: str) -> None:
        """Move to `done` and show `text` beside the bar."""
        self._text = text or self._text
        self._progress.update(self._task, completed=done, text=self._text)
        is_due = done - self._last_line >= self._lines_every or done >= self._total
        if not self._console.is_terminal and is_due:
            self._console.print(f"{self._title} {done}/{self._total}  {self._text}", highlight=False)
            self._last_line = done


def train_text(line: Mapping[str, Any]) -> str:
    """Loss, the uniform-anchor estimate, rates: the numbers beside the bar."""
    parts: list[str] = []
    if line.get("loss") is not None:
        parts.append(f"loss {line['loss']:.3f}")
    if line.get("uniform_tau") is not None:
        parts.append(f"tau~{line['uniform_tau']:.2f}")
    if line.get("tau") is not None:
        parts.append(f"tau {line['tau']:.2f}")
    if line.get("labels_per_s"):
        parts.append(f"{line['labels_per_s']:,.0f} labels/s")
    if line.get("skipped"):
        parts.append(f"[red]{line['skipped']} skipped[/red]")
    return "  ".join(parts)
