"""A run on a GPU, captured, killed at random moments and resumed, ends in the uninterrupted run's bits."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

from draftsmith.train.checkpoint import load_checkpoint
from tests.families import tiny_tokenizer

pytestmark = pytest.mark.gpu

STEPS, KILLS = 400, 5


def save_target(folder: Path) -> None:
    """A small random Llama: flex attention needs heads of 16 or wider, which the tiny families don't have."""
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def save_chats(path: Path) -> None:
    generator = random.Random(0)
    words = ["the", "a", "cat", "dog", "runs", "jumps", "over", "under", "house", "tree", "and", "then", "sees", "red"]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(120):
            asked, answered = generator.choices(words, k=8), generator.choices(words, k=generator.randint(5, 60))
            turns = [{"role": "user", "content": " ".join(asked)}, {"role": "assistant", "content": " ".join(answered)}]
            file.write(json.dumps({"messages": turns}) + "\n")


def command(target: Path, chats: Path, run: Path) -> list[str]:
    if (run / "checkpoints").exists() and any((run / "checkpoints").glob("step-*")):
        return [sys.executable, "-m", "draftsmith", "train", "--resume", str(run)]
    options = {
        "target": target,
        "data": chats,
        "out": run,
        "device": "cuda",
        "max-steps": STEPS,
        "save-every": 20,
        "log-every": 10,
        "token-budget": 2048,
        "anchors": 128,
        "num-prompts": 1,
        "max-new-tokens": 8,
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "draftsmith", "train", *flags, "--no-measure-start"]


def start(target: Path, chats: Path, run: Path) -> subprocess.Popen[bytes]:
    if run.exists() and not list(run.glob("checkpoints/step-*")):
        subprocess.run(["rm", "-rf", str(run)], check=True)
    return subprocess.Popen(command(target, chats, run), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_five_kills_with_capture_on_change_no_bit(tmp_path: Path) -> None:
    target, chats = tmp_path / "target", tmp_path / "chats.jsonl"
    save_target(target)
    save_chats(chats)
    whole = start(target, chats, tmp_path / "whole")
    output, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, output.decode()[-2000:]
    assert "captured" in output.decode()
    generator = random.Random(1)
    run, kills = tmp_path / "killed", 0
    while kills < KILLS:
        child = start(target, chats, run)
        before = {path.name for path in run.glob("checkpoints/step-*")}
        waiting = time.monotonic()
        while child.poll() is None and {path.name for path in run.glob("checkpoints/step-*")} <= before:
            assert time.monotonic() - waiting < 200, "no new checkpoint"
            time.sleep(0.01)
        time.sleep(generator.uniform(0.0, 0.3))
        if child.poll() is not None:
            break
        child.kill()
        child.communicate()
        kills += 1
    last = start(target, chats, run)
    output, _ = last.communicate(timeout=300)
    assert last.returncode == 0, output.decode()[-2000:]
    assert kills >= 3, f"only {kills} kills landed before the run was over"
    straight, killed = load_checkpoint(tmp_path / "whole"), load_checkpoint(run)
    assert straight.position.step == killed.position.step == STEPS
    for name, tensor in straight.masters.items():
        assert torch.equal(tensor, killed.masters[name]), name
    for name, tensor in straight.optimizer.items():
        assert torch.equal(tensor, killed.optimizer[name]), name
    losses = [
        [line["loss"] for line in lines(folder) if line["kind"] == "train"] for folder in (tmp_path / "whole", run)
    ]
    assert losses[0] == losses[1]


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
