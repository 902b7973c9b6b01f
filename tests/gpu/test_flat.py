"""Memory stays level to the byte over training, evaluations and checkpoints, and a resumed run stands at that level."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.gpu.test_kill import command, lines, save_chats, save_target

pytestmark = pytest.mark.gpu


def levels(run: Path) -> list[tuple[int, int]]:
    """Step and allocated bytes of every `system` line."""
    return [
        (int(line["step"]), gpu["allocated_bytes"])
        for line in lines(run)
        if line["kind"] == "system"
        for gpu in line["gpus"].values()
    ]


def test_level_across_an_evaluation_a_checkpoint_and_a_resume(tmp_path: Path) -> None:
    target, chats, run = tmp_path / "target", tmp_path / "chats.jsonl", tmp_path / "run"
    save_target(target)
    save_chats(chats)
    first = subprocess.Popen(
        [*command(target, chats, run), "--eval-every", "60"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    waiting = time.monotonic()
    while first.poll() is None and not (run / "checkpoints" / "step-00000160").exists():
        assert time.monotonic() - waiting < 300, "no checkpoint of step 160"
        time.sleep(0.01)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=200)
    assert first.returncode == 0, output.decode()[-2000:]
    before = levels(run)
    stopped = max(step for step, _ in before)
    again = subprocess.run(command(target, chats, run), capture_output=True, timeout=300, check=False)
    assert again.returncode == 0, again.stdout.decode()[-2000:]
    after = [level for level in levels(run) if level[0] > stopped]
    evaluated = [line["step"] for line in lines(run) if line["kind"] == "eval"]
    assert len([step for step in evaluated if 0 < step < 400]) >= 3, "no evaluation between the levels"
    print(f"\n{len(before)} levels up to step {stopped}: {sorted({value for _, value in before})}")
    print(f"{len(after)} levels resumed: {sorted({value for _, value in after})}")
    assert len(before) > 5
    assert len(after) > 5
    # The first line may stand before the first evaluation built its caches' sizes; from then on not a byte moves.
    assert len({value for _, value in before[1:]}) == 1
    assert {value for _, value in after[1:]} == {before[-1][1]}
