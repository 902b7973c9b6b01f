"""`draftsmith chat` on a tiny target: the text is the target's own, what was drafted is coloured."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from draftsmith.cli import run
from draftsmith.cli.chat import Painter, foot
from draftsmith.drafter.model import Drafter, init_weights
from draftsmith.evaluate.decode import Decoded, Plain, VerifyStep
from draftsmith.evaluate.export import export_zlab
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.pipeline.resolve import Choices, resolve_drafter
from draftsmith.pipeline.settings import DrafterOptions
from tests.families import save_tiny, tiny_target, tiny_tokenizer


def test_drafted_tokens_are_coloured_block_by_block() -> None:
    tokenizer = tiny_tokenizer()
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    paint = Painter(console, tokenizer)
    paint(tokenizer("ab")["input_ids"], 0)
    paint(tokenizer("cde")["input_ids"], 2)
    paint(tokenizer("fg")["input_ids"], 1)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "\x1b[32mc\x1b[0m\x1b[32md\x1b[0me" in shown
    assert "\x1b[36mf\x1b[0mg" in shown


def test_a_character_of_several_tokens_appears_whole() -> None:
    tokenizer = tiny_tokenizer()
    console = Console(file=io.StringIO(), width=200)
    ids = tokenizer("é中")["input_ids"]
    assert len(ids) > 2
    paint = Painter(console, tokenizer)
    for token in ids:
        paint([token], 0)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "é中"


def test_the_foot_says_tau_and_speed_up() -> None:
    steps = (VerifyStep(drafted=7, accepted=3, committed=4), VerifyStep(drafted=7, accepted=1, committed=2))
    answer = Decoded(token_ids=(1,) * 7, steps=steps, prefill_seconds=0.5, seconds=1.5, num_reruns=0)
    plain = Plain(token_ids=(1,) * 7, gaps=(1.0,) * 7, prefill_seconds=0.5, seconds=2.5)
    assert foot(answer, plain) == "tau 3.00  3.5 tokens/s  1.50x plain decoding  same text"


def test_one_question_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_target("qwen3")
    drafter = Drafter(resolve_drafter(DrafterOptions(layers=1), target.facts, Choices()))
    init_weights(drafter, 0)
    info = ExportInfo.of(target.facts, target.ends())
    folder = export_zlab(drafter, None, info, tmp_path / "drafter", torch.float32)
    model = save_tiny("qwen3", tmp_path / "target")
    status = run(["chat", str(folder), "--target", str(model), "--say", "hello", "--max-new-tokens", "12"])
    assert status == 0
    assert "same text" in capsys.readouterr().out
