"""How far a long stage over rows is: a bar in a terminal, plain lines now and then in a log file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

SECONDS_A_LINE = 20.0
"""Between two plain lines."""


def rate_text(rows: float, total: float | None, rows_per_second: float) -> str:
    """`1,200 of 4,000 rows · 310 rows/s`."""
    rate = f"{rows_per_second:,.0f}" if rows_per_second >= 10 else f"{rows_per_second:.2f}"
    return f"{rows:,.0f}{f' of {total:,.0f}' if total else ''} rows · {rate} rows/s"


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(rate_text(task.completed, task.total, task.speed or 0.0))


@contextmanager
def progress_bar(
    console: Console | None, title: str, total: int | None, done: int = 0
) -> Generator[Callable[[int], None]]:
    """Yields what is to be called with the number of rows just done; says nothing without a console.

    `total` is None where nobody knows it; `done` rows stem from an earlier call, and don't count for the rate.
    """
    if console is None:
        yield lambda count: None
    elif console.is_terminal:
        columns = (TextColumn(title), BarColumn(), _RateColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(title, total=total, completed=done)
            yield lambda count: progress.advance(task, count)
    else:
        lines = _Lines(console, title, total, done)
        yield lines.advance
        lines.say()


class _Lines:
    def __init__(self, console: Console, title: str, total: int | None, done: int) -> None:
        self._console, self._title, self._total = console, title, total
        self._first = self._done = done
        self._began = self._said = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._said >= SECONDS_A_LINE:
            self.say()

    def say(self) -> None:
        self._said = time.monotonic()
        rate = (self._done - self._first) / max(self._said - self._began, 1e-9)
        self._console.print(f"{self._title}: {rate_text(self._done, self._total, rate)}", highlight=False)
