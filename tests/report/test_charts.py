from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.report.charts import all_charts
from draftsmith.report.runs import read_run
from tests.report.made_up import write_run

ALWAYS = ["loss-steps", "tau-steps", "loss-labels", "tau-labels", "loss-time", "survival"]
RATES = ["labels-rate", "step-ms", "gradient", "workers", "waiting"]


def test_every_picture_draws_every_run(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, gpus=2), name) for name in ("first", "second")]
    charts = all_charts(runs)
    assert [chart.key for chart in charts] == [*ALWAYS, *RATES, "utilisation", "memory"]
    for chart in charts:
        text = chart.svg()
        assert "first" in text
        assert "second" in text


def test_memory_is_left_out_without_a_gpu(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a"), "a")
    assert [chart.key for chart in all_charts([run])] == [*ALWAYS, *RATES]


@pytest.mark.parametrize(("gpus", "label"), [(2, "GPU-minutes"), (0, "minutes")])
def test_time_is_counted_for_each_gpu_where_there_is_one(gpus: int, label: str, tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", gpus=gpus), "a")
    (chart,) = [chart for chart in all_charts([run]) if chart.key == "loss-time"]
    assert chart.draw().axes[0].get_xlabel() == label


def test_an_unmeasured_run_still_draws(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", evaluated=False), "a")
    for chart in all_charts([run]):
        assert chart.svg().startswith("<svg")


def test_tau_shows_what_was_measured_not_the_estimate_alone(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a"), "a")
    tau = next(chart for chart in all_charts([run]) if chart.key == "tau-steps")
    axes = tau.draw().axes[0]
    measured = axes.containers[0].lines[0]
    assert list(measured.get_xdata()) == [0, 100, 300, 400]
    assert measured.get_ydata()[-1] == 3.0


def test_waiting_is_a_roles_mean(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a"), "a")
    waiting = next(chart for chart in all_charts([run]) if chart.key == "waiting")
    targets, drafters = waiting.draw().axes[0].lines
    assert targets.get_ydata()[0] == pytest.approx(0.18)
    assert drafters.get_ydata()[0] == pytest.approx(0.03)
