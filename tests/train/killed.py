"""A tiny run in a process that a test may kill: resumes, trains, logs and saves as the real loop does."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from draftsmith.train.checkpoint import CheckpointConfig, Position, RunRecord, discard_after, load_checkpoint, restore
from draftsmith.train.checkpoint_writer import CheckpointWriter
from draftsmith.train.metrics import MetricsWriter, read_step
from draftsmith.train.step import accumulate, update
from tests.train.tiny import Tiny, no_totals, tiny_batch, tiny_shape, uniforms

STEPS = 24
LOG_EVERY = 3
SAVE_EVERY = 1
EVAL_EVERY = 5
DONE = "weights.pt"
RECORD = RunRecord(config={"seed": 0}, data_fingerprint="tiny")


def train_run(run_dir: Path, pause: float = 0.0) -> None:
    """Train to step STEPS from wherever `run_dir` stands; leaves final masters and optimizer in `weights.pt`.

    Log lines fall between checkpoints and checkpoints between log lines, so that sums not yet logged matter.
    """
    torch.set_num_threads(1)
    # A learning rate high enough that a wrong moment or a lost step shows in the next loss.
    state = Tiny(dtype=torch.bfloat16).build()
    totals = no_totals(state)
    shape = tiny_shape(128, dtype=torch.bfloat16)
    batches = [tiny_batch((50, 30, number + 1), shape, seed=number) for number in range(4)]
    step, metrics_bytes = 0, 0
    if (run_dir / "checkpoints").is_dir() and any((run_dir / "checkpoints").glob("step-*")):
        checkpoint = load_checkpoint(run_dir)
        restore(state, checkpoint, {"totals": totals})
        step, metrics_bytes = checkpoint.position.step, checkpoint.position.metrics_bytes
        discard_after(run_dir, step)
    config = CheckpointConfig(save_every=SAVE_EVERY, keep=2)
    with (
        MetricsWriter(run_dir, position=metrics_bytes, resumed_step=step) as metrics,
        CheckpointWriter(run_dir, config, state, RECORD, {"totals": totals}) as writer,
    ):
        while step < STEPS:
            batch = batches[step % len(batches)]
            accumulate(state, batch, uniforms(batch, step))
            update(state, totals)
            step += 1
            if step % LOG_EVERY == 0:
                metrics.write("train", step, read_step(state, totals))
                totals.zero_()
            score = -float(abs(step - 10)) if step % EVAL_EVERY == 0 else None
            if step % SAVE_EVERY == 0:
                writer.save(Position(step=step, batch=step, draw=0, metrics_bytes=metrics.sync()), score)
            time.sleep(pause)
    tensors = {"masters": state.parameters.master_N, "shadow": state.parameters.shadow_N}
    torch.save(tensors | state.optimizer.tensors(), run_dir / DONE)
