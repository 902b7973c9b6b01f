"""Pooled figures by hand, intervals that cover, comparisons that are paired."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.errors import ConfigError
from draftsmith.evaluate.decode import Agreement, Decoded, Plain, VerifyStep
from draftsmith.evaluate.statistics import Answered, compare, summarize, tau_interval


def answer(*steps: tuple[int, int, int], seconds: float = 1.0, plain: int = 0, source: str = "s") -> Answered:
    made = tuple(VerifyStep(drafted=drafted, accepted=kept, committed=out) for drafted, kept, out in steps)
    tokens = 1 + sum(step.committed for step in made)
    decoded = Decoded(token_ids=tuple(range(tokens)), steps=made, prefill_seconds=9.0, seconds=seconds, num_reruns=0)
    alone = Plain(token_ids=decoded.token_ids, gaps=(1.0,) * tokens, prefill_seconds=9.0, seconds=plain or 1.0)
    return Answered(
        source=source,
        domain="",
        num_prompt_tokens=3,
        decoded=decoded,
        plain=alone if plain else None,
        agreement=Agreement(identical=True) if plain else None,
    )


def test_G06_and_G07_tau_is_pooled_over_steps() -> None:
    summary = summarize([answer((3, 3, 4), (3, 2, 3), (3, 0, 1)), answer((3, 0, 1))])
    assert summary.tau.value == (4 + 3 + 1 + 1) / 4
    assert summary.tau_per_response == (8 / 3 + 1) / 2
    assert summary.survival == (2 / 4, 2 / 4, 1 / 4)
    assert summary.conditional == (2 / 4, 2 / 2, 1 / 2)


def test_G04_places_behind_an_accepted_end_are_unscored() -> None:
    # Three drafts held but the second was the end: two tokens committed, the third place says nothing.
    ended, whole = answer((3, 3, 2)), answer((3, 3, 4), (3, 1, 2))
    summary = summarize([ended, whole])
    assert summary.survival == (3 / 3, 2 / 3, 1 / 2)
    # A block narrowed by the length limit has no third place either.
    assert summarize([answer((1, 1, 1)), whole]).survival == (3 / 3, 1 / 2, 1 / 2)


def test_speeds_leave_the_prefill_and_its_token_out() -> None:
    summary = summarize([answer((3, 3, 4), (3, 3, 4), seconds=2.0, plain=8)])
    assert summary.tokens_per_second == 4.0
    assert summary.plain_tokens_per_second == 1.0
    assert summary.speedup == 4.0
    assert summary.identical == "yes"


def test_answers_that_part_are_counted_with_their_ties() -> None:
    same, tied = answer((3, 3, 4), plain=1), answer((3, 3, 4), plain=1)
    tied = replace(tied, agreement=Agreement(identical=False, place=2, gap=1e-6))
    assert summarize([same, tied]).identical == "no: 1 of 2 part (1 at ties)"
    assert summarize([answer((3, 3, 4))]).identical == "-"


def test_nothing_gives_zeros() -> None:
    summary = summarize([])
    assert (summary.tau.value, summary.survival, summary.tokens_per_second, summary.speedup) == (0.0, (), 0.0, None)
    assert summarize([answer()]).tau.value == 0.0


def drawn(generator: torch.Generator, shift: int = 0) -> list[Answered]:
    rows: list[Answered] = []
    for _ in range(20):
        level = int(torch.randint(0, 4, (1,), generator=generator))
        kept = [min(7, level + shift + int(torch.randint(0, 3, (1,), generator=generator))) for _ in range(10)]
        rows.append(answer(*((7, k, k + 1) for k in kept)))
    return rows


def test_the_interval_covers_the_truth() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = 1 + 1.5 + 1
    hits = 0
    for seed in range(60):
        interval = tau_interval(drawn(generator), seed)
        hits += interval.low <= truth <= interval.high
    # 95% nominal; 20 prompts make the bootstrap a little narrow. 48 of 60 is far below chance for 93%.
    assert 48 <= hits < 60


def test_an_interval_is_a_function_of_its_seed() -> None:
    rows = drawn(torch.Generator().manual_seed(0))
    assert tau_interval(rows, 1) == tau_interval(rows, 1) != tau_interval(rows, 2)


def test_paired_comparison_sees_what_intervals_alone_hide() -> None:
    """The same prompts, one drafter a little better on each: prompts differ far more than drafters."""
    worse = drawn(torch.Generator().manual_seed(0))
    better = drawn(torch.Generator().manual_seed(0), shift=1)
    difference = compare("mine", better, "stock", worse)
    assert difference.verdict.startswith("mine is better than stock by ")
    assert difference.tau.half_width < tau_interval(worse).half_width
    assert compare("stock", worse, "mine", better).verdict.startswith("stock is worse than mine")
    assert "can't be told apart" in compare("a", worse, "b", worse).verdict


def test_other_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="didn't answer the same prompts"):
        compare("a", [answer((3, 0, 1))], "b", [answer((3, 0, 1), source="other")])
    with pytest.raises(ConfigError, match="didn't answer the same prompts"):
        compare("a", [], "b", [])
