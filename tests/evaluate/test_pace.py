"""How many drafts to verify: the arithmetic, real timings of a tiny target, and that decoding keeps to it."""

from __future__ import annotations

import pytest
import torch

from draftsmith.errors import ConfigError
from draftsmith.evaluate import pace as pace_module
from draftsmith.evaluate.acceptance import EvalConfig, evaluate_prompts
from draftsmith.evaluate.batched import decode_many
from draftsmith.evaluate.decode import DecodeLimits, decode, plain_decode
from draftsmith.evaluate.pace import Pace, measure_pace, step_costs
from draftsmith.evaluate.prompts import Prompt
from tests.evaluate.overfit import ANSWER, PROMPTS, overfit


def test_the_best_number_of_drafts_has_the_largest_ratio() -> None:
    flat = Pace(costs=(2.0, 2.0, 2.0), survival=(0.9, 0.5, 0.1))
    assert flat.num_drafts == 3
    steep = Pace(costs=(1.5, 2.0, 2.5), survival=(0.9, 0.5, 0.1))
    assert [round(steep.speedup(count), 3) for count in (1, 2, 3)] == [1.267, 1.2, 1.0]
    assert steep.num_drafts == 1
    assert steep.tau(3) == pytest.approx(2.5)
    text = str(steep)
    assert "verify 1 of 3 drafts a step: tau 1.90 for 1.50 plain steps = 1.27x expected" in text
    assert "all 3: tau 2.50 for 2.50 plain steps = 1.00x expected" in text
    assert "plain decoding is faster" not in text
    assert str(Pace(costs=(2.0,), survival=(0.5,))).endswith("plain decoding is faster on this device")


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("max_drafts", [1, 3, 7, 20])
def test_fewer_drafts_decode_the_same_text(family: str, max_drafts: int) -> None:
    case = overfit(family)
    limits = DecodeLimits(max_new_tokens=ANSWER, max_drafts=max_drafts)
    whole = DecodeLimits(max_new_tokens=ANSWER)
    for prompt in PROMPTS[:3]:
        ours = decode(case.target, case.drafter, case.target.ends(), prompt, limits)
        assert ours.token_ids == plain_decode(case.target, prompt, whole).token_ids
        assert max(step.drafted for step in ours.steps) == min(7, max_drafts)
        free = decode(case.target, case.drafter, case.target.ends(), prompt, whole)
        # The first step drafts from the same whole block, so what holds there is the same up to the limit.
        assert ours.steps[0].accepted == min(free.steps[0].accepted, max_drafts)


def test_a_smaller_block_is_another_input_but_fewer_drafts_are_not() -> None:
    """The drafts of the first places don't depend on how many of them are looked at."""
    case = overfit("llama")
    answers = [
        decode(case.target, case.drafter, case.target.ends(), PROMPTS[2], DecodeLimits(max_new_tokens=9, max_drafts=n))
        for n in (0, 2)
    ]
    assert answers[0].steps[0].drafted == 7
    assert answers[1].steps[0].drafted == 2
    assert answers[1].steps[0].accepted == min(2, answers[0].steps[0].accepted)


def test_batches_keep_to_it_too() -> None:
    case = overfit("llama")
    limits = DecodeLimits(max_new_tokens=ANSWER, max_drafts=2)
    alone = [decode(case.target, case.drafter, case.target.ends(), prompt, limits) for prompt in PROMPTS]
    together = decode_many(case.target, case.drafter, case.target.ends(), PROMPTS, limits, 4)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.steps for one in together] == [one.steps for one in alone]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_every_size_is_timed_and_the_target_is_left_as_it_was(family: str) -> None:
    case = overfit(family)
    # The target is shared by the tests of a process, whose hooks may still be on it: none may come or go.
    hooks = [list(layer._forward_hooks) for layer in case.target.layers]
    costs = step_costs(case.target, case.drafter, PROMPTS[0], repeats=2)
    assert len(costs) == 7
    assert all(cost > 0 for cost in costs)
    limits = DecodeLimits(max_new_tokens=8)
    assert plain_decode(case.target, PROMPTS[0], limits).token_ids == tuple(
        case.documents[0].token_ids[len(PROMPTS[0]) :][:8].tolist()
    )
    assert [list(layer._forward_hooks) for layer in case.target.layers] == hooks


def test_timings_are_ratios_of_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that lets a plain step take 2 s and one with k drafts 3 + k."""
    case = overfit("llama")
    clock, sizes = [0.0], list[int]()

    def tick(_target: object) -> float:
        if len(sizes) % 2:
            drafts = (len(sizes) // 2) % 8
            clock[0] += 2.0 if drafts == 0 else 3.0 + drafts
        sizes.append(0)
        return clock[0]

    monkeypatch.setattr(pace_module, "now", tick)
    assert step_costs(case.target, case.drafter, PROMPTS[1], repeats=3) == [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]


def test_an_evaluation_chooses_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = overfit("llama")
    prompts = [Prompt(source="set", token_ids=tuple(prompt)) for prompt in PROMPTS[:2]]

    def steep(*_: object) -> list[float]:
        return [1.0 + 2.0 * k for k in range(7)]

    monkeypatch.setattr(pace_module, "step_costs", steep)
    result = evaluate_prompts(case.target, case.drafter, prompts, EvalConfig(max_new_tokens=12, max_drafts="auto"))
    assert result.pace is not None
    assert result.config.max_drafts == result.pace.num_drafts == 1
    assert {step.drafted for answer in result.answers for step in answer.decoded.steps} == {1}
    assert result.summary.identical == "yes"
    assert result.to_dict()["pace"]["costs"][:2] == (1.0, 3.0)


def test_survival_past_the_end_of_short_answers_is_none() -> None:
    case = overfit("llama")
    pace = measure_pace(case.target, case.drafter, PROMPTS[:1], 3, ())
    assert len(pace.survival) == len(pace.costs) == 7
    assert pace.survival[2:] == (0.0,) * 5


def test_what_contradicts_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-drafts -1 is below 0; 0 verifies every draft"):
        EvalConfig(max_drafts=-1)
    with pytest.raises(ConfigError, match="--max-drafts auto times steps of one prompt: drop --batch"):
        EvalConfig(max_drafts="auto", batch=4)
    assert torch.is_grad_enabled()
