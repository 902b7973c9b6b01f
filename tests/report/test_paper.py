from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from draftsmith.report.paper import GRID, INK, LIGHT_INK, SERIES, Chart, colour, new_axes


def chart() -> Chart:
    def draw() -> Figure:
        figure, axes = new_axes("steps", "loss <nats>")
        axes.plot([0, 1], [1, 0], color=colour(0))
        return figure

    return Chart(key="c", title="t", note="n", draw=draw)


def test_the_page_colours_the_picture() -> None:
    svg = chart().svg()
    assert svg.startswith("<svg")
    assert INK not in svg
    assert GRID not in svg
    assert "var(--ink)" in svg
    assert "var(--grid)" in svg
    assert SERIES[0] in svg
    assert ">steps</text>" in svg  # text stays text
    assert "loss &lt;nats&gt;" in svg
    head = svg[: svg.index(">")]
    assert " width=" not in head
    assert " height=" not in head
    assert "viewBox=" in head


def test_the_same_numbers_give_the_same_picture() -> None:
    assert chart().svg() == chart().svg()


def test_a_png_has_real_colours(tmp_path: Path) -> None:
    path = chart().save_png(tmp_path)
    assert path.name == "c.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert LIGHT_INK != INK


def test_colours_come_round() -> None:
    assert colour(len(SERIES)) == SERIES[0]
