"""The live view: every number it is given is on the screen; plain lines where there is no terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from draftsmith.pipeline.live import TrainView

LINE: dict[str, Any] = {
    "step": 30,
    "loss": 1.2345,
    "uniform_tau": 2.36,
    "lr": 1e-3,
    "grad_norm": 0.42,
    "step_ms": 502.0,
    "tokens_per_s": 97_000.0,
    "labels_per_s": 30_600.0,
    "place_survival": [0.65, 0.36, None],
    "skipped": 2,
    "system": {
        "workers": {
            "target 0": {"busy": 0.99, "waiting_input": 0.0, "waiting_room": 0.01},
            "drafter 0": {"busy": 0.80, "waiting_input": 0.2, "waiting_room": 0.0},
        },
        "queue_depth": [2],
        "gpus": {
            "cuda:0": {"allocated_bytes": 43.85e9, "reserved_bytes": 72.9e9, "utilisation": 0.97, "used_bytes": 75e9},
            "cuda:1": {"allocated_bytes": 1e9, "reserved_bytes": 2e9, "utilisation": float("nan")},
            "cuda:2": {"allocated_bytes": 1e9, "reserved_bytes": 2e9},
        },
    },
}


def screen(view: TrainView, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view.render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_everything_it_is_told_is_on_the_screen() -> None:
    view = TrainView(Console(file=io.StringIO()), total=100, done=0)
    view.show(LINE)
    view.show({"step": 40, "tau": 2.22})
    text = screen(view)
    for shown in (
        "step 40 of 100",
        "1.234",
        "2.36",
        "2.22",
        "502 ms",
        "97,000",
        "97%  43.85 of 72.9 GB",
        "input 20%",
        "skipped steps",
    ):
        assert shown in text, shown
    assert "█" * 13 + "·" * 7 + " 0.65" in text
    assert max(len(line) for line in text.splitlines()) <= 110


def test_a_terminal_of_80_columns_wraps_nothing() -> None:
    gpu = {"allocated_bytes": 118.25e9, "reserved_bytes": 139.5e9, "utilisation": 1.0}
    system = LINE["system"] | {"gpus": {f"cuda:{index}": gpu for index in range(8)}}
    view = TrainView(Console(file=io.StringIO()), total=100_000, done=0)
    view.show(LINE | {"step": 12_345, "tau": 2.2, "labels_per_s": 1_234_567.0, "system": system})
    rows = screen(view, 80).splitlines()
    wide = screen(view, 110).splitlines()
    assert len(rows) == len(wide)
    text = "\n".join(rows)
    assert "1 ██████" in text
    assert "·" * 4 + " 0.65" in text
    assert "cuda:7    100% 118.2/139.5 GB" in text
    assert "cuda:7    100% 118.25 of 139.5 GB" in "\n".join(wide)
    assert "left" in rows[1]


def test_an_empty_view_can_be_drawn() -> None:
    assert "step 0 of 10" in screen(TrainView(Console(file=io.StringIO()), total=10, done=0))


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with TrainView(Console(file=out, width=200), total=100, done=0) as view:
        for step in range(1, 101):
            view.show({**LINE, "step": step})
    lines = out.getvalue().strip().splitlines()
    assert 15 <= len(lines) <= 21
    assert lines[-1].startswith("training 100/100")
    assert "loss 1.234" in lines[-1]


def test_a_terminal_gets_one_screen() -> None:
    out = io.StringIO()
    with TrainView(Console(file=out, width=110, force_terminal=True), total=10, done=0) as view:
        view.show(LINE)
    assert "draftsmith train" in out.getvalue()
