"""The packaged conversations are what their provenance says."""

from __future__ import annotations

import gzip
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest


def conversations(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def prompt_of(row: dict[str, Any]) -> str:
    return row["messages"][0]["content"]


@pytest.mark.parametrize(("name", "rows", "cut"), [("train", 400, 159), ("val", 40, None)])
def test_conversations_are_one_question_and_one_answer(assets: Path, name: str, rows: int, cut: int | None) -> None:
    chats = conversations(assets / "quickstart" / f"{name}.jsonl.gz")
    assert len(chats) == rows
    assert all([message["role"] for message in chat["messages"]] == ["user", "assistant"] for chat in chats)
    assert {chat["finish_reason"] for chat in chats} == {"stop", "length"}
    if cut is not None:
        assert sum(chat["finish_reason"] == "length" for chat in chats) == cut


def test_prompts_are_held_out(assets: Path) -> None:
    folder = assets / "quickstart"
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(prompts) == 10
    assert all([message["role"] for message in row["messages"]] == ["user"] for row in prompts)
    seen = {prompt_of(row) for name in ("train", "val") for row in conversations(folder / f"{name}.jsonl.gz")}
    assert seen.isdisjoint(prompt_of(row) for row in prompts)


def test_validation_is_held_out(assets: Path) -> None:
    train, val = (
        {prompt_of(row) for row in conversations(assets / "quickstart" / f"{name}.jsonl.gz")}
        for name in ("train", "val")
    )
    assert train.isdisjoint(val)


def test_questions_to_adapt_to_come_without_answers_and_apart_from_the_held_out_ones(assets: Path) -> None:
    train, held_out = (
        [json.loads(line) for line in (assets / "java-classes" / name).read_text(encoding="utf-8").splitlines()]
        for name in ("train.jsonl", "prompts.jsonl")
    )
    assert (len(train), len(held_out)) == (120, 12)
    assert all([message["role"] for message in row["messages"]] == ["user"] for row in (*train, *held_out))
    subjects = [{prompt_of(row).split()[4] for row in rows} for rows in (train, held_out)]
    assert len(subjects[1]) == 12
    assert subjects[0].isdisjoint(subjects[1])


def test_a_source_distribution_has_everything_that_make_works_on() -> None:
    root = Path(__file__).parents[1]
    targets = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    included = {path.removeprefix("/") for path in targets["sdist"]["include"]}
    assert included >= {"src", "tests", "bench", "recipes", "docs", "Makefile", "constraints.txt", "mkdocs.yml"}
    assert all((root / path).exists() for path in included)
    assert targets["wheel"]["packages"] == ["src/draftsmith"]
    assert (root / "src" / "draftsmith" / "py.typed").is_file()
