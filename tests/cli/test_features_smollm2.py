"""SmolLM2's features captured once and trained from give the losses that the target gives online."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.cli import run


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.long
def test_captured_once_equals_online(assets: Path, tmp_path: Path) -> None:
    chats = f"{assets / 'quickstart' / 'train.jsonl.gz'}:0.06"
    sizes = ["--target", "smollm2", "--token-budget", "1024", "--anchors", "32", "--draws-per-batch", "2"]
    prompts = ["--prompts", "quickstart", "--max-new-tokens", "4"]
    data = ["--data", chats, "--hold-out", "0", "--off-policy-rows", "0"]
    features, online, fed = tmp_path / "features", tmp_path / "online", tmp_path / "fed"
    assert run(["capture", *data, *sizes, "--out", str(features)]) == 0
    steps = ["--max-steps", "12", "--log-every", "1", "--no-measure-start", "--num-prompts", "1"]
    assert run(["train", *data, *sizes, *steps, *prompts, "--out", str(online)]) == 0
    assert run(["train", "--features", str(features), *sizes, *steps, *prompts, "--out", str(fed)]) == 0
    assert len(losses(online)) == 12
    assert losses(fed) == losses(online)
    mine, other = (load_file(folder / "drafter" / "model.safetensors") for folder in (fed, online))
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
