"""Kill -9 at random moments of `draftsmith train`, from loading to the export: resuming gives the uninterrupted run."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import signal
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.evaluate.export import read_weights
from draftsmith.train.checkpoint import load_checkpoint
from draftsmith.train.metrics import read_metrics
from tests.cli.killed import STEPS, train_or_resume, write_inputs

TIMED = ("time", "step_ms", "steps_per_s", "tokens_per_s", "labels_per_s")
"""What a log line says of the clock, not of the run."""


def lines_of(run: Path) -> list[dict[str, Any]]:
    lines = [line for line in read_metrics(run) if line["kind"] != "system"]
    return [
        {key: value for key, value in line.items() if key not in TIMED and "seconds" not in key and "second" not in key}
        for line in lines
    ]


def assert_same_run(run: Path, reference: Path) -> None:
    """Log, last checkpoint, exported drafter and measured answers, bit for bit."""
    assert [(line["kind"], line["step"], line.get("loss")) for line in lines_of(run)] == [
        (line["kind"], line["step"], line.get("loss")) for line in lines_of(reference)
    ]
    ours, theirs = load_checkpoint(run), load_checkpoint(reference)
    assert ours.position.step == theirs.position.step == STEPS
    for part in ("masters", "optimizer", "extra"):
        mine, other = getattr(ours, part), getattr(theirs, part)
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in other)
    mine, other = read_weights(run / "drafter"), read_weights(reference / "drafter")
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in other)
    for when in ("before", "after"):
        answers, expected = (
            json.loads((folder / "evaluation.json").read_text())[when]["answers"] for folder in (run, reference)
        )
        assert [one["token_ids"] for one in answers] == [one["token_ids"] for one in expected]
        assert [one["committed"] for one in answers] == [one["committed"] for one in expected]


class Shell:
    """Starts the command in a process of its own, and may kill it."""

    def __init__(self, inputs: Path) -> None:
        self.inputs = inputs
        self.context: ForkServerContext = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.cli.killed", "draftsmith.cli.train", "torch.utils.tensorboard"])
        warm_up = self.context.Process(target=time.sleep, args=(0,))
        warm_up.start()
        warm_up.join()  # the server of forks imports everything meanwhile

    def run(self, out: Path, seconds: float | None = None) -> int | None:
        child = self.context.Process(target=train_or_resume, args=(self.inputs, out))
        child.start()
        child.join(seconds)
        child.kill()
        child.join()
        log = out.parent / f"{out.name}.log"
        assert child.exitcode in (0, -signal.SIGKILL), log.read_text()
        return child.exitcode


def stage_of(run: Path) -> str:
    """How far a killed run had come."""
    if not (run / "config.json").exists():
        return "preparing"
    if not any((run / "checkpoints").glob("step-*")):
        return "before the first checkpoint"
    if load_checkpoint(run).position.step < STEPS:
        return "writing a checkpoint" if any((run / "checkpoints").glob(".writing-*")) else "training"
    return "measuring and exporting"


def kill_and_resume(tmp_path: Path, kills: int) -> set[str]:
    """Kill `kills` times, and on until they met two stages.

    Runs that finish are compared, and new ones begun. Returns the stages that kills landed in.
    """
    write_inputs(tmp_path)
    shell = Shell(tmp_path)
    begin = time.perf_counter()
    assert shell.run(tmp_path / "reference") == 0
    whole = time.perf_counter() - begin
    moments, landed, stages, number = random.Random(0), 0, set[str](), 0
    for _ in range(5 * kills):
        if landed >= kills and len(stages) > 1:
            break
        run = tmp_path / f"run{number}"
        if shell.run(run, moments.uniform(0.05, 1.0) * whole) == 0:
            assert_same_run(run, tmp_path / "reference")
            number += 1
            continue
        landed += 1
        stages.add(stage_of(run))
    assert landed >= kills
    run = tmp_path / f"run{number}"
    assert shell.run(run) == 0
    assert_same_run(run, tmp_path / "reference")
    assert shell.run(run) == 0, "a finished run resumes to itself"
    assert_same_run(run, tmp_path / "reference")
    return stages


def test_kill_9_of_the_command_at_random_moments_resumes_bit_for_bit(tmp_path: Path) -> None:
    stages = kill_and_resume(tmp_path, 5)
    assert len(stages) > 1, f"kills landed in {stages} only: they prove little"


def test_a_run_killed_before_its_first_checkpoint_or_before_it_was_a_run_goes_on(tmp_path: Path) -> None:
    """What such kills leave, put there by hand: random moments seldom land in these stages."""
    write_inputs(tmp_path)
    shell = Shell(tmp_path)
    assert shell.run(tmp_path / "reference") == 0
    early, earliest = tmp_path / "early", tmp_path / "earliest"
    early.mkdir()
    shutil.copy(tmp_path / "reference" / "config.json", early)
    (early / "checkpoints" / ".writing-step-00000001").mkdir(parents=True)
    (early / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 9.9}\n{"kind": "tr')
    (earliest / "data.partial").mkdir(parents=True)
    (earliest / ".writing-config.json").write_text('{"config": {"ou')
    for run in (early, earliest):
        assert shell.run(run) == 0
        assert_same_run(run, tmp_path / "reference")


@pytest.mark.long
def test_kill_9_of_the_command_at_thirty_random_moments_resumes_bit_for_bit(tmp_path: Path) -> None:
    stages = kill_and_resume(tmp_path, 30)
    assert {"before the first checkpoint", "training"} <= stages, stages
