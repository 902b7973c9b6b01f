"""Drafters by run, checkpoint, folder and name."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from draftsmith.errors import CheckpointError, ConfigError, ExportError
from draftsmith.evaluate.export import export_zlab
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.evaluate.source import architecture_of, checkpoint_of, drafter_of, open_drafter, run_of
from draftsmith.train.build import build_state
from draftsmith.train.checkpoint import CheckpointConfig, Position, RunRecord
from draftsmith.train.checkpoint_writer import CheckpointWriter
from tests.families import tiny_target
from tests.pipeline.tiny import CONFIG, drafter, state_spec

RESOLVED = {"architecture": json.loads(json.dumps(asdict(CONFIG), default=dict))}


def saved_run(folder: Path, scores: tuple[float | None, ...]) -> Path:
    """A run whose checkpoint of step n holds masters of n everywhere."""
    target = tiny_target("qwen3")
    state = build_state(drafter(), target.ends(), state_spec(2), torch.device("cpu"))
    record = RunRecord(config=RESOLVED, data_fingerprint="")
    with CheckpointWriter(folder, CheckpointConfig(keep=2), state, record) as writer:
        for step, score in enumerate(scores, start=1):
            state.parameters.master_N.fill_(float(step))
            writer.save(Position(step=step, batch=step, draw=0, metrics_bytes=0), score)
    return folder


def exported(folder: Path) -> Path:
    target = tiny_target("qwen3")
    return export_zlab(drafter(), None, ExportInfo.of(target.facts, target.ends()), folder, torch.float32)


def weight(source: Path) -> float:
    return open_drafter(str(source)).drafter.fc.weight[0, 0].item()


def test_a_run_gives_what_it_exported_or_else_its_best_or_newest_checkpoint(tmp_path: Path) -> None:
    unmeasured = saved_run(tmp_path / "unmeasured", (None, None))
    assert weight(unmeasured) == 2.0
    measured = saved_run(tmp_path / "measured", (1.9, 1.5))
    assert weight(measured) == 1.0
    assert drafter_of(checkpoint_of(measured, "newest")).fc.weight[0, 0].item() == 2.0
    assert weight(measured / "checkpoints" / "step-00000002") == 2.0
    exported(measured / "drafter")
    assert weight(measured) == weight(measured / "drafter") == drafter().fc.weight[0, 0].item()
    assert open_drafter(str(measured)).name == open_drafter(str(measured / "drafter")).name == "measured"
    assert run_of(str(measured / "drafter")) == measured
    assert run_of("z-lab/Qwen3-8B-DFlash-b16") is None
    with pytest.raises(CheckpointError, match="train with --eval-every"):
        checkpoint_of(unmeasured, "best")


def test_the_architecture_comes_back_from_a_checkpoint_as_it_was() -> None:
    assert architecture_of(RESOLVED) == CONFIG


def test_smaller_blocks_than_trained_keep_the_weights_and_larger_ones_are_refused(tmp_path: Path) -> None:
    folder = str(exported(tmp_path / "mine"))
    whole, half = open_drafter(folder), open_drafter(folder, CONFIG.block_size - 2)
    assert half.drafter.config.block_size == CONFIG.block_size - 2
    assert torch.equal(half.drafter.fc.weight, whole.drafter.fc.weight)
    with pytest.raises(ConfigError, match="--block-size 32 is larger than the 4"):
        open_drafter(folder, 32)


def test_what_isnt_there_is_said() -> None:
    with pytest.raises(ExportError, match="doesn't exist: check the path"):
        open_drafter("/no/such/drafter")
