"""evaluate_prompts end to end on a tiny target."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console, RenderableType

from draftsmith.errors import ConfigError
from draftsmith.evaluate.acceptance import (
    EvalConfig,
    EvalResult,
    differences,
    evaluate_prompts,
    plain_answers,
    render,
)
from draftsmith.evaluate.decode import DecodeLimits, decode
from draftsmith.evaluate.prompts import Prompt
from tests.evaluate.overfit import drafter_config, overfit, random_drafter

ASKED = [
    Prompt(source="set", text="Hello", domain="en"),
    Prompt(source="set", text="abcabcabc", domain="en"),
    Prompt(source="set", text="\t \t", domain="zh"),
]


def shown(renderable: RenderableType, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_a_drafter_is_measured_and_shown() -> None:
    case = overfit("llama")
    config = EvalConfig(max_new_tokens=16)
    seen: list[tuple[int, int, float]] = []
    mine = evaluate_prompts(case.target, case.drafter, ASKED, config, lambda *now: seen.append(now), name="mine")
    summary = mine.summary
    assert summary.identical == "yes"
    assert [row[:2] for row in seen] == [(1, 3), (2, 3), (3, 3)]
    assert seen[-1][2] == summary.tau.value
    ids = case.target.tokenizer("abcabcabc")["input_ids"]
    limits = DecodeLimits(max_new_tokens=16, stop_ids=case.target.facts.eos_token_ids)
    alone = decode(case.target, case.drafter, case.target.ends(), ids, limits)
    assert mine.answers[1].decoded.token_ids == alone.token_ids
    assert list(mine.groups()) == ["set", "set / en", "set / zh"]
    assert mine.groups()["set / zh"].num_prompts == 1

    plains = plain_answers(case.target, ASKED, config)
    other = random_drafter(drafter_config(case.target))
    stock = evaluate_prompts(case.target, other, ASKED, config, plains=plains, name="stock")
    assert stock.summary.identical == "yes"
    assert differences([mine, stock])[0].tau.value == summary.tau.value - stock.summary.tau.value
    text = shown(render([mine, stock]))
    for part in (
        "mine identical to greedy: yes",
        "tau [95%]",
        "Survival",
        "set / zh",
        "mine",
        "stock",
        "template default",
    ):
        assert part in text
    narrow = shown(render([mine, stock]), width=80)
    assert "…" not in narrow
    for whole in ("drafter", "tokens/s", "speed-up", "identical", "set / zh (1)", str(summary.tau)):
        assert whole in narrow, narrow
    assert "mine is better than stock" in text or "can't be told apart" in text


def test_G01_the_record_holds_template_arguments_and_every_step() -> None:
    case = overfit("llama")
    config = EvalConfig(max_new_tokens=8, template_kwargs={"enable_thinking": False}, plain=False)
    result = evaluate_prompts(case.target, case.drafter, ASKED[:1], config)
    record = json.loads(json.dumps(result.to_dict()))
    assert record["config"]["template_kwargs"] == {"enable_thinking": False}
    assert sum(record["answers"][0]["committed"]) == len(record["answers"][0]["token_ids"]) - 1
    assert record["summary"]["identical"] == "-"
    assert "enable_thinking=False" in shown(render(result))


def test_sampled_answers_are_not_compared_with_greedy() -> None:
    case = overfit("llama")
    config = EvalConfig(max_new_tokens=8, temperature=1.0, seed=4)
    first, again = (evaluate_prompts(case.target, case.drafter, ASKED, config) for _ in range(2))
    assert first.summary.num_identical is None
    assert answers_of(first) == answers_of(again)
    assert "drafts by argmax" in shown(render(first))


def test_batches_measure_the_same() -> None:
    case = overfit("llama")
    one, many = (
        evaluate_prompts(case.target, case.drafter, ASKED, EvalConfig(max_new_tokens=12, batch=batch))
        for batch in (1, 2)
    )
    assert answers_of(one) == answers_of(many)
    assert one.summary.tau == many.summary.tau
    assert many.summary.identical == "yes"


def answers_of(result: EvalResult) -> list[tuple[int, ...]]:
    return [answer.decoded.token_ids for answer in result.answers]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": ()}, "--prompts"),
        ({"num_prompts": -1}, "--num-prompts -1"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"temperature": -0.5}, "--temperature -0.5"),
        ({"draft_policy": "sample"}, "--draft-policy sample needs --temperature"),
        ({"batch": 0}, "--batch 0"),
        ({"batch": 4, "temperature": 1.0}, "--batch 4 decodes greedily only"),
    ],
)
def test_contradictory_settings_name_their_remedy(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalConfig(**settings)  # pyright: ignore[reportArgumentType]


def test_sets_load_in_order_and_are_limited() -> None:
    config = EvalConfig(prompts=("quickstart", "quickstart"), num_prompts=3)
    assert len(config.load()) == 6
