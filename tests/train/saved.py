"""Runs with checkpoints in them, for tests of what reads and writes those."""

from __future__ import annotations

from pathlib import Path

from draftsmith.train.checkpoint import CheckpointConfig, Position
from draftsmith.train.checkpoint_writer import CheckpointWriter
from draftsmith.train.step import TrainState
from tests.train.killed import RECORD

CONFIG = CheckpointConfig(save_every=1, keep=2)


def at(step: int) -> Position:
    return Position(step=step, batch=step, draw=0, metrics_bytes=10 * step)


def saved(run_dir: Path, state: TrainState, steps: list[int], config: CheckpointConfig = CONFIG) -> None:
    """Write checkpoints of these steps and close the writer."""
    with CheckpointWriter(run_dir, config, state, RECORD) as writer:
        for step in steps:
            writer.save(at(step))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())
