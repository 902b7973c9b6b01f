"""The draft-verify loop against plain greedy decoding, a full forward pass and the `dflash` package."""

from __future__ import annotations

from pathlib import Path

import dflash.model
import pytest
import torch

from draftsmith.drafter.model import FULL, SLIDING
from draftsmith.errors import ConfigError
from draftsmith.evaluate.decode import (
    Agreement,
    DecodeLimits,
    Plain,
    VerifyStep,
    compare_answers,
    decode,
    plain_decode,
    plain_greedy,
)
from draftsmith.evaluate.export import export_zlab
from draftsmith.evaluate.layout import ExportInfo
from tests.evaluate.overfit import ANSWER, PROMPTS, drafter_config, overfit, random_drafter
from tests.families import FAMILIES, tiny_target

PROMPT = [72, 101, 108, 108, 111] * 4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_decodes_as_plain_greedy(family: str) -> None:
    target = tiny_target(family)
    drafter = random_drafter(drafter_config(target))
    limits = DecodeLimits(max_new_tokens=24)
    ours = decode(target, drafter, target.ends(), PROMPT, limits)
    agreement = compare_answers(ours.token_ids, plain_decode(target, PROMPT, limits))
    assert agreement.identical or agreement.is_tie, str(agreement)
    assert ours.committed == len(ours.token_ids) - 1


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_blocks_accepted_whole_and_in_part_decode_as_plain_greedy(family: str) -> None:
    """On a drafter good enough to matter: a cache put back wrongly would show from the next token on."""
    case = overfit(family)
    limits = DecodeLimits(max_new_tokens=ANSWER)
    steps: list[VerifyStep] = []
    for prompt in PROMPTS[:4]:
        ours = decode(case.target, case.drafter, case.target.ends(), prompt, limits)
        agreement = compare_answers(ours.token_ids, plain_decode(case.target, prompt, limits))
        assert agreement.identical, str(agreement)
        steps += ours.steps
    assert sum(step.accepted for step in steps) >= 30
    assert any(step.accepted == 7 for step in steps)
    assert any(0 < step.accepted < step.drafted for step in steps)


@pytest.mark.parametrize("layer_types", [(FULL, SLIDING), (FULL, FULL)], ids=["mixed", "full"])
def test_the_dflash_package_takes_the_same_steps(layer_types: tuple[str, ...], tmp_path: Path) -> None:
    case = overfit("llama", layer_types=layer_types)
    info = ExportInfo.of(case.target.facts, case.target.ends())
    folder = export_zlab(case.drafter, None, info, tmp_path / "drafter", torch.float32)
    model = dflash.model.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    accepted = full = 0
    for prompt in PROMPTS:
        ours = decode(case.target, case.drafter, case.target.ends(), prompt, DecodeLimits(max_new_tokens=ANSWER))
        theirs = dflash_steps(model, case.target.model, prompt, ANSWER)
        assert [step.committed for step in ours.steps] == theirs.acceptance_lengths
        assert list(ours.token_ids) == theirs.output_ids[0, len(prompt) :].tolist()
        accepted += sum(step.accepted for step in ours.steps)
        full += sum(step.accepted == 7 for step in ours.steps)
    assert accepted >= 30
    assert full >= 3


def dflash_steps(model: torch.nn.Module, target: torch.nn.Module, prompt: list[int], limit: int):
    dflash.model._cuda_time = lambda: 0.0
    return dflash.model.dflash_generate(model, target, torch.tensor([prompt]), limit, None, return_stats=True)


def test_G02_an_end_inside_a_block_ends_the_answer_and_the_count() -> None:
    case = overfit("qwen3_5")
    limits = DecodeLimits(max_new_tokens=ANSWER)
    free = decode(case.target, case.drafter, case.target.ends(), PROMPTS[1], limits)
    # An accepted draft in the middle of a block that did not occur before plays the end of the answer.
    end = 1 + sum(step.committed for step in free.steps[:1]) + 3
    stop = free.token_ids[end]
    first = free.token_ids.index(stop)
    cut = DecodeLimits(max_new_tokens=ANSWER, stop_ids=(stop,))
    ours = decode(case.target, case.drafter, case.target.ends(), PROMPTS[1], cut)
    assert ours.token_ids == free.token_ids[: first + 1] == plain_decode(case.target, PROMPTS[1], cut).token_ids
    assert ours.committed == first
    last = ours.steps[-1]
    assert last.committed < last.accepted + 1
    assert last.scored == last.committed < last.drafted


def test_an_end_from_the_prefill_takes_no_step() -> None:
    case = overfit("llama")
    first = plain_greedy(case.target, PROMPTS[0], 1)[0]
    limits = DecodeLimits(max_new_tokens=9, stop_ids=(first,))
    ours = decode(case.target, case.drafter, case.target.ends(), PROMPTS[0], limits)
    assert (ours.token_ids, ours.steps, ours.tau) == ((first,), (), 0.0)


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 9, 10])
def test_the_length_limit_cuts_by_count(limit: int) -> None:
    case = overfit("llama")
    prompt = PROMPTS[0]
    limits = DecodeLimits(max_new_tokens=limit)
    ours = decode(case.target, case.drafter, case.target.ends(), prompt, limits)
    assert len(ours.token_ids) == limit
    assert ours.token_ids == plain_decode(case.target, prompt, limits).token_ids
    assert ours.committed == limit - 1
    # A block is no wider than what may still come.
    assert [step.drafted for step in ours.steps[:1]] == [min(7, limit - 1)] * min(1, limit - 1)


def test_D03_a_bf16_drafter_casts_its_own_inputs() -> None:
    case = overfit("llama")
    drafter = random_drafter(case.drafter.config).to(torch.bfloat16)
    limits = DecodeLimits(max_new_tokens=8)
    ours = decode(case.target, drafter, case.target.ends(), PROMPT, limits)
    assert ours.token_ids == plain_decode(case.target, PROMPT, limits).token_ids


def test_hooks_leave_the_target_even_after_an_error() -> None:
    target = tiny_target("llama")
    drafter = random_drafter(drafter_config(target))
    before = [len(layer._forward_hooks) for layer in target.layers]
    with pytest.raises(IndexError):
        decode(target, drafter, target.ends(), [10_000], DecodeLimits(max_new_tokens=2))
    assert [len(layer._forward_hooks) for layer in target.layers] == before


def test_answers_that_part_report_place_and_gap() -> None:
    plain = Plain(token_ids=(5, 6, 7), gaps=(1.0, 0.5, 1e-6), prefill_seconds=0.0, seconds=0.0)
    assert str(compare_answers([5, 6, 7], plain)) == "yes"
    parted = compare_answers([5, 9, 7], plain)
    assert parted == Agreement(identical=False, place=1, gap=0.5)
    assert str(parted) == "no: they part at token 1, top-2 gap 0.5 (not a tie)"
    assert compare_answers([5, 6, 8], plain).is_tie
    assert compare_answers([5, 6], plain).place == 2
    assert not compare_answers([5, 6, 7, 8], plain).identical


def test_bad_limits_and_prompts_are_refused() -> None:
    target = tiny_target("llama")
    with pytest.raises(ConfigError, match="--max-new-tokens 0"):
        DecodeLimits(max_new_tokens=0)
    with pytest.raises(ConfigError, match="0 tokens"):
        plain_decode(target, [], DecodeLimits(max_new_tokens=1))
    with pytest.raises(ConfigError, match="0 tokens"):
        decode(target, random_drafter(drafter_config(target)), target.ends(), [], DecodeLimits(max_new_tokens=1))
    assert SLIDING in drafter_config(target).layer_types
