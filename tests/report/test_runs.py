from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from draftsmith.errors import CheckpointError
from draftsmith.report.runs import number, read_run, read_runs
from tests.report.made_up import train_line, write_run


def test_a_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", gpus=2), "a")
    assert run.steps()[:2] == [10, 20]
    assert (len(run.train), len(run.systems), len(run.evals)) == (40, 40, 2)
    assert run.labels()[1] == 300_000
    assert run.labels_at(25) == 300_000
    assert run.labels_at(5) == 0
    assert run.minutes(run.train)[-1] == pytest.approx(3 * 390 / 60)
    assert run.gpu_minutes()[-1] == pytest.approx(2 * 3 * 390 / 60)
    assert run.account["rows_in"] == 100
    assert run.versions["torch"] == "2.13.0"


def test_whose_answers_it_trained_on_is_the_runs_own_record_or_its_datas(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    assert read_run(folder, "a").on_policy == {}
    account = json.loads((folder / "data" / "account.json").read_text())
    (folder / "data" / "account.json").write_text(json.dumps(account | {"on_policy": {"mean": 0.5}}))
    assert read_run(folder, "a").on_policy == {"mean": 0.5}
    (folder / "on_policy.json").write_text(json.dumps({"mean": 0.25}))
    assert read_run(folder, "a").on_policy == {"mean": 0.25}


def test_tau_comes_from_the_true_loop_at_both_ends_and_between(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a"), "a")
    assert [(step, round(tau["value"], 2)) for step, tau in run.true_taus()] == [
        (0, 1.5),
        (100, 1.93),
        (300, 2.6),
        (400, 3.0),
    ]


def test_a_bare_log_is_enough(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(train_line(10, 1.0)) + "\n")
    run = read_run(tmp_path, "bare")
    assert run.true_taus() == []
    assert (run.config, run.account, run.versions) == ({}, {}, {})
    assert run.gpu_minutes() == [0.0]


def test_no_log_or_an_empty_one_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="doesn't exist"):
        read_run(tmp_path, "none")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="has logged no step yet"):
        read_run(tmp_path, "empty")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "evaluation.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"evaluation\.json is damaged"):
        read_run(folder, "a")


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    one, two, three = (write_run(tmp_path / name) for name in ("a/run", "b/run", "c"))
    assert [run.name for run in read_runs([one, three])] == ["run", "c"]
    assert [run.name for run in read_runs([one, two])] == [str(one), str(two)]


def test_missing_numbers_leave_a_gap() -> None:
    assert number(3) == 3.0
    assert math.isnan(number(None))
