"""How busy each GPU was and how much memory it held: pictures over time, and the figure to see first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from draftsmith.report.paper import SERIES, Chart, colour, legend_above, new_axes
from draftsmith.report.runs import Line, Run, number

GB = 1e9
GREY = "#808890"
STYLES = ("-", "--", "-.", ":")
"""Of GPUs beyond as many as there are colours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """A GPU's utilisation over a whole run, 0 to 1."""

    device: str
    share: float


def gpu_charts(runs: Sequence[Run]) -> list[Chart]:
    """Utilisation where a driver told it, and memory; nothing without a GPU."""
    charts: list[Chart] = []
    if any(busy_gpus(run) for run in runs):
        charts.append(_utilisation(runs))
    if any(gpus_of(run) for run in runs):
        charts.append(_memory(runs))
    return charts


def gpus_of(run: Run) -> list[str]:
    """Names of a run's GPUs: cuda:2 before cuda:10."""
    found = {device for line in run.systems for device in line.get("gpus", {})}
    return sorted(found, key=lambda device: (len(device), device))


def busy_gpus(run: Run) -> list[Busy]:
    """Each GPU whose driver told how busy it was, with its mean over time: lines count by the time since the last."""
    found: list[Busy] = []
    times = run.minutes(run.systems)
    for device in gpus_of(run):
        shares = _series(run, device, "utilisation")
        # The first line has none before it: the time since training began isn't in the log.
        weights = [max(0.0, now - before) for before, now in zip([times[0], *times], times, strict=False)]
        known = [(share, weight) for share, weight in zip(shares, weights, strict=True) if not isnan(share)]
        total = sum(weight for _, weight in known)
        if total:
            found.append(Busy(device=device, share=sum(share * weight for share, weight in known) / total))
        elif known:
            found.append(Busy(device=device, share=known[-1][0]))
    return found


def _series(run: Run, device: str, key: str) -> list[float]:
    return [number(_gpu(line, device).get(key)) for line in run.systems]


def _gpu(line: Line, device: str) -> Mapping[str, Any]:
    return line.get("gpus", {}).get(device, {})


def _utilisation(runs: Sequence[Run]) -> Chart:
    def draw() -> Figure:
        figure, axes = new_axes("minutes of training", "share of the time")
        index = 0
        for run in runs:
            for gpu in busy_gpus(run):
                name = f"{run.name} {gpu.device}" if len(runs) > 1 else gpu.device
                shares = _series(run, gpu.device, "utilisation")
                axes.plot(
                    run.minutes(run.systems), shares, STYLES[index // len(SERIES) % len(STYLES)], color=colour(index),
                    label=f"{name}: {gpu.share:.0%}", marker="o" if len(shares) < 3 else "", markersize=3,
                )  # fmt: skip
                index += 1
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        legend_above(axes)
        return figure

    note = "Share of the time in which any kernel ran, by the driver, sampled at 10 Hz; with each GPU's mean."
    return Chart(key="utilisation", title="GPU utilisation", note=note, draw=draw)


def _memory(runs: Sequence[Run]) -> Chart:
    kinds = (
        ("reserved_bytes", "-", "reserved by torch"),
        ("allocated_bytes", "--", "of it in use"),
        ("used_bytes", ":", "all on the card"),
    )

    def draw() -> Figure:
        figure, axes = new_axes("minutes of training", "GB")
        index = 0
        drawn: dict[str, str] = {}
        for run in runs:
            times = run.minutes(run.systems)
            for device in gpus_of(run):
                for key, style, kind in kinds:
                    values = [value / GB for value in _series(run, device, key)]
                    if not all(map(isnan, values)):
                        axes.plot(times, values, style, color=colour(index))
                        drawn[kind] = style
                name = f"{run.name} {device}" if len(runs) > 1 else device
                axes.plot([], [], color=colour(index), label=name)
                index += 1
        for kind, style in drawn.items():
            axes.plot([], [], style, color=GREY, label=kind)
        axes.set_ylim(bottom=0)
        legend_above(axes)
        return figure

    note = "Level lines are the promise: everything is allocated once."
    return Chart(key="memory", title="GPU memory", note=note, draw=draw)
