"""Batched decoding takes batch 1's steps and gives its tokens, whatever else shares the batch."""

from __future__ import annotations

import pytest
import torch

from draftsmith.errors import ConfigError
from draftsmith.evaluate.batched import BatchStepper, decode_many
from draftsmith.evaluate.decode import DecodeLimits, decode
from tests.evaluate.overfit import ANSWER, PROMPTS, drafter_config, overfit, random_drafter
from tests.families import tiny_target


@pytest.mark.parametrize("num_rows", [2, 6])
def test_rows_of_different_lengths_decode_as_alone(num_rows: int) -> None:
    case = overfit("llama")
    limits = DecodeLimits(max_new_tokens=ANSWER)
    together = decode_many(case.target, case.drafter, case.target.ends(), PROMPTS, limits, num_rows)
    for prompt, ours in zip(PROMPTS, together, strict=True):
        alone = decode(case.target, case.drafter, case.target.ends(), prompt, limits)
        assert (ours.token_ids, ours.steps) == (alone.token_ids, alone.steps)
    assert len({len(ours.steps) for ours in together}) > 2


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi", "granite", "cohere", "llava", "qwen3_moe"])
def test_families_with_full_attention_decode_as_alone(family: str) -> None:
    target = tiny_target(family)
    drafter = random_drafter(drafter_config(target))
    limits = DecodeLimits(max_new_tokens=10)
    for prompt, ours in zip(
        PROMPTS[:3], decode_many(target, drafter, target.ends(), PROMPTS[:3], limits, 3), strict=True
    ):
        alone = decode(target, drafter, target.ends(), prompt, limits)
        assert (ours.token_ids, ours.steps) == (alone.token_ids, alone.steps)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_other_targets_are_decoded_one_by_one(family: str) -> None:
    """Holes in a sliding window or a recurrent state would change answers."""
    target = tiny_target(family)
    drafter = random_drafter(drafter_config(target))
    limits = DecodeLimits(max_new_tokens=6)
    ours = decode_many(target, drafter, target.ends(), PROMPTS[:2], limits)
    alone = [decode(target, drafter, target.ends(), prompt, limits) for prompt in PROMPTS[:2]]
    assert [row.token_ids for row in ours] == [row.token_ids for row in alone]


def test_G02_rows_end_on_their_own() -> None:
    case = overfit("llama")
    free = decode(case.target, case.drafter, case.target.ends(), PROMPTS[1], DecodeLimits(max_new_tokens=ANSWER))
    limits = DecodeLimits(max_new_tokens=ANSWER, stop_ids=(free.token_ids[9],))
    together = decode_many(case.target, case.drafter, case.target.ends(), PROMPTS, limits, 6)
    for prompt, ours in zip(PROMPTS, together, strict=True):
        alone = decode(case.target, case.drafter, case.target.ends(), prompt, limits)
        assert (ours.token_ids, ours.steps) == (alone.token_ids, alone.steps)
    assert len({len(ours.token_ids) for ours in together}) > 1


@torch.no_grad()
def test_holes_leave_no_trace() -> None:
    target = tiny_target("llama")
    stepper = BatchStepper(target)
    prompts = [[5, 6, 7, 8, 9], [70, 71]]
    stepper.prefill(prompts)
    block = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]])
    stepper.run(block, torch.tensor([5, 2]))
    stepper.commit(torch.tensor([1, 3]), 4)
    ours = stepper.run(torch.tensor([[31, 32], [41, 42]]), torch.tensor([6, 5]))
    straight = [[*prompts[0], 11, 31, 32], [*prompts[1], 21, 22, 23, 41, 42]]
    for row, ids in enumerate(straight):
        expected = target.model(input_ids=torch.tensor([ids])).logits[0, -2:].argmax(-1)
        assert torch.equal(ours[row], expected)


def test_an_empty_prompt_is_refused() -> None:
    case = overfit("llama")
    with pytest.raises(ConfigError, match="0 tokens"):
        decode_many(case.target, case.drafter, case.target.ends(), [[1], []], DecodeLimits(max_new_tokens=2))
