"""`train` in ranks is `train` in threads: same losses, same measures, same folder; and it goes on after a restart."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from draftsmith.cli import run
from draftsmith.errors import ConfigError, TargetError
from draftsmith.pipeline.launch import Feed
from draftsmith.pipeline.run import capture_only
from draftsmith.pipeline.settings import AnswerOptions
from draftsmith.pipeline.together import LAUNCH, _is_same_launch, claim_together, load_together
from draftsmith.target.model import Target
from tests.families import save_tiny
from tests.pipeline.runs import quiet, write_inputs
from tests.pipeline.test_world import worlds
from tests.pipeline.torchrun import Done, torchrun

STEPS = 12
ONE_TARGET_TWO_DRAFTERS = ("--targets", "1", "--drafters", "2")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny("qwen3_5", folder / "target")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {n}"},
                {"role": "assistant", "content": f"{n} and {n + 1}. " * 3},
            ]
        }
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(inputs: Path, out: Path, *more: str, roles: Sequence[str] = ONE_TARGET_TWO_DRAFTERS) -> list[str]:
    return [
        *("train", "--target", str(inputs / "target"), "--data", str(inputs / "chats.jsonl"), "--out", str(out)),
        *("--device", "cpu", *roles, "--token-budget", "512", "--anchors", "16"),
        *("--max-steps", str(STEPS), "--draws-per-batch", "2", "--log-every", "1", "--threads", "1"),
        *("--max-new-tokens", "8", "--num-prompts", "2", "--eval-every", "5", "--save-every", "4", "--taps", "1", "4"),
        *more,
    ]


def losses(out: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def in_ranks(inputs: Path, out: Path, *more: str, restarts: int = 0) -> Done:
    return torchrun(3, ["-m", "draftsmith", *arguments(inputs, out, *more)], seconds=280, restarts=restarts)


@pytest.mark.long
def test_ranks_train_measure_and_export_as_threads_do(inputs: Path, tmp_path: Path) -> None:
    assert run(arguments(inputs, tmp_path / "threads")) == 0
    done = in_ranks(inputs, tmp_path / "ranks")
    assert done.returncode == 0, done.stdout + done.stderr
    threads, ranks = tmp_path / "threads", tmp_path / "ranks"
    assert len(losses(threads)) == STEPS
    assert losses(ranks) == losses(threads)
    for name in ("model.safetensors", "config.json"):
        assert (ranks / "drafter" / name).read_bytes() == (threads / "drafter" / name).read_bytes()
    measured = [json.loads((folder / "evaluation.json").read_text()) for folder in (threads, ranks)]
    assert [set(body) for body in measured] == [{"before", "after"}] * 2
    for when in ("before", "after"):
        tau = [body[when]["summary"]["tau"] for body in measured]
        assert tau[0] == tau[1]
    evals = [line for line in (ranks / "metrics.jsonl").read_text().splitlines() if json.loads(line)["kind"] == "eval"]
    assert len(evals) == 2
    assert done.stdout.count("What this run uses, and why") == 1, "the other ranks are quiet"


def assert_same_run(ours: Path, theirs: Path) -> None:
    """The same losses, measures and exported drafter, bit for bit."""
    assert len(losses(theirs)) == STEPS
    assert losses(ours) == losses(theirs)
    for name in ("model.safetensors", "config.json"):
        assert (ours / "drafter" / name).read_bytes() == (theirs / "drafter" / name).read_bytes()
    measured = [json.loads((folder / "evaluation.json").read_text()) for folder in (ours, theirs)]
    for when in ("before", "after"):
        answers = [[answer["token_ids"] for answer in body[when]["answers"]] for body in measured]
        assert answers[0] == answers[1]
        assert measured[0][when]["summary"]["tau"] == measured[1][when]["summary"]["tau"]


@pytest.mark.long
def test_ranks_send_the_context_of_a_frozen_drafter_as_threads_do(inputs: Path, tmp_path: Path) -> None:
    assert run(arguments(inputs, tmp_path / "stock")) == 0
    given = arguments(inputs, tmp_path / "threads")
    whose = ["--init-from", str(tmp_path / "stock" / "drafter"), "--freeze-context"]
    assert run(adapting(given, whose)) == 0
    command = adapting(arguments(inputs, tmp_path / "ranks"), whose)
    done = torchrun(3, ["-m", "draftsmith", *command], seconds=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path / "ranks", tmp_path / "threads")


def adapting(given: list[str], whose: list[str]) -> list[str]:
    """The command with another start: that drafter's own architecture wins, so taps aren't given."""
    at = given.index("--taps")
    end = next((n for n in range(at + 1, len(given)) if given[n].startswith("--")), len(given))
    return [*given[:at], *given[end:], *whose]


def in_two_ranks(inputs: Path, out: Path, *more: str) -> Done:
    return torchrun(2, ["-m", "draftsmith", *arguments(inputs, out, *more, roles=())], seconds=280)


@pytest.mark.long
def test_ranks_train_from_features_on_disk_as_threads_do(inputs: Path, tmp_path: Path) -> None:
    """Two drafters and no target rank, over several epochs; the chief alone has a target that runs, to measure."""
    features = tmp_path / "features"
    capturing = ["capture", *arguments(inputs, features)[1:]]
    assert run(capturing) == 0
    assert run(arguments(inputs, tmp_path / "threads", "--features", str(features))) == 0
    done = in_two_ranks(inputs, tmp_path / "ranks", "--features", str(features))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path / "ranks", tmp_path / "threads")
    assert done.stdout.count("What this run uses, and why") == 1


@pytest.mark.long
def test_ranks_with_a_target_each_train_as_threads_do(inputs: Path, tmp_path: Path) -> None:
    """--colocate: every rank makes its own drafter's batches; only gradients travel."""
    assert run(arguments(inputs, tmp_path / "threads")) == 0
    done = in_two_ranks(inputs, tmp_path / "ranks", "--colocate")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path / "ranks", tmp_path / "threads")


