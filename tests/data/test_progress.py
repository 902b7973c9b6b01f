"""A long stage is never silent: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from draftsmith.data import progress


def test_a_log_file_gets_a_line_now_and_then_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    out = io.StringIO()
    with progress.progress_bar(Console(file=out, width=100), "preparing", 4000, done=1000) as advance:
        now = 110.0
        advance(100)
        assert out.getvalue() == ""
        now = 120.0
        advance(100)
        assert out.getvalue() == "preparing: 1,200 of 4,000 rows · 10 rows/s\n"
        now = 125.0
        advance(1800)
    assert out.getvalue().splitlines()[1:] == ["preparing: 3,000 of 4,000 rows · 80 rows/s"]


def test_slow_rows_keep_their_decimals_and_an_unknown_total_is_left_out() -> None:
    assert progress.rate_text(3, None, 0.256) == "3 rows · 0.26 rows/s"


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    with progress.progress_bar(Console(file=out, width=100, force_terminal=True), "preparing", 4) as advance:
        advance(4)
    assert "━" in out.getvalue()
    assert "4 of 4 rows" in out.getvalue()


def test_without_a_console_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar(None, "preparing", 4) as advance:
        advance(4)
    assert capsys.readouterr() == ("", "")
