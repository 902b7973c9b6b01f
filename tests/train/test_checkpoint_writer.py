"""The writer of checkpoints: what it keeps, what it leaves behind, and runs killed at any moment."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.errors import CheckpointError
from draftsmith.train.build import StateSpec, build_state
from draftsmith.train.checkpoint import (
    CheckpointConfig,
    best_checkpoint,
    load_checkpoint,
    restore,
)
from draftsmith.train.checkpoint_writer import CheckpointWriter
from draftsmith.train.metrics import read_metrics
from tests.train.killed import DONE, RECORD, STEPS, train_run
from tests.train.saved import CONFIG, at, names, saved
from tests.train.tiny import Tiny


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    """The step goes on at once while the thread writes: buffers of its own keep what was."""
    state = Tiny().build()
    with CheckpointWriter(tmp_path, CheckpointConfig(keep=9), state, RECORD) as writer:
        for step in range(1, 9):
            state.parameters.master_N.fill_(float(step))
            writer.save(at(step))
            state.parameters.master_N.fill_(-1.0)
    for step in range(1, 9):
        masters = load_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}").masters
        assert all(bool((tensor == step).all()) for tensor in masters.values())


def test_the_newest_n_and_the_best_are_kept(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, CONFIG, Tiny().build(), RECORD) as writer:
        for step, score in enumerate([1.0, 3.0, 2.0, 3.0, None, 0.5], start=1):
            writer.save(at(step), score)
    assert names(tmp_path) == ["best.json", "step-00000002", "step-00000005", "step-00000006"]
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert best.name == "step-00000002"
    assert load_checkpoint(best).score == 3.0
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text()) == {
        "checkpoint": "step-00000002",
        "score": 3.0,
    }


def test_a_new_writer_knows_the_best_even_without_best_json(tmp_path: Path) -> None:
    state = Tiny().build()
    with CheckpointWriter(tmp_path, CONFIG, state, RECORD) as writer:
        writer.save(at(1), 5.0)
    (tmp_path / "checkpoints" / "best.json").unlink()
    with CheckpointWriter(tmp_path, CheckpointConfig(keep=1), state, RECORD) as writer:
        writer.save(at(2), 4.0)
        writer.save(at(3))
    assert [name for name in names(tmp_path) if name.startswith("step")] == ["step-00000001", "step-00000003"]
    assert best_checkpoint(tmp_path / "elsewhere") is None


def test_a_half_written_folder_is_no_checkpoint_and_is_swept_up(tmp_path: Path) -> None:
    state = Tiny().build()
    saved(tmp_path, state, [1])
    folder = tmp_path / "checkpoints"
    for left in (".writing-step-00000002", ".deleting-step-00000000"):
        shutil.copytree(folder / "step-00000001", folder / left)
    assert load_checkpoint(tmp_path).position.step == 1
    saved(tmp_path, state, [])
    assert names(tmp_path) == ["step-00000001"]


def test_a_writer_killed_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    state = Tiny().build()
    saved(tmp_path, state, [1, 2])
    folder = tmp_path / "checkpoints"
    (folder / "step-00000002").rename(folder / ".replaced-step-00000002")
    saved(tmp_path, state, [])
    assert load_checkpoint(tmp_path).position.step == 2
    saved(tmp_path, state, [2])
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    state = Tiny().build()
    saved(tmp_path, state, [1])
    with torch.no_grad():
        state.parameters.master_N.fill_(3.0)
    saved(tmp_path, state, [1])
    assert names(tmp_path) == ["step-00000001"]
    assert bool((load_checkpoint(tmp_path).masters["norm.weight"] == 3.0).all())


def test_a_full_disk_surfaces_at_the_next_call_and_leaves_the_run_readable(tmp_path: Path) -> None:
    state = Tiny().build()
    saved(tmp_path, state, [1])
    writer = CheckpointWriter(tmp_path, CONFIG, state, RECORD)
    blocked = tmp_path / "checkpoints" / ".writing-step-00000002"
    blocked.write_text("a file where the folder should go")
    writer.save(at(2))
    with pytest.raises(CheckpointError, match=r"couldn't be written to .*: .*; free space there .* --resume"):
        writer.save(at(3))
    blocked.unlink()
    writer.save(at(3))
    writer.wait()
    blocked.with_name(".writing-step-00000004").write_text("again")
    writer.save(at(4))
    with pytest.raises(CheckpointError, match="couldn't be written"):
        writer.close()
    assert load_checkpoint(tmp_path).position.step == 3


def test_the_training_thread_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """`save` costs a copy, `wait` the writing: measured on the same checkpoint."""
    state = Tiny().build()
    with CheckpointWriter(tmp_path, CONFIG, state, RECORD) as writer:
        copying: list[float] = []
        writing: list[float] = []
        for step in range(1, 6):
            begin = time.perf_counter()
            writer.save(at(step))
            middle = time.perf_counter()
            writer.wait()
            copying.append(middle - begin)
            writing.append(time.perf_counter() - middle)
    assert min(copying) < 0.5 * min(writing)


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "time"} for line in read_metrics(run_dir)]


def assert_same_run(run_dir: Path, reference: Path) -> None:
    ours, theirs = torch.load(run_dir / DONE), torch.load(reference / DONE)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    assert lines_of(run_dir) == lines_of(reference)
    ours_best, theirs_best = best_checkpoint(run_dir), best_checkpoint(reference)
    assert ours_best is not None
    assert theirs_best is not None
    assert ours_best.name == theirs_best.name


def kill_and_resume(tmp_path: Path, kills: int) -> None:
    """Kill -9 a run `kills` times at random moments, resuming after each; every finished run equals `reference`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.killed", "torch.utils.tensorboard"])
    run_dir = tmp_path / "run"

    def run(folder: Path, seconds: float | None) -> int | None:
        child = context.Process(target=train_run, args=(folder, 0.01))
        child.start()
        child.join(seconds)
        child.kill()
        child.join()
        return child.exitcode

    warm_up = context.Process(target=time.sleep, args=(0,))
    warm_up.start()
    warm_up.join()  # the server of forks imports torch meanwhile
    begin = time.perf_counter()
    assert run(tmp_path / "reference", None) == 0
    whole = time.perf_counter() - begin
    moments = random.Random(0)
    landed = in_writing = 0
    reached: set[int] = set()
    for _ in range(5 * kills):
        if landed >= kills and len(reached) > 1:
            break
        if run(run_dir, moments.uniform(0.0, 0.7 * whole)) == 0:
            assert_same_run(run_dir, tmp_path / "reference")
            shutil.rmtree(run_dir)
            continue
        landed += 1
        in_writing += any((run_dir / "checkpoints").glob(".writing-*"))
        if any((run_dir / "checkpoints").glob("step-*")):
            reached.add(load_checkpoint(run_dir).position.step)
    assert landed >= kills
    assert len(reached) > 1, f"kills landed at steps {reached} only: they prove nothing"
    assert in_writing or kills < 30, "no kill landed while a checkpoint was written"
    train_run(run_dir)
    assert_same_run(run_dir, tmp_path / "reference")