@pytest.mark.long
def test_open_roles_are_chosen_once_and_kept(inputs: Path, tmp_path: Path) -> None:
    """By the first rank's measure of this CPU; the run's own record has the numbers, and a resume begins with them."""
    out = tmp_path / "ranks"
    more = ("--no-measure-start", "--num-prompts", "1", "--eval-every", "0")
    command = ["-m", "draftsmith", *arguments(inputs, out, *more, roles=())]
    done = torchrun(3, command, seconds=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "auto: targets read" in " ".join(done.stdout.split())
    roles = json.loads((out / "config.json").read_text())["config"]["pipeline"]
    assert roles["targets"] + roles["drafters"] == 3
    assert done.stdout.count("What this run uses, and why") == 1
    resumed = torchrun(3, ["-m", "draftsmith", "train", "--resume", str(out)], seconds=280)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "auto: targets read" not in resumed.stdout
    assert f"{roles['targets']} target(s) on" in " ".join(resumed.stdout.split())


@pytest.mark.long
def test_features_to_be_captured_first_are_refused_in_ranks(inputs: Path, tmp_path: Path) -> None:
    done = in_two_ranks(inputs, tmp_path / "ranks", "--drafters", "1", "--cache-features")
    assert done.returncode != 0
    assert "run draftsmith capture --out F once, then torchrun ... train --features F" in " ".join(done.stderr.split())


def test_answers_to_be_made_first_are_refused_in_ranks(tmp_path: Path) -> None:
    config = replace(write_inputs(tmp_path), out=str(tmp_path / "run"), answers=AnswerOptions(regenerate=True))
    with pytest.raises(ConfigError, match="run draftsmith regenerate once, with several --server URL"):
        claim_together(worlds(1, 1)[1], config)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_killed_rank_is_started_anew_and_goes_on_from_the_last_checkpoint(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "ranks"
    killed: list[int] = []

    def kill_a_target() -> None:
        """As soon as the first checkpoint lies there, the process of rank 0, found by its environment."""
        until = time.monotonic() + 200
        while time.monotonic() < until and not list((out / "checkpoints").glob("step-*")):
            time.sleep(0.05)
        for process in psutil.Process().children(recursive=True):
            if "torch.distributed.run" not in process.cmdline() and process.environ().get("RANK") == "0":
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)

    thread = threading.Thread(target=kill_a_target)
    thread.start()
    done = in_ranks(inputs, out, "--max-steps", "200", "--eval-every", "0", "--save-every", "10", restarts=1)
    thread.join(5)
    assert len(killed) == 1
    assert done.returncode == 0, done.stdout + done.stderr
    begun = re.search(r"continuing from step (\d+)", done.stdout)
    assert begun is not None
    assert int(begun[1]) >= 10
    assert [step for step, _ in losses(out)] == list(range(1, 201))
    assert run(arguments(inputs, tmp_path / "threads", "--max-steps", "200", "--eval-every", "0")) == 0
    assert losses(out) == losses(tmp_path / "threads")


@pytest.mark.long
def test_a_mistake_is_said_once_and_ends_every_rank(inputs: Path, tmp_path: Path) -> None:
    done = in_ranks(inputs, tmp_path / "ranks", "--drafters", "4")
    assert done.returncode != 0
    assert "torchrun started 3 ranks, which is not 1 target(s) + 4 drafter(s)" in done.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    done = in_ranks(inputs, tmp_path / "full")
    assert done.returncode != 0
    assert done.stderr.replace("\n", " ").count("is not empty: give --out a new folder") == 1
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


def has_body(target: Target) -> bool:
    return not any(parameter.is_meta for parameter in target.model.parameters())


@pytest.mark.parametrize(
    ("num_targets", "feed", "rank", "measured", "whole"),
    [
        (1, "targets", 0, True, True),
        (1, "targets", 1, True, False),
        (1, "targets", 2, True, False),
        (0, "joint", 1, True, True),
        (0, "disk", 0, True, True),
        (0, "disk", 0, False, False),
        (0, "disk", 1, True, False),
    ],
)
def test_only_ranks_that_run_a_target_load_its_body(
    num_targets: int, feed: Feed, rank: int, measured: bool, whole: bool, tmp_path: Path
) -> None:
    config = write_inputs(tmp_path)
    if feed == "disk":
        features = capture_only(replace(config, out=str(tmp_path / "features")), quiet())
        config = replace(config, data=replace(config.data, features=str(features)))
    if not measured:
        config = replace(config, data=replace(config.data, data=""))
    world = worlds(num_targets, 2, feed=feed)[rank]
    world.tell("prepared")
    assert has_body(load_together(world, config, tmp_path, quiet()).target) == whole


def test_a_drafters_rank_needs_no_gpu_for_8_bit_products(tmp_path: Path) -> None:
    config = write_inputs(tmp_path)
    config = replace(config, target=replace(config.target, target_compute="fp8"))
    target, chief = worlds(1, 1)
    assert not has_body(load_together(chief, config, tmp_path, quiet()).target)
    with pytest.raises(TargetError, match="--target-compute fp8 needs a GPU"):
        load_together(target, config, tmp_path, quiet())


def test_the_mark_of_a_launch_is_written_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of writing it: there is the old one or none, and the folder can be used again."""
    config, out = write_inputs(tmp_path), tmp_path / "run"
    config = replace(config, out=str(out))

    def killed(_file: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            claim_together(worlds(1, 1)[1], config)
    assert not (out / LAUNCH).exists()
    claim_together(worlds(1, 1)[1], config)
    before = (out / LAUNCH).read_text()
    json.loads(before)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            claim_together(worlds(1, 1)[1], config)
    assert (out / LAUNCH).read_text() == before


def test_without_torchrun_the_distributed_channel_says_how_to_start_it(inputs: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "draftsmith", *arguments(inputs, tmp_path / "run", "--channel", "distributed")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "--channel distributed needs torchrun: torchrun --nproc-per-node N" in done.stderr.replace("\n", " ")


MINE = {"run_id": "none", "host": "a", "agent": [7, 1.5]}


@pytest.mark.parametrize(
    ("there", "mine", "restarts", "same"),
    [
        (MINE, MINE, 1, True),
        (MINE, MINE, 0, False),
        (MINE, MINE | {"agent": [7, 2.5]}, 1, False),
        (MINE, MINE | {"host": "b"}, 1, False),
        (MINE | {"run_id": "job-5"}, MINE | {"run_id": "job-5", "host": "b"}, 0, True),
        (MINE | {"run_id": "job-5"}, MINE | {"run_id": "job-6", "host": "b"}, 1, False),
        (None, MINE, 1, False),
    ],
)
def test_only_the_same_launch_goes_on_by_itself(
    there: dict[str, object] | None, mine: dict[str, object], restarts: int, same: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if there is not None:
        (tmp_path / LAUNCH).write_text(json.dumps(there))
    assert _is_same_launch(tmp_path, mine, restarts) == same
