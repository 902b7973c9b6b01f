from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from draftsmith.cli.report import ReportCommand, command_of, report
from draftsmith.cli.train import configure
from draftsmith.errors import ConfigError
from tests.report.made_up import write_run

FLAGS = (
    "--target smollm2 --data chats.jsonl --out runs/a --taps 1 8 14 --no-mixed --colocate --lr 0.001 --weights decay "
    "--gamma 5.0 --prompts gsm8k mt-bench --template-kwargs enable_thinking False --max-length 2048 --seed 3"
)


def test_the_command_gives_the_same_settings_again() -> None:
    config, _ = configure(FLAGS.split(), "train", "")
    saved = json.loads(json.dumps(asdict(config)))
    command = shlex.split(command_of(saved))
    assert command[:2] == ["draftsmith", "train"]
    assert configure(command[2:], "train", "")[0] == config
    assert "--epochs" not in command  # defaults are left out


def test_a_report_lies_in_the_run_unless_told_otherwise(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", speed=2.0)
    assert report([str(one)]) == 0
    assert "smollm2" in (one / "report.html").read_text()
    assert report([str(one), str(two), "--out", str(tmp_path / "both.html")]) == 0
    page = (tmp_path / "both.html").read_text()
    assert "one, before" in page
    assert "two, before" in page
    assert "&lt;b&gt;.jsonl" in page


def test_no_run_is_said() -> None:
    with pytest.raises(ConfigError, match="no run to report"):
        ReportCommand(runs=())
