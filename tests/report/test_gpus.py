"""Pictures of GPUs over time, from log lines as a run writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from draftsmith.pipeline.utilisation import GpuSampler, Reading
from draftsmith.report.gpus import busy_gpus, gpu_charts, gpus_of
from draftsmith.report.paper import SERIES
from draftsmith.report.runs import Run, read_run
from draftsmith.train.metrics import MetricsWriter
from tests.report.made_up import train_line, write_run


def run_of(folder: Path, **more: bool | int) -> Run:
    return read_run(write_run(folder, **more), folder.name)


def keys(*runs: Run) -> list[str]:
    return [chart.key for chart in gpu_charts(runs)]


def test_there_are_as_many_pictures_as_the_log_has_numbers_for(tmp_path: Path) -> None:
    assert keys(run_of(tmp_path / "cpu")) == []
    untold = run_of(tmp_path / "untold", gpus=2, told=False)
    assert keys(untold) == ["memory"]
    assert keys(untold, run_of(tmp_path / "told", gpus=2)) == ["utilisation", "memory"]


def test_each_gpu_has_a_line_of_utilisation_with_gaps_where_the_driver_said_nothing(tmp_path: Path) -> None:
    utilisation, _ = gpu_charts([run_of(tmp_path / "a", gpus=2)])
    axes = utilisation.draw().axes[0]
    first, second = axes.lines
    assert math.isnan(first.get_ydata()[0])
    assert first.get_ydata()[1] == pytest.approx(0.97)
    assert min(second.get_ydata()[1:]) == pytest.approx(0.34)
    assert list(first.get_xdata())[:2] == [0.0, 0.5]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["cuda:0: 93%", "cuda:1: 70%"]


def test_the_mean_counts_time_not_lines(tmp_path: Path) -> None:
    """A line that comes late, behind an evaluation say, speaks for all of its time."""
    run = tmp_path / "run"
    run.mkdir()
    shares = [(0.0, 0.1), (10.0, 0.9), (100.0, 0.5)]
    with (run / "metrics.jsonl").open("w") as file:
        for at, share in shares:
            gpus = {"cuda:0": {"allocated_bytes": 1, "reserved_bytes": 1, "peak_bytes": 1, "utilisation": share}}
            file.write(json.dumps(train_line(1, 1.0) | {"time": 1e9 + at}) + "\n")
            file.write(json.dumps({"kind": "system", "step": 1, "time": 1e9 + at, "workers": {}, "gpus": gpus}) + "\n")
    (busy,) = busy_gpus(read_run(run, "run"))
    assert busy.share == pytest.approx((10 * 0.9 + 90 * 0.5) / 100)


class Ramp:
    """A driver that knows its first samples' memory only, then a utilisation that rises."""

    def __init__(self) -> None:
        self.count = 0

    def read(self) -> Reading:
        self.count += 1
        return Reading(utilisation=math.nan if self.count < 3 else self.count / 10, used_bytes=5e9)


def test_lines_as_the_sampler_and_the_writer_make_them(tmp_path: Path) -> None:
    sampler = GpuSampler({"cuda:0": Ramp()})
    run = tmp_path / "run"
    run.mkdir()
    with MetricsWriter(run) as writer:
        for step in (1, 2, 3):
            sampler.sample()
            sampler.sample()
            line = {
                name: value for name, value in train_line(step, 1.0).items() if name not in ("kind", "step", "time")
            }
            writer.write("train", step, line)
            memory = {"allocated_bytes": 1e9, "reserved_bytes": 2e9, "peak_bytes": 2e9}
            gpus = {name: {**memory, **told} for name, told in sampler.take().items()}
            writer.write("system", step, {"workers": {}, "queue_depth": [0], "gpus": gpus})
    utilisation, memory_chart = gpu_charts([read_run(run, "run")])
    (line,) = utilisation.draw().axes[0].lines
    assert math.isnan(line.get_ydata()[0])
    assert list(line.get_ydata()[1:]) == pytest.approx([0.35, 0.55])
    assert {line.get_ydata()[-1] for line in memory_chart.draw().axes[0].lines if len(line.get_ydata())} == {
        1.0,
        2.0,
        5.0,
    }


def test_memory_shows_what_torch_and_what_the_card_says(tmp_path: Path) -> None:
    *_, memory = gpu_charts([run_of(tmp_path / "a", gpus=2)])
    axes = memory.draw().axes[0]
    levels = {(line.get_linestyle(), line.get_ydata()[-1]) for line in axes.lines if len(line.get_ydata())}
    assert levels == {("-", 60.0), ("--", 40.0), (":", 63.0), ("-", 70.0), ("--", 50.0), (":", 73.0)}
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    assert words == ["cuda:0", "cuda:1", "reserved by torch", "of it in use", "all on the card"]
    *_, untold = gpu_charts([run_of(tmp_path / "b", gpus=1, told=False)])
    assert "all on the card" not in untold.svg()


def test_eight_gpus_are_in_the_order_of_their_numbers_and_told_apart(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", gpus=12)
    assert gpus_of(run) == [f"cuda:{index}" for index in range(12)]
    utilisation, _ = gpu_charts([run])
    lines = utilisation.draw().axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 12 > len(SERIES)
