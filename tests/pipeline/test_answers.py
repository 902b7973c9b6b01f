"""Runs whose conversations the target answers first: they train on its own words, and ask nothing twice."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.data.embedded import EmbeddedGenerate
from draftsmith.errors import ConfigError
from draftsmith.evaluate.decode import plain_greedy
from draftsmith.evaluate.prompts import Prompt, encode_prompt
from draftsmith.pipeline.answers import answer_first
from draftsmith.pipeline.inputs import ANSWERS, claim_folder
from draftsmith.pipeline.run import train, verdict
from draftsmith.pipeline.settings import AnswerOptions, DataOptions, DrafterOptions
from draftsmith.pipeline.stage import RunConfig
from tests.families import tiny_target
from tests.pipeline.runs import quiet, write_inputs

GREEDY = AnswerOptions(regenerate=True, answer_temperature=0.0, answer_tokens=12, answer_batch=4)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A tiny run over 12 questions without answers."""
    folder = tmp_path_factory.mktemp("inputs")
    config = write_inputs(folder)
    rows = [{"messages": [{"role": "user", "content": f"say {n}"}]} for n in range(12)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(
        config,
        data=DataOptions(data=str(folder / "questions.jsonl"), hold_out=2),
        answers=GREEDY,
        batch=replace(config.batch, max_steps=4),
        measure=replace(config.measure, max_new_tokens=8, num_prompts=2, eval_every=0),
    )


def answers_in(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / ANSWERS).read_text(encoding="utf-8").splitlines()]


def test_the_target_answers_and_a_drafter_goes_on_from_another_on_that(config: RunConfig, tmp_path: Path) -> None:
    stock = train(replace(config, out=str(tmp_path / "stock")), quiet())
    said = Console(file=io.StringIO(), width=200)
    adapted = replace(config, out=str(tmp_path / "run"), drafter=DrafterOptions(init_from=str(stock.drafter)))
    result = train(adapted, said)
    assert "the target answered 12 of 12 conversations" in said.file.getvalue()
    assert result.before is not None
    assert stock.after is not None
    # The start is measured with the weights it starts from, rounded to bf16 by the export.
    assert [answer.decoded.token_ids for answer in result.before.answers] == [
        answer.decoded.token_ids for answer in stock.after.answers
    ]
    assert verdict(result)
    target = tiny_target("qwen3")
    for row in answers_in(tmp_path / "run"):
        asked = encode_prompt(target, Prompt(source="test", messages=tuple(row["messages"][:1])), {})
        assert row["completion_token_ids"] == plain_greedy(target, asked, GREEDY.answer_tokens)


def test_answers_are_kept_when_a_run_is_killed_meanwhile_and_when_it_resumes(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    here = replace(config, out=str(out))
    asked: list[int] = []
    start, finished = EmbeddedGenerate.start, EmbeddedGenerate.finished

    def counted(self: EmbeddedGenerate, ticket: int, prompt: Any) -> None:
        asked.append(ticket)
        start(self, ticket, prompt)

    def killed(self: EmbeddedGenerate) -> Any:
        if len(asked) == 12 and (out / f"{ANSWERS}.partial").read_text().count("\n") > 4:
            raise KeyboardInterrupt
        return finished(self)

    monkeypatch.setattr(EmbeddedGenerate, "start", counted)
    monkeypatch.setattr(EmbeddedGenerate, "finished", killed)
    with pytest.raises(KeyboardInterrupt):
        train(here, quiet())
    monkeypatch.setattr(EmbeddedGenerate, "finished", finished)
    asked.clear()
    train(here, quiet())
    assert 0 < len(asked) < 12
    whole = answers_in(out)
    assert len(whole) == 12
    asked.clear()
    train(replace(here, resume=True, batch=replace(here.batch, max_steps=6)), quiet())
    assert not asked
    assert answers_in(out) == whole


def test_what_cant_be_asked_is_refused(config: RunConfig, tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    with pytest.raises(ConfigError, match="draftsmith regenerate first, then use its file"):
        answer_first(config.data, GREEDY, {}, target, None, quiet())
    prepared = claim_folder(tmp_path / "prepared", resume=False)
    (prepared / "account.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds token ids, which --regenerate can't ask about"):
        answer_first(DataOptions(data=str(prepared)), GREEDY, {}, target, tmp_path, quiet())


def test_rows_that_cant_be_answered_are_named(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "say 1"}]}, {"text": "already rendered"}]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = Console(file=io.StringIO(), width=200)
    data = DataOptions(data=str(tmp_path / "mixed.jsonl"))
    answered = answer_first(data, GREEDY, {}, tiny_target("qwen3"), tmp_path, said)
    assert answered.data == str(tmp_path / ANSWERS)
    assert "the target answered 1 of 2 conversations" in said.file.getvalue()
    assert "left out: 1 x no messages to answer" in said.file.getvalue()
