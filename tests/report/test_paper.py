from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from draftsmith.report.paper import GRID, INK, LIGHT_INK, SERIES, Chart, colour, legend_above, new_axes


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


def test_a_legend_above_takes_as_many_columns_as_fit_and_leaves_the_curves_their_height() -> None:
    def legend_of(names: list[str]) -> tuple[int, float, float]:
        """Columns, and the height in pixels of the figure and of the axes in it."""
        figure, axes = new_axes("x", "y")
        for name in names:
            axes.plot([0, 1], [0, 1], label=name)
        legend_above(axes)
        figure.draw_without_rendering()
        frame, inner = axes.get_legend().get_window_extent(), axes.get_window_extent()
        assert frame.x0 >= 0
        assert frame.x1 <= figure.bbox.width
        assert frame.y1 <= figure.bbox.height
        return axes.get_legend()._ncols, figure.bbox.height, inner.height

    one = legend_of(["cuda:0"])
    eight = legend_of([f"cuda:{index}: 97%" for index in range(8)])
    long = legend_of([f"a-run-of-mine-{index} cuda:{index}: 97%" for index in range(8)])
    longest = legend_of(["a-run-with-a-rather-long-name-of-its-own cuda:3: 97%"] * 2)
    assert (one[0], eight[0], long[0], longest[0]) == (1, 3, 2, 1)
    assert one[1] < eight[1] < long[1]
    assert max(one[2], eight[2], long[2]) < 1.1 * min(one[2], eight[2], long[2])
