"""The pictures of a report: each overlays all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, StrMethodFormatter

from draftsmith.report.gpus import gpu_charts
from draftsmith.report.paper import Axes, Chart, colour, legend_above, new_axes
from draftsmith.report.runs import Line, Run, number

WAITS = ("busy", "waiting_input", "waiting_room")
WAIT_NAMES = {"busy": "busy", "waiting_input": "waits for input", "waiting_room": "waits for room"}


def all_charts(runs: Sequence[Run]) -> list[Chart]:
    """Every picture that these runs have numbers for, in the order of the page."""
    return [*_progress(runs), _survival(runs), *_rates(runs), _workers(runs), _waiting(runs), *gpu_charts(runs)]


def _lines(axes: Axes, runs: Sequence[Run], x: Callable[[Run], list[float]], key: str) -> None:
    for index, run in enumerate(runs):
        marker = "o" if len(run.train) < 3 else ""
        axes.plot(x(run), run.values(key), color=colour(index), label=run.name, marker=marker, markersize=3)
    _legend(axes, len(runs))


def _legend(axes: Axes, count: int) -> None:
    if count > 1:
        axes.legend(fontsize=8)


def _progress(runs: Sequence[Run]) -> list[Chart]:
    """Loss and tau over what was spent: steps, labels, time."""

    def loss(x: Callable[[Run], list[float]], label: str) -> Callable[[], Figure]:
        def draw() -> Figure:
            figure, axes = new_axes(label, "cross entropy of a label (nats)")
            _lines(axes, runs, x, "ce")
            if x is not Run.gpu_minutes:
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            return figure

        return draw

    note = "Unweighted, so that runs with other objectives compare."
    spent = "GPU-minutes" if any(run.num_gpus for run in runs) else "minutes"
    return [
        Chart(key="loss-steps", title="Loss over steps", note=note, draw=loss(Run.steps, "step")),
        Chart(
            key="tau-steps",
            title="Tau over steps",
            note="Dots: measured by the draft-verify loop, with 95% intervals. Dashes: the uniform-anchor "
            "estimate, which overstates it.",
            draw=lambda: _tau(runs),
        ),
        Chart(key="loss-labels", title="Loss over labels", note=note, draw=loss(Run.labels, "labels seen")),
        Chart(
            key="tau-labels",
            title="Tau over labels",
            note="What more data would buy: every doubling is one step to the right.",
            draw=lambda: _tau_over_labels(runs),
        ),
        Chart(key="loss-time", title="Loss over time", note=note, draw=loss(Run.gpu_minutes, spent)),
    ]


def _tau(runs: Sequence[Run]) -> Figure:
    figure, axes = new_axes("step", "tokens per verify step")
    for index, run in enumerate(runs):
        axes.plot(run.steps(), run.values("uniform_tau"), color=colour(index), alpha=0.55, linestyle="--")
        _dots(axes, run.true_taus(), lambda step: step, index, run.name)
    axes.plot([], [], color="#808890", linestyle="--", label="uniform-anchor estimate")
    axes.legend(fontsize=8)
    return figure


def _tau_over_labels(runs: Sequence[Run]) -> Figure:
    figure, axes = new_axes("labels seen", "tokens per verify step")
    for index, run in enumerate(runs):
        axes.plot(run.labels(), run.values("uniform_tau"), color=colour(index), alpha=0.55, linestyle="--")
        later = [each for each in run.true_taus() if run.labels_at(each[0])]
        _dots(axes, later, run.labels_at, index, run.name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(EngFormatter(sep="", places=1))
    _legend(axes, len(runs))
    return figure


def _dots(
    axes: Axes, taus: Sequence[tuple[float, Mapping[str, float]]], x: Callable[[float], float], index: int, name: str
) -> None:
    if not taus:
        return
    values = [tau["value"] for _, tau in taus]
    low = [max(0.0, tau["value"] - tau["low"]) for _, tau in taus]
    high = [max(0.0, tau["high"] - tau["value"]) for _, tau in taus]
    at = [x(step) for step, _ in taus]
    axes.errorbar(at, values, yerr=[low, high], color=colour(index), marker="o", markersize=4, capsize=3, label=name)


def _survival(runs: Sequence[Run]) -> Chart:
    def draw() -> Figure:
        figure, axes = new_axes("place in the block", "share of blocks that survive")
        for index, run in enumerate(runs):
            for when, style in (("before", ":"), ("after", "-")):
                if when in run.evaluation:
                    survival = run.evaluation[when]["summary"]["survival"]
                    label = f"{run.name}, {when}" if len(runs) > 1 else when
                    axes.plot(
                        range(1, len(survival) + 1), survival, style, color=colour(index), marker="o", markersize=3,
                        label=label,
                    )  # fmt: skip
            estimate = [number(value) for value in run.train[-1]["place_survival"]]
            axes.plot(range(1, len(estimate) + 1), estimate, "--", color=colour(index), alpha=0.55)
        axes.plot([], [], color="#808890", linestyle="--", label="last training estimate")
        axes.set_ylim(0, 1)
        axes.legend(fontsize=8)
        return figure

    note = "Share of verify steps whose first k drafts were all accepted."
    return Chart(key="survival", title="Survival by place", note=note, draw=draw)


def _rates(runs: Sequence[Run]) -> list[Chart]:
    def rate(key: str, label: str) -> Callable[[], Figure]:
        def draw() -> Figure:
            figure, axes = new_axes("minutes of training", label)
            _lines(axes, runs, lambda run: run.minutes(run.train), key)
            axes.margins(y=0.25)  # room for the legend above curves that are level
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
            return figure

        return draw

    def gradient() -> Figure:
        figure, axes = new_axes("step", "gradient norm")
        _lines(axes, runs, Run.steps, "grad_norm")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.2g}"))
        return figure

    return [
        Chart(
            key="labels-rate",
            title="Labels a second",
            note="Dips are evaluations, checkpoints, or a target that fell behind.",
            draw=rate("labels_per_s", "labels/s"),
        ),
        Chart(key="step-ms", title="Time of a step", note="Waiting included.", draw=rate("step_ms", "ms")),
        Chart(key="gradient", title="Gradient norm", note="Before clipping.", draw=gradient),
    ]


def _workers(runs: Sequence[Run]) -> Chart:
    """Where each worker's time went, from the last line."""

    def draw() -> Figure:
        rows: list[tuple[str, Mapping[str, Any]]] = []
        for run in runs:
            workers: Mapping[str, Any] = run.systems[-1]["workers"] if run.systems else {}
            prefix = f"{run.name}: " if len(runs) > 1 else ""
            rows.extend((f"{prefix}{name}", shares) for name, shares in workers.items())
        figure, axes = new_axes("share of the time", "")
        left = [0.0] * len(rows)
        for index, kind in enumerate(WAITS):
            widths = [number(shares.get(kind)) for _, shares in rows]
            axes.barh([name for name, _ in rows], widths, left=left, color=colour(index), label=WAIT_NAMES[kind])
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.grid(visible=False, axis="y")
        legend_above(axes)
        return figure

    note = "Targets that wait for room are faster than the drafters; drafters that wait for input, faster than those."
    return Chart(key="workers", title="Busy and waiting", note=note, draw=draw)


def _waiting(runs: Sequence[Run]) -> Chart:
    """How much each role waited, up to each moment."""

    def draw() -> Figure:
        figure, axes = new_axes("minutes of training", "share of the time so far")
        for index, run in enumerate(runs):
            times = run.minutes(run.systems)
            for role, style in (("target", "-"), ("drafter", "--")):
                label = f"{run.name}, {role}s" if len(runs) > 1 else f"{role}s"
                waits = [_role_waits(line, role) for line in run.systems]
                axes.plot(times, waits, style, color=colour(index), label=label)
        axes.set_ylim(0, 1)
        axes.legend(fontsize=8)
        return figure

    note = "Waiting of targets and drafters, each role's mean. Over 15% is worth another split."
    return Chart(key="waiting", title="Waiting over time", note=note, draw=draw)


def _role_waits(line: Line, role: str) -> float:
    """Mean waiting share of a role's workers; NaN where it has none (features from disk have readers)."""
    shares = [1.0 - number(worker["busy"]) for name, worker in line["workers"].items() if name.startswith(role)]
    return sum(shares) / len(shares) if shares else float("nan")
