"""The off-policy alarm with a real target, on its own samples and on foreign text."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
from rich.console import Console

from draftsmith.data.account import Account
from draftsmith.data.convert import PackedRow
from draftsmith.data.onpolicy import OnPolicyConfig
from draftsmith.data.prepared import PreparedData, record_batch
from draftsmith.data.tokenize import TokenRow
from draftsmith.pipeline.alarm import ROWS_ON_CPU, sound_alarm
from draftsmith.pipeline.documents import Documents
from tests.families import tiny_target

LENGTH = 24


def sampled(rows: int) -> list[list[int]]:
    """Text that the tiny target itself gives at temperature 1."""
    target, draw = tiny_target("qwen3"), torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (rows, 1), generator=draw)
    for _ in range(LENGTH - 1):
        with torch.no_grad():
            logits = target.model(input_ids=ids).logits[:, -1]
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=draw)], dim=1)
    return ids.tolist()


def documents(rows: list[list[int]]) -> Documents:
    packed = [PackedRow.of(TokenRow(ids, [False] + [True] * (LENGTH - 1))) for ids in rows]
    data = PreparedData([record_batch(packed, ["row"] * len(rows))], Account(), {})
    return Documents(data, range(len(rows)))


def test_own_samples_pass_and_foreign_text_is_named_with_its_remedy(tmp_path: Path) -> None:
    target, text = tiny_target("qwen3"), io.StringIO()
    console = Console(file=text, width=200)
    own = sound_alarm(target, documents(sampled(40)), OnPolicyConfig(), console)
    assert own is not None
    assert len(own.gaps) == ROWS_ON_CPU
    assert not own.is_foreign
    draw = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (20, LENGTH), generator=draw).tolist()
    config = OnPolicyConfig(off_policy_rows=10)
    foreign = sound_alarm(target, documents(noise), config, console, tmp_path / "on_policy.json")
    assert foreign is not None
    assert len(foreign.gaps) == 10
    assert foreign.mean > own.mean + 0.1
    assert text.getvalue().count("nats a token") == 2
    kept = json.loads((tmp_path / "on_policy.json").read_text())
    assert kept == {"target": target.facts.name, **foreign.to_dict()}
    assert kept["verdict"] in " ".join(text.getvalue().split())


def test_no_rows_no_alarm() -> None:
    text = io.StringIO()
    config = OnPolicyConfig(off_policy_rows=0)
    assert sound_alarm(tiny_target("qwen3"), documents(sampled(1)), config, Console(file=text)) is None
    assert text.getvalue() == ""
