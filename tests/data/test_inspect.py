from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from draftsmith.data.buckets import OrderConfig
from draftsmith.data.inspect import (
    InspectConfig,
    bucket_lines,
    inspect_data,
    length_histogram,
    pieces_of,
    shown_indices,
)
from draftsmith.data.prepare import PrepareConfig, prepare
from draftsmith.data.prepared import PreparedData
from draftsmith.errors import ConfigError

ForTemplate = Callable[[str | None], PreTrainedTokenizerFast]
ORDER = OrderConfig(token_budget=512)


@pytest.fixture
def data(tokenizer_for: ForTemplate, tmp_path: Path) -> PreparedData:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "<b>u</b>"},
                {"role": "assistant", "content": f"x < {index} " * (index + 2)},
            ]
        }
        for index in range(20)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": []}]))
    return prepare(tmp_path / "chats.jsonl", tokenizer_for("chatml"), None, PrepareConfig())


def test_pieces_tell_supervised_text_from_the_rest(tokenizer_for: ForTemplate, data: PreparedData) -> None:
    pieces = pieces_of(data.document(1), tokenizer_for("chatml"))
    assert [(piece.text, piece.supervised) for piece in pieces] == [
        ("<|im_start|>user\n<b>u</b><|im_end|>\n<|im_start|>assistant\n", False),
        ("x < 1 x < 1 x < 1 <|im_end|>", True),
        ("\n", False),
    ]


def test_the_terminal_shows_rows_lengths_buckets_and_account(tokenizer_for: ForTemplate, data: PreparedData) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=150, force_terminal=True, color_system="standard")
    inspect_data(data, tokenizer_for("chatml"), InspectConfig(rows=2), ORDER, console)
    shown = screen.getvalue()
    assert "\x1b[1;32mx < 0 x < 0 <|im_end|>\x1b[0m" in shown
    for part in ("document 10", "chats.jsonl:11", "buckets", "batches an epoch of 512", "skipped: no messages"):
        assert part in shown


def test_the_page_escapes_what_rows_hold(tokenizer_for: ForTemplate, data: PreparedData, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    inspect_data(data, tokenizer_for("chatml"), InspectConfig(html=page), ORDER, Console(file=io.StringIO()))
    written = page.read_text()
    assert "<mark>x &lt; 0 x &lt; 0 &lt;|im_end|&gt;</mark>" in written
    assert "<b>u</b>" not in written
    assert "no messages" in written


def test_histogram_and_buckets_count_every_document(data: PreparedData) -> None:
    assert sum(count for _, count in length_histogram(data.lengths)) == 20
    assert length_histogram([1, 5]) == [(1, 1), (2, 0), (3, 0), (4, 0), (5, 1)]
    lines = bucket_lines([4, 8, 9], (8, 16, 32))
    assert [(line.length, line.num_documents) for line in lines] == [(8, 2), (16, 1), (32, 0)]
    assert lines[0].waste == pytest.approx(0.25)


def test_which_rows_are_shown() -> None:
    assert shown_indices(20, InspectConfig(rows=2)) == [0, 10]
    assert shown_indices(3, InspectConfig(rows=5, start=2)) == [2]
    assert shown_indices(3, InspectConfig(rows=0)) == []
    for bad in ({"rows": -1}, {"start": -1}):
        with pytest.raises(ConfigError, match="below 0"):
            InspectConfig(**bad)
