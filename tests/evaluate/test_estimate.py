"""The teacher-forced estimate is the loop's own tau on greedy answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.errors import ConfigError
from draftsmith.evaluate.decode import DecodeLimits, VerifyStep, decode
from draftsmith.evaluate.estimate import accepted_everywhere, estimate_tau, spans, walk
from draftsmith.records import Document
from draftsmith.target.capture import get_hidden_states_packed
from tests.evaluate.overfit import ANSWER, PROMPTS, overfit


def test_the_estimate_takes_the_loops_own_steps() -> None:
    """All prompts in one packed batch, padded: the steps are the loop's, one by one."""
    case = overfit("llama")
    batch = get_hidden_states_packed(case.target, case.documents, case.drafter.config.taps, pad_to=400)
    limits = DecodeLimits(max_new_tokens=ANSWER)
    loop: list[VerifyStep] = []
    for prompt in PROMPTS:
        loop += decode(case.target, case.drafter, case.target.ends(), prompt, limits).steps
    estimate = estimate_tau(case.drafter, case.target.ends(), batch)
    assert [step.committed for step in estimate.steps] == [step.committed for step in loop]
    assert estimate.tau == sum(step.committed for step in loop) / len(loop)
    assert estimate.tau > 2
    assert estimate.uniform_anchor_tau != estimate.tau


def test_answers_that_end_by_themselves_keep_whole_blocks() -> None:
    case = overfit("llama")
    taps = case.drafter.config.taps
    for prompt, whole in zip(PROMPTS, case.documents, strict=True):
        answer = whole.token_ids[len(prompt) :].tolist()
        for length in (5, 9, 14):
            stop = answer[length - 1]
            kept = len(prompt) + answer.index(stop) + 1
            document = Document(token_ids=whole.token_ids[:kept], loss_mask=whole.loss_mask[:kept])
            limits = DecodeLimits(max_new_tokens=ANSWER, stop_ids=(stop,))
            loop = decode(case.target, case.drafter, case.target.ends(), prompt, limits).steps
            if not loop:
                continue
            batch = get_hidden_states_packed(case.target, [document], taps)
            estimate = estimate_tau(case.drafter, case.target.ends(), batch, (stop,))
            assert [step.committed for step in estimate.steps] == [step.committed for step in loop]


def test_many_anchors_at_once_equal_one_at_a_time() -> None:
    case = overfit("llama")
    document, config = case.documents[2], case.drafter.config
    features = get_hidden_states_packed(case.target, [document], config.taps).features_TFH
    start, end = case.num_prompt[2], document.length
    together = accepted_everywhere(case.drafter, case.target.ends(), document, features, (start, end), True)
    assert together.unique().numel() > 2
    for index in range(0, end - 1 - start, 5):
        # Features from the anchor on are spoiled: a block reads what lies strictly before it.
        anchor = start + index
        blind = features.clone()
        blind[anchor:] = 1e4
        alone = accepted_everywhere(case.drafter, case.target.ends(), document, blind, (anchor, end), True)[0]
        assert alone == together[index]


def test_the_walk_counts_by_hand() -> None:
    # Five answer tokens; from token 0 two drafts hold, so tokens 1, 2 and the bonus 3 come; from token 3 none holds.
    assert walk([2, 9, 9, 0], block_size=4) == [
        VerifyStep(drafted=3, accepted=2, committed=3),
        VerifyStep(drafted=1, accepted=0, committed=1),
    ]
    assert walk([3, 0, 0], block_size=8) == [VerifyStep(drafted=3, accepted=3, committed=3)]
    assert walk([], block_size=8) == []


def test_spans_of_several_turns_are_several_answers() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1, 1], dtype=torch.bool)
    assert spans(mask) == [(1, 3), (5, 6), (7, 10)]
    assert spans(torch.zeros(3, dtype=torch.bool)) == []


def test_a_batch_without_answers_is_refused() -> None:
    case = overfit("llama")
    silent = [replace(case.documents[0], loss_mask=torch.zeros_like(case.documents[0].loss_mask))]
    batch = get_hidden_states_packed(case.target, silent, case.drafter.config.taps)
    with pytest.raises(ConfigError, match="no answer of two tokens"):
        estimate_tau(case.drafter, case.target.ends(), batch)
