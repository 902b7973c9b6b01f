"""train and capture from the command line."""

from __future__ import annotations

import json

import pytest

from draftsmith.cli import run
from draftsmith.train.checkpoint import load_checkpoint
from tests.cli.conftest import Files


def test_a_dry_run_passes_and_leaves_nothing(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files.train("--dry-run", out="dry")) == 0
    assert "dry run passed" in capsys.readouterr().out
    assert not (files.folder / "dry").exists()


def test_a_resume_goes_on_with_the_runs_own_settings(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files.train("--no-measure-start", out="again")) == 0
    again = files.folder / "again"
    assert "over 4 rows" in capsys.readouterr().out  # whose answers these are, before training
    found = json.loads((again / "on_policy.json").read_text())
    assert (found["num_rows"], len(found["gaps"]), found["target"]) == (4, 4, files.target)
    assert "over 4 rows" in found["verdict"]
    assert run(["train", "--resume", str(again), "--max-steps", "14"]) == 0
    assert "continuing from step 12" in capsys.readouterr().out
    assert load_checkpoint(again).position.step == 14
    assert json.loads((again / "config.json").read_text())["config"]["batch"]["anchors"] == 32


def test_training_from_captured_features(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    features = files.folder / "features"
    sizes = ["--target", files.target, "--token-budget", "256", "--block-size", "4", "--layers", "1", "--anchors", "32"]
    assert run(["capture", "--data", files.chats, "--out", str(features), *sizes]) == 0
    assert f"--features {features}" in capsys.readouterr().out.replace("\n", " ")
    asked = ["train", "--features", str(features), "--out", str(files.folder / "fed"), *sizes, "--max-steps", "2"]
    assert run(asked) == 0
    assert (files.folder / "fed" / "drafter" / "config.json").is_file()
