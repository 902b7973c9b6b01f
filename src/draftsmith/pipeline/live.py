"""The live view of training: one screen on a terminal, plain lines elsewhere.

Fed by the chief's log lines; it reads nothing from a device itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from draftsmith.pipeline.show import train_text

BAR_WIDTH, NARROW_BAR = 20, 10
NARROW = 100
"""Columns of a terminal below which bars and figures are cut short."""


class TrainView:
    """Shows each log line of a run; `console.is_terminal` decides between a screen and lines."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console, self._total, self._first = console, total, done
        self._line: dict[str, Any] = {"step": done}
        self._started = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._lines_every, self._last_line = max(1, total // 20), done

    def __enter__(self) -> TrainView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, line: Mapping[str, Any]) -> None:
        """Take over a log line: `step`, and any of the numbers of metrics.jsonl; `system` is its system line."""
        self._line |= line
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
            return
        step = int(self._line["step"])
        if step - self._last_line >= self._lines_every or step >= self._total:
            self._console.print(f"training {step}/{self._total}  {train_text(self._line)}", highlight=False)
            self._last_line = step

    def render(self) -> RenderableType:
        """The screen as it stands, as wide as where it is shown."""
        return _Screen(self)

    def panel(self, width: int) -> Panel:
        """The screen for so many columns."""
        is_narrow = width < NARROW
        line = self._line
        system = cast(Mapping[str, Any], line.get("system") or {})
        columns = Table.grid(padding=(0, 2 if is_narrow else 3))
        bar = NARROW_BAR if is_narrow else BAR_WIDTH
        columns.add_row(_numbers(line), _places(line, bar), _workers(system, is_narrow))
        return Panel(Group(self._head(), Text(), columns), title="draftsmith train", title_align="left", padding=(0, 1))

    def _head(self) -> RenderableType:
        step = int(self._line["step"])
        elapsed = time.monotonic() - self._started
        done = max(1, step - self._first)
        left = elapsed / done * (self._total - step)
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._total, completed=step, width=BAR_WIDTH + NARROW_BAR)
        head.add_row(f"step {step:,} of {self._total:,}", bar, f"{_clock(elapsed)} gone, {_clock(left)} left")
        return head


class _Screen:
    """A view that learns its width when it is drawn."""

    def __init__(self, view: TrainView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._view.panel(options.max_width)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _numbers(line: Mapping[str, Any]) -> Table:
    """Loss, both taus, rates, and what was skipped."""
    table = Table.grid(padding=(0, 1))
    rows = (
        ("loss", "loss", "{:.3f}"),
        ("tau, true loop", "tau", "{:.2f}"),
        ("tau, estimate", "uniform_tau", "{:.2f}"),
        ("learning rate", "lr", "{:.1e}"),
        ("gradient norm", "grad_norm", "{:.2f}"),
        ("step", "step_ms", "{:,.0f} ms"),
        ("tokens/s", "tokens_per_s", "{:,.0f}"),
        ("labels/s", "labels_per_s", "{:,.0f}"),
    )
    for name, key, form in rows:
        value = line.get(key)
        table.add_row(Text(name, style="dim"), "-" if value is None else form.format(value))
    if line.get("skipped"):
        table.add_row(Text("skipped steps", style="red"), str(line["skipped"]))
    return table


def _places(line: Mapping[str, Any], bar: int) -> Table:
    """Share of blocks right up to each place (uniform anchors)."""
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("right up to place", style="dim"))
    survival = cast(Sequence[float | None], line.get("place_survival") or [])
    for place, share in enumerate(survival[:8], start=1):
        value = share or 0.0
        table.add_row(f"{place:>2} {_bar(value, bar)} {value:.2f}")
    return table


def _bar(share: float, width: int) -> str:
    filled = round(max(0.0, min(1.0, share)) * width)
    return "█" * filled + "·" * (width - filled)


def _workers(system: Mapping[str, Any], is_narrow: bool) -> Table:
    """Busy share of each worker and what it waits for, queue depths, utilisation and memory of each GPU."""
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("worker", style="dim"), Text("busy", style="dim"), Text("waits", style="dim"))
    for name, shares in cast(Mapping[str, Mapping[str, float]], system.get("workers") or {}).items():
        waits = "input" if shares["waiting_input"] >= shares["waiting_room"] else "room"
        waiting = shares["waiting_input"] + shares["waiting_room"]
        style = "yellow" if waiting > 0.15 else ""
        table.add_row(name, f"{shares['busy']:.0%}", Text(f"{waits} {waiting:.0%}", style=style))
    depth = cast(Sequence[int], system.get("queue_depth") or [])
    if depth:
        table.add_row("queue", " ".join(map(str, depth)), "")
    if system.get("late_compiles"):
        table.add_row(Text("late compiles", style="yellow"), str(system["late_compiles"]), "")
    for name, gpu in cast(Mapping[str, Mapping[str, float]], system.get("gpus") or {}).items():
        used, held = gpu["allocated_bytes"] / 1e9, gpu["reserved_bytes"] / 1e9
        table.add_row(name, _busy(gpu), f"{used:.1f}/{held:.1f} GB" if is_narrow else f"{used:.2f} of {held:.1f} GB")
    return table


def _busy(gpu: Mapping[str, float | None]) -> str:
    """Utilisation since the last line; nothing where the driver doesn't tell."""
    share = gpu.get("utilisation")
    return "" if share is None or math.isnan(share) else f"{share:.0%}"
