"""A first look at data tells what preparing all of it would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.data.prepare import PrepareConfig, prepare
from draftsmith.data.sample import sample_rows
from draftsmith.data.tokenize import TokenizeConfig
from draftsmith.errors import DataError
from tests.families import tiny_tokenizer


def write(file: Path, count: int, answer: str) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": answer * (n + 1)}]}
        for n in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_all_rows_of_small_data_are_as_prepared(tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", 12, "yes ")
    sample = sample_rows(str(file), tiny_tokenizer(), TokenizeConfig())
    data = prepare([str(file)], tiny_tokenizer(), None, PrepareConfig())
    assert list(sample.lengths) == data.lengths
    assert sample.num_supervised == data.account.supervised_tokens > 0


def test_each_source_gives_its_first_rows(tmp_path: Path) -> None:
    short, long = write(tmp_path / "a.jsonl", 50, "a"), write(tmp_path / "b.jsonl", 50, "b" * 40)
    sample = sample_rows(f"{short}, {long}", tiny_tokenizer(), TokenizeConfig(), rows=8)
    apart = [sample_rows(str(file), tiny_tokenizer(), TokenizeConfig(), rows=4) for file in (short, long)]
    assert sample.lengths == apart[0].lengths + apart[1].lengths
    assert len(sample.lengths) == 8
    assert len(sample_rows(f"{short},{long}", tiny_tokenizer(), TokenizeConfig(), rows=1).lengths) == 2


def test_questions_alone_teach_nothing(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "why?"}]}) + "\n" + "broken\n")
    assert sample_rows(str(file), tiny_tokenizer(), TokenizeConfig()).num_supervised == 0


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        sample_rows(str(tmp_path / "nowhere.jsonl"), tiny_tokenizer(), TokenizeConfig())
