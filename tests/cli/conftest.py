"""A tiny target, conversations and prompts on disk, and a finished run, shared by the command line's tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftsmith.cli import run
from tests.families import save_tiny


@dataclass(frozen=True, slots=True)
class Files:
    """What a person has: a target, chats, prompts; and a run of 12 steps with a checkpoint at 6 and 12."""

    folder: Path
    target: str
    chats: str
    prompts: str

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def train(self, *more: str, out: str = "run") -> list[str]:
        """A training command of a second or two."""
        sizes = "--max-steps 12 --token-budget 256 --block-size 4 --layers 1 --anchors 32 --hold-out 2 --save-every 6"
        short = "--max-new-tokens 8 --log-every 4 --off-policy-rows 4"
        where = ["--target", self.target, "--data", self.chats, "--out", str(self.folder / out)]
        return ["train", *where, *sizes.split(), *short.split(), *more]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("cli")
    chats, prompts = folder / "chats.jsonl", folder / "prompts.jsonl"
    turns = [
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "abc " * (3 + n % 9)}]
        for n in range(40)
    ]
    chats.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(2)))
    target = save_tiny("qwen3", folder / "target")
    return Files(folder=folder, target=str(target), chats=str(chats), prompts=str(prompts))


@pytest.fixture(scope="session")
def trained(files: Files) -> Files:
    assert run(files.train()) == 0
    return files
