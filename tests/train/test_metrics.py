"""metrics.jsonl and what stands in it."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.train.metrics import (
    MetricsConfig,
    MetricsWriter,
    WandbSink,
    open_wandb,
    read_metrics,
    read_step,
    summarise_sums,
)
from draftsmith.train.step import accumulate, update
from tests.train.tiny import BLOCK, Tiny, no_totals, tiny_batch, tiny_ends, uniforms

HEAD = [6.0, 4.0, 14.0, 7.0]
"""Numerator, denominator, cross entropy, labels."""
LABELS, RIGHT, SURVIVED = [0.0, 4.0, 3.0], [0.0, 2.0, 3.0], [0.0, 2.0, 1.0]
"""By place of a block of 3."""
SUMS = torch.tensor([*HEAD, *LABELS, *RIGHT, *SURVIVED])


def test_sums_by_hand() -> None:
    assert summarise_sums(SUMS, 3) == {
        "loss": 1.5,
        "numerator": 6.0,
        "denominator": 4.0,
        "ce": 2.0,
        "labels": 7.0,
        "accuracy": 5 / 7,
        "place_labels": [4.0, 3.0],
        "place_accuracy": [0.5, 1.0],
        "place_survival": [0.5, 1 / 3],
        "uniform_tau": pytest.approx(1 + 0.5 + 1 / 3),
    }


def test_no_labels_give_none_never_a_division_by_zero() -> None:
    empty = summarise_sums(torch.zeros(13), 3)
    nothing = ("loss", "ce", "accuracy", "uniform_tau")
    assert [empty[name] for name in nothing] == [None] * 4
    assert empty["place_survival"] == [None, None]
    short = SUMS.clone()
    short[[6, 9, 12]] = 0.0
    assert summarise_sums(short, 3)["uniform_tau"] == 1.5


def test_summaries_equal_counts_over_the_blocks_themselves() -> None:
    """A drafter whose every guess is token 0, on blocks whose labels are all token 0, survives everywhere."""
    state, batch = Tiny().build(), tiny_batch()
    batch.token_ids_T.zero_()
    state.ends.head_VH.zero_()  # all logits equal: argmax is 0
    totals = no_totals(state)
    accumulate(state, batch, uniforms(batch))
    update(state, totals)
    summary = summarise_sums(totals, BLOCK)
    assert summary["accuracy"] == 1.0
    assert summary["place_survival"] == [1.0] * (BLOCK - 1)
    assert summary["uniform_tau"] == BLOCK
    assert summary["ce"] == pytest.approx(torch.tensor(256.0).log().item(), rel=1e-5)


def test_one_read_gives_the_step_and_leaves_it_as_it_was() -> None:
    state, batch = Tiny().build(), tiny_batch()
    totals = no_totals(state)
    accumulate(state, batch, uniforms(batch))
    update(state, totals)
    state.parameters.grad_N.fill_(float("nan"))
    update(state, totals)
    before = totals.clone()
    numbers = read_step(state, totals)
    assert torch.equal(totals, before)
    assert numbers["lr"] == pytest.approx(1e-2)
    assert (numbers["skipped"], numbers["empty"]) == (1, 1)
    assert numbers["loss"] == summarise_sums(totals, BLOCK)["loss"]


def test_lines_carry_kind_step_and_time(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("train", 3, {"loss": 0.1, "place_survival": [0.5, None]})
        metrics.write("eval", 4, {"tau": 2.5, "sets": {"gsm8k": {"tau": 3.0}}})
    first, second = read_metrics(tmp_path)
    assert first.pop("time") > 1.7e9
    assert first == {"kind": "train", "step": 3, "loss": 0.1, "place_survival": [0.5, None]}
    assert second["sets"] == {"gsm8k": {"tau": 3.0}}
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == second


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("train", 1, {"loss": float("nan"), "list": (float("inf"), 1.0), "map": {"a": float("-inf")}})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    line = json.loads(text)
    assert (line["loss"], line["list"], line["map"]) == (None, [None, 1.0], {"a": None})


def test_a_torn_last_line_is_left_out_and_a_broken_one_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert [line["step"] for line in read_metrics(file)] == [1, 2]
    file.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"line 2 is not JSON .*: delete that line"):
        read_metrics(tmp_path)
    with pytest.raises(CheckpointError, match=r"doesn't exist: give the folder of a run"):
        read_metrics(tmp_path / "nowhere")


def test_a_resume_cuts_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("train", 1, {"loss": 1.0})
        position = metrics.sync()
        metrics.write("train", 2, {"loss": 2.0})
    assert position == len((tmp_path / "metrics.jsonl").read_bytes().split(b"\n")[0]) + 1
    with MetricsWriter(tmp_path, position=position, resumed_step=1) as metrics:
        assert metrics.sync() == position
        metrics.write("train", 2, {"loss": 3.0})
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1.0, 3.0]
    with MetricsWriter(tmp_path) as metrics:
        assert metrics.sync() == 0


def test_a_file_shorter_than_the_checkpoint_remembers_keeps_its_whole_lines(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step"')
    with MetricsWriter(tmp_path, position=500, resumed_step=2) as metrics:
        metrics.write("train", 3, {})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("train", 1, {"loss": 0.5, "place_survival": [0.25, None], "note": "text", "capture": True})
        metrics.write("train", 2, {"loss": 0.25})
    time.sleep(1.0)  # event files sort by the second they were made in
    with MetricsWriter(tmp_path, position=0, resumed_step=1) as metrics:
        metrics.write("train", 2, {"loss": 0.125})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/capture", "train/loss", "train/place_survival/1"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.125)]


class FakeRun:
    """What `wandb.init` returns, as far as the sink uses it."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.logged.append((dict(numbers), step))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_the_same_numbers_when_asked(tmp_path: Path) -> None:
    run = FakeRun()
    with MetricsWriter(tmp_path, sinks=[WandbSink(run)]) as metrics:
        metrics.write("train", 7, {"loss": 0.5})
    assert run.logged == [({"train/loss": 0.5}, 7)]
    assert run.finished


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed here")
def test_wandb_without_the_package_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--wandb-project needs the wandb extra: pip install"):
        open_wandb("p", tmp_path)


def test_config_refuses_never_logging() -> None:
    with pytest.raises(ConfigError, match="--log-every 0 is not 1 or more"):
        MetricsConfig(log_every=0)


def test_every_field_of_a_train_line_stands_in_the_schema(tmp_path: Path) -> None:
    schema = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    described = set(re.findall(r"^\| `(\w+)`", schema, flags=re.MULTILINE))
    state = Tiny().build(tiny_ends())
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("train", 1, read_step(state, no_totals(state)))
    line: dict[str, Any] = read_metrics(tmp_path)[0]
    assert set(line) <= described
