"""A whole run: measured before and after, trained, exported; what it leaves and what it says."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.errors import CheckpointError
from draftsmith.evaluate.export import load_zlab
from draftsmith.pipeline.run import CONFIG, train, verdict
from draftsmith.pipeline.stage import RunConfig, dry_run_config
from tests.pipeline.runs import losses, quiet, write_inputs


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = write_inputs(tmp_path_factory.mktemp("inputs"))
    return replace(config, measure=replace(config.measure, max_new_tokens=8, num_prompts=2))


def test_a_run_trains_measures_and_exports(config: RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "run"
    console = Console(file=io.StringIO(), width=200)
    result = train(replace(config, out=str(out)), console)
    assert (result.out, result.steps, result.interrupted) == (out, 8, False)
    assert [step for step, _ in losses(out)] == list(range(1, 9))
    assert result.before is not None
    assert result.after is not None
    assert result.seconds > 0
    assert verdict(result)
    drafter_config, _ = load_zlab(str(result.drafter))
    assert drafter_config.taps == (1, 4)
    assert set(json.loads((out / "evaluation.json").read_text())) == {"before", "after"}
    saved = json.loads((out / CONFIG).read_text())
    assert saved["config"]["batch"]["max_steps"] == 8
    assert sorted(path.name for path in (out / "checkpoints").glob("step-*"))[-1] == "step-00000008"
    text = console.file.getvalue()
    assert text.count("What this run uses, and why") == 1


def test_a_run_of_a_drafter_with_heads_of_its_own(config: RunConfig, tmp_path: Path) -> None:
    own = replace(config.drafter, num_heads=6, num_kv_heads=3, head_dim=8, intermediate_size=40)
    console = Console(file=io.StringIO(), width=200)
    result = train(replace(config, out=str(tmp_path / "run"), drafter=own), console)
    assert result.steps == 8
    served, _ = load_zlab(str(result.drafter))
    assert (served.num_heads, served.num_kv_heads, served.head_dim, served.rope.head_dim) == (6, 3, 8, 8)
    assert served.intermediate_size == 40
    assert result.after is not None
    text = console.file.getvalue()
    assert "6 x 8, 3 for keys" in text
    assert "not copied: self_attn: heads of 16 in the target, of 8 in the drafter" in text


def test_a_run_with_nothing_held_out_is_not_measured(config: RunConfig, tmp_path: Path) -> None:
    unmeasured = replace(config, out=str(tmp_path / "run"), data=replace(config.data, hold_out=0))
    result = train(replace(unmeasured, batch=replace(config.batch, max_steps=2)), quiet())
    assert (result.before, result.after) == (None, None)
    assert verdict(result).startswith("not measured")


def test_a_dry_run_is_three_steps_elsewhere(config: RunConfig, tmp_path: Path) -> None:
    dry = dry_run_config(config, tmp_path / "dry")
    assert (dry.out, dry.batch.max_steps, dry.checkpoint.save_every) == (str(tmp_path / "dry"), 3, 3)
    assert dry.metrics.wandb_project == ""
    with pytest.raises(CheckpointError, match="--dry-run starts anew: drop --resume"):
        dry_run_config(replace(config, resume=True), tmp_path)