def test_kill_9_at_random_moments_resumes_bit_for_bit(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, 10)


@pytest.mark.long
def test_kill_9_at_thirty_random_moments_resumes_bit_for_bit(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, 30)


def test_a_finished_run_resumes_to_itself(tmp_path: Path) -> None:
    train_run(tmp_path)
    first = torch.load(tmp_path / DONE)
    train_run(tmp_path)
    second = torch.load(tmp_path / DONE)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert load_checkpoint(tmp_path).position.step == STEPS


@pytest.mark.gpu
def test_a_device_state_is_saved_without_waiting_and_restored(tmp_path: Path) -> None:
    """The copy into page-locked memory is queued behind the step: later work on the device doesn't reach it."""
    device = torch.device("cuda")
    parts = Tiny(dtype=torch.bfloat16)
    made = parts.build()
    spec = StateSpec(
        loss=made.loss,
        step=parts.step,
        optim=parts.optim,
        total_steps=parts.total_steps,
        dtype=parts.dtype,
        compiled=False,
    )
    ends = replace(made.ends, embedding_VH=made.ends.embedding_VH.cuda(), head_VH=made.ends.head_VH.cuda())
    state = build_state(made.drafter, ends, spec, device)
    with CheckpointWriter(tmp_path, CheckpointConfig(keep=9), state, RECORD) as writer:
        for step in range(1, 5):
            state.parameters.master_N.fill_(float(step))
            writer.save(at(step))
            state.parameters.master_N.fill_(-1.0)
    checkpoint = load_checkpoint(tmp_path)
    address = state.parameters.master_N.data_ptr()
    restore(state, checkpoint)
    assert state.parameters.master_N.data_ptr() == address
    named = state.parameters.named(state.parameters.shadow_N)
    assert all(bool((tensor == 4.0).all()) for tensor in named.values())
