"""From conversations to a measured, exported, verified drafter, by the command line alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from draftsmith.cli import run
from draftsmith.cli.drafter import ExportCommand, VerifyCommand
from draftsmith.errors import ConfigError
from draftsmith.evaluate.export import read_weights
from draftsmith.evaluate.layout import split_weights
from draftsmith.target.model import TargetConfig
from draftsmith.train.checkpoint import MASTERS, META, load_checkpoint, sha256
from tests.cli.conftest import Files

SHORT = ["--max-new-tokens", "6", "--num-prompts", "2"]


def test_several_drafters_are_measured_on_one_table_and_saved(
    trained: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = trained.folder / "eval" / "results.json"
    earlier = str(trained.run / "checkpoints" / "step-00000006")
    asked = ["evaluate", str(trained.run), earlier, "--prompts", trained.prompts, "--save", str(saved)]
    capsys.readouterr()
    assert run([*asked, *SHORT, "--block-size", "3"]) == 0
    shown = capsys.readouterr().out
    assert "run identical to greedy: yes" in shown
    assert "run and step-00000006 can't be told apart" in shown or "than step-00000006 by" in shown
    mine, other = json.loads(saved.read_text())
    assert (mine["drafter"], other["drafter"]) == ("run", "step-00000006")
    assert mine["target"] == trained.target
    assert mine["block_size"] == 3
    assert mine["summary"]["num_prompts"] == 2


def test_an_export_is_the_newest_checkpoint_with_a_card_and_verifies(
    trained: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    out = trained.folder / "exported"
    assert run(["export", str(trained.run), "--out", str(out)]) == 0
    assert f'"model": "{out}", "num_speculative_tokens": 3' in capsys.readouterr().out
    masters = split_weights(load_checkpoint(trained.run).masters, torch.bfloat16)
    found = read_weights(out)
    assert found.keys() == masters.keys()
    assert all(torch.equal(found[name], masters[name]) for name in masters)
    card = (out / "README.md").read_text()
    assert "| held-out | 2 |" in card
    assert "data fingerprint" in card
    assert (trained.run / "drafter" / "README.md").is_file()
    asked = ["verify", str(out), "--target", trained.target, "--prompts", trained.prompts, *SHORT]
    assert run(asked) == 0
    assert "serves as it trained" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    config["rope_theta"] = 7.0
    config["rope_parameters"]["rope_theta"] = 7.0
    (out / "config.json").write_text(json.dumps(config))
    assert run(asked) == 1
    assert "Likely cause: RoPE" in capsys.readouterr().out


def test_an_earlier_checkpoint_and_the_other_layout(trained: Files) -> None:
    out = trained.folder / "speculators"
    earlier = trained.run / "checkpoints" / "step-00000006"
    assert run(["export", str(earlier), "--out", str(out), "--layout", "speculators"]) == 0
    assert json.loads((out / "config.json").read_text())["speculators_model_type"] == "dflash"
    masters = split_weights(load_checkpoint(earlier).masters, torch.bfloat16)
    assert torch.equal(read_weights(out)["fc.weight"], masters["fc.weight"])


def diverged(run_dir: Path, folder: Path) -> Path:
    """A run whose newest checkpoint holds a NaN, its checksums right."""
    shutil.copytree(run_dir, folder)
    checkpoint = load_checkpoint(folder).path
    masters = safetensors.torch.load_file(checkpoint / MASTERS)
    masters["norm.weight"][0] = float("nan")
    safetensors.torch.save_file(masters, checkpoint / MASTERS)
    meta = json.loads((checkpoint / META).read_text().rpartition("\n{")[0])
    meta["files"][MASTERS]["sha256"] = sha256(checkpoint / MASTERS)
    text = json.dumps(meta)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / META).write_text(f"{text}\n{json.dumps({'sha256': digest})}\n")
    return folder


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_an_export_is_held_against_its_checkpoint_in_either_layout(
    trained: Files, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = diverged(trained.run, tmp_path / "run")
    asked = ["export", str(folder), "--out", str(tmp_path / "out"), "--layout", layout]
    assert run(asked) == 2
    assert "not finite in norm.weight: training diverged; export an earlier checkpoint" in capsys.readouterr().err
    assert run([*asked, "--no-verify"]) == 0


def test_a_run_without_measurements_has_no_best(trained: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(trained.run), "--out", str(trained.folder / "b"), "--checkpoint", "best"]) == 2
    assert "take the newest, or train with --eval-every" in capsys.readouterr().err


def test_a_drafter_of_another_target_is_refused(trained: Files, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["evaluate", "smollm2-drafter", "--target", trained.target, "--prompts", trained.prompts]
    assert run(asked) == 2
    assert "is for a target of 30 layers" in capsys.readouterr().err


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-new-tokens 0"):
        VerifyCommand(target=TargetConfig(target="smollm2"), max_new_tokens=0)
    assert ExportCommand(run="r", out="o").checkpoint == "newest"
