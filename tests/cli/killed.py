"""`draftsmith train` in a process that a test may kill: a tiny target on disk, a checkpoint at each step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from draftsmith.cli import run
from tests.families import save_tiny

STEPS = 12


def write_inputs(folder: Path) -> None:
    """The target and the conversations, under names that `arguments` knows."""
    save_tiny("qwen3", folder / "target")
    with (folder / "chats.jsonl").open("w") as file:
        for n in range(30):
            turns = [
                {"role": "user", "content": f"say {n}"},
                {"role": "assistant", "content": f"{n} and {n + 1}. " * 3},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def arguments(inputs: Path, out: Path) -> list[str]:
    """The command line that starts the run."""
    said = f"""train --target {inputs / "target"} --data {inputs / "chats.jsonl"} --out {out} --device cpu --threads 1
        --taps 1 4 --token-budget 512 --anchors 16 --max-steps {STEPS} --draws-per-batch 3 --accumulation 2 --lr 0.005
        --save-every 1 --log-every 2 --eval-every 5 --num-prompts 1 --max-new-tokens 6"""
    return said.split()


def train_or_resume(inputs: Path, out: Path) -> None:
    """What a person types: the same command until there is a run, then `--resume`."""
    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "200"
    with (out.parent / f"{out.name}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        is_run = (out / "config.json").exists()
        status = run(["train", "--resume", str(out)] if is_run else arguments(inputs, out))
    os._exit(status)
