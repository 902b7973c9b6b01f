"""Pictures that follow the page: matplotlib's SVG in the page's colours, text as text; and PNGs in light colours.

A picture is a function that draws it, called once for each of the two: colours that depend on the page stand in the
style alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib.figure import Figure

INK, GRID = "#0a0b0c", "#0a0b0d"
"""Stand-ins that no series uses: in SVG they become variables of the page, so that it can turn dark."""
VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)"}
LIGHT_INK, LIGHT_GRID = "#1c2024", "#d9dde2"
SERIES = ("#2f7fd6", "#e07b00", "#169c6b", "#c2418b", "#8a63d2", "#8c7a00", "#b5473c", "#1aa3b8")
"""Told apart on white and on near-black, and by the colour-blind in this order; as many as a host usually has GPUs."""
SIZE = (4.6, 2.9)
"""Inches: small against the text in it, since a page shows pictures at about this size, or smaller on a phone."""
LEGEND_LETTERS, LEGEND_HANDLE = 72, 8
"""Letters that a legend's row holds, and how many of them a line before its name takes."""
LEGEND_ROW = 0.17
"""Inches."""
Axes = Any
"""matplotlib's Axes, whose own types are partly unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture with what it shows."""

    key: str
    """Of its file and its place on the page."""
    title: str
    note: str
    draw: Callable[[], Figure]

    def svg(self) -> str:
        """For a page: no fixed size, colours of text and grid as variables."""
        buffer = io.StringIO()
        with _style(INK, GRID):
            self.draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r'^(<svg[^>]*?) width="[^"]*"', r"\1", text)
        text = re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", text)
        for stand_in, variable in VARIABLES.items():
            text = text.replace(stand_in, variable)
        return text

    def save_png(self, folder: Path) -> Path:
        """Write `KEY.png` in light colours."""
        path = folder / f"{self.key}.png"
        with _style(LIGHT_INK, LIGHT_GRID):
            self.draw().savefig(path, format="png", dpi=200, facecolor="white")
        return path


def _style(ink: str, grid: str) -> AbstractContextManager[None]:
    settings: dict[str, Any] = {
        "font.size": 10,
        "font.family": "sans-serif",
        "svg.fonttype": "none",
        "svg.hashsalt": "draftsmith",
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": grid,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": grid,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
    }
    return cast(Any, matplotlib.rc_context)(settings)


def new_axes(x: str, y: str) -> tuple[Figure, Axes]:
    """An empty picture."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = cast(Axes, figure.subplots())
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def legend_above(axes: Axes) -> None:
    """Above the picture, for curves that fill it: as many columns as fit beside each other."""
    words = [str(text) for text in axes.get_legend_handles_labels()[1]]
    columns = max(1, min(len(words), LEGEND_LETTERS // (max(map(len, words)) + LEGEND_HANDLE)))
    rows = -(-len(words) // columns)
    axes.figure.set_figheight(SIZE[1] + LEGEND_ROW * (rows - 1))  # the curves keep their height
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=columns, columnspacing=1.0)


def colour(index: int) -> str:
    return SERIES[index % len(SERIES)]
