from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data import journal
from draftsmith.data.journal import Journal
from draftsmith.errors import DataError

SETTINGS = {"seed": 1}


def row(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    return {"row": {"text": text, "finish_reason": finish_reason}}


def test_rows_come_out_in_input_order_once_each(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.partial", SETTINGS) as kept:
        kept.add_row(2, row("two", "length"))
        kept.add_answer(0, 0, {"message": "first"})
        kept.add_row(0, row("zéro \ud800"))
        kept.add_row(1, {"skipped": "odd", "detail": "why"})
        report = kept.finish(tmp_path / "out")
    assert [json.loads(line)["text"] for line in (tmp_path / "out").read_text().splitlines()] == ["zéro \ud800", "two"]
    assert (report.rows_in, report.rows_out, report.num_cut, report.skipped) == (3, 2, 1, {"odd": 1})
    saved = json.loads((tmp_path / "out.account.json").read_text())
    assert (saved["rows_out"], saved["settings"]) == (2, SETTINGS)
    assert not (tmp_path / "out.partial").exists()


def test_answers_of_a_row_under_way_come_back_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "out.partial"
    with Journal(path, SETTINGS) as kept:
        kept.add_answer(3, 0, {"message": "a"})
        kept.add_row(7, row("seven"))
        kept.add_answer(3, 1, {"message": "b"})
    with Journal(path, SETTINGS) as kept:
        assert kept.is_done(7)
        assert not kept.is_done(3)
        assert not kept.is_done(99)
        assert kept.answers(3) == [{"message": "a"}, {"message": "b"}]
        kept.add_row(3, row("three"))
    with Journal(path, SETTINGS) as kept:
        assert kept.is_done(3)
        assert kept.answers(3) == []


@pytest.mark.parametrize("damage", ["torn", "no new line", "zeros", "garbage in the middle", "a turn lost"])
def test_a_damaged_line_costs_its_own_answer_only(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "out.partial"
    with Journal(path, SETTINGS) as kept:
        kept.add_answer(0, 0, {"message": "a"})
        kept.add_answer(0, 1, {"message": "b"})
        kept.add_row(1, row("one"))
        kept.add_row(2, row("two"))
    mark, first, second, one, two = path.read_bytes().splitlines(keepends=True)
    damaged = {
        "torn": [mark, first, second, one, two[:-5]],
        "no new line": [mark, first, second, one, two[:-1]],
        "zeros": [mark, first, second, one, b"\0" * 4096],
        "garbage in the middle": [mark, first, second, one[:3] + b"\xff\n", two],
        "a turn lost": [mark, b"\0\0\n", second, one, two],
    }[damage]
    path.write_bytes(b"".join(damaged))
    with Journal(path, SETTINGS) as kept:
        assert kept.is_done(1) == (damage != "garbage in the middle")
        assert kept.is_done(2) == (damage in ("garbage in the middle", "a turn lost"))
        messages = [answer["message"] for answer in kept.answers(0)]
        assert messages == ([] if damage == "a turn lost" else ["a", "b"])
        kept.add_row(0, row("zero"))
        kept.add_row(1, row("one"))
        kept.add_row(2, row("two"))
        assert b"\0\0\0" not in path.read_bytes(), "what was torn is gone"
        kept.finish(tmp_path / "out")
    assert [json.loads(line)["text"] for line in (tmp_path / "out").read_text().splitlines()] == ["zero", "one", "two"]


def test_a_torn_first_line_begins_anew_and_another_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.partial"
    path.write_bytes(b'{"form')
    with Journal(path, SETTINGS) as kept:
        kept.add_row(0, row("zero"))
    before = path.read_bytes()
    with pytest.raises(DataError, match="other data or settings"):
        Journal(path, {"seed": 2})
    assert path.read_bytes() == before


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.partial", SETTINGS), pytest.raises(DataError, match=r"another .* is writing"):
        Journal(tmp_path / "out.partial", SETTINGS)
    Journal(tmp_path / "out.partial", SETTINGS).__exit__()


def test_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.partial", SETTINGS) as kept, pytest.raises(DataError, match="the source is empty"):
        kept.finish(tmp_path / "out")
    assert not (tmp_path / "out.new").exists()


def test_lines_reach_the_disk_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync

    def counted(descriptor: int) -> None:
        real(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(journal.os, "fsync", counted)
    monkeypatch.setattr(journal, "SYNC_SECONDS", 0.05)
    with Journal(tmp_path / "out.partial", SETTINGS) as kept:
        for index in range(40):
            kept.add_row(index, row("x"))
            time.sleep(0.005)
        during = len(synced)
    size = (tmp_path / "out.partial").stat().st_size
    assert 1 <= during <= 8
    assert synced == sorted(synced)
    assert synced[-1] == size


WRITER = """
import sys, itertools
from draftsmith.data.journal import Journal
with Journal(__import__("pathlib").Path(sys.argv[1]), {"seed": 1}) as kept:
    for index in itertools.count():
        if not kept.is_done(index):
            kept.add_row(index, {"row": {"text": "x" * (index % 5000), "finish_reason": "stop"}})
            print(index, flush=True)
"""


@pytest.mark.long
def test_a_killed_process_loses_nothing_that_it_kept(tmp_path: Path) -> None:
    """SIGKILL at five moments: whatever the journal had taken is there, once, and the rest is written behind it."""
    path, told = tmp_path / "out.partial", -1
    for moment in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = int(process.stdout.readline())
            assert first > told
            time.sleep(0.02 * (moment + 1))
            os.kill(process.pid, signal.SIGKILL)
            told = max([first, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
        assert process.returncode == -signal.SIGKILL
    with Journal(path, SETTINGS) as kept:
        assert all(kept.is_done(index) for index in range(told + 1))
        assert not kept.is_done(told + 2)
        report = kept.finish(tmp_path / "out")
    lengths = [len(json.loads(line)["text"]) for line in (tmp_path / "out").read_text().splitlines()]
    assert lengths == [index % 5000 for index in range(report.rows_out)]
