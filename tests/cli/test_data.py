"""prepare, inspect and regenerate on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.cli import run
from draftsmith.cli.data import PrepareCommand, RegenerateCommand
from draftsmith.data.prepared import load_prepared
from draftsmith.errors import ConfigError
from draftsmith.target.model import TargetConfig
from tests.cli.conftest import Files


def test_prepared_data_is_judged_and_shown(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = files.folder / "prepared", files.folder / "page.html"
    asked = ["prepare", files.chats, "--target", files.target, "--out", str(out)]
    assert run([*asked, "--off-policy-rows", "4"]) == 0
    shown = capsys.readouterr().out
    assert "over 4 rows" in shown
    found = load_prepared(out).facts["on_policy"]
    assert (found["num_rows"], len(found["gaps"]), found["target"]) == (4, 4, files.target)
    assert "over 4 rows" in found["verdict"]
    assert f"--data {out}" in shown
    assert run(["inspect", str(out), "--target", files.target, "--rows", "1"]) == 0
    assert "abc abc" in capsys.readouterr().out
    assert run(["inspect", files.chats, "--target", files.target, "--html", str(page)]) == 0
    assert "<mark>abc abc" in page.read_text()
    assert run(["inspect", str(out), "--target", "smollm2"]) == 2
    assert "prepared with another tokenizer" in capsys.readouterr().err


def test_answers_are_generated_here_without_a_server(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    few, out = files.folder / "few.jsonl", files.folder / "own.jsonl"
    few.write_text("".join(Path(files.chats).read_text().splitlines(keepends=True)[:3]))
    asked = ["regenerate", str(few), "--target", files.target, "--out", str(out), "--max-new-tokens", "4"]
    assert run(asked) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3
    assert rows[0]["messages"][0]["content"] == "say 0"
    assert "3 of 3 rows" in capsys.readouterr().out
    assert run(asked) == 2
    assert "choose another --out" in capsys.readouterr().err


def test_a_server_that_isnt_there_is_said(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["regenerate", files.chats, "--target", files.target, "--out", str(files.folder / "served.jsonl")]
    assert run([*asked, "--server", "http://127.0.0.1:9/v1", "--retries", "0"]) == 2
    assert "no answer from http://127.0.0.1:9/v1 after 1 tries" in capsys.readouterr().err


def test_nothing_given_is_said() -> None:
    target = TargetConfig(target="smollm2")
    with pytest.raises(ConfigError, match="nothing to prepare"):
        PrepareCommand(chats=(), target=target, out="o")
    with pytest.raises(ConfigError, match="nothing to regenerate"):
        RegenerateCommand(chats=(), target=target, out="o")
