"""On a real target: the teacher-forced estimate of tau is the loop's own, uniform anchors overstate it."""

from __future__ import annotations

import pytest
import torch

from draftsmith.evaluate.decode import DecodeLimits, decode
from draftsmith.evaluate.estimate import estimate_tau
from draftsmith.evaluate.export import PACKAGED, load_zlab
from draftsmith.evaluate.prompts import encode_prompt, load_prompts
from draftsmith.records import Document
from draftsmith.target.capture import get_hidden_states_packed
from draftsmith.target.model import TargetConfig, load_target

ANSWER = 64


@pytest.mark.long
def test_the_estimate_differs_from_the_true_loop_by_less_than_2_per_cent() -> None:
    target = load_target(TargetConfig(target="smollm2", dtype="float32"), "cpu")
    config, drafter = load_zlab(PACKAGED)
    limits = DecodeLimits(max_new_tokens=ANSWER, stop_ids=target.facts.eos_token_ids)
    documents: list[Document] = []
    steps = tokens = 0
    for prompt in load_prompts("quickstart", 10):
        ids = encode_prompt(target, prompt, {})
        decoded = decode(target, drafter, target.ends(), ids, limits)
        steps, tokens = steps + len(decoded.steps), tokens + decoded.committed
        whole = torch.tensor([*ids, *decoded.token_ids])
        documents.append(Document(token_ids=whole, loss_mask=torch.arange(len(whole)) >= len(ids)))
    batch = get_hidden_states_packed(target, documents, config.taps)
    estimate = estimate_tau(drafter, target.ends(), batch, target.facts.eos_token_ids)
    true = tokens / steps
    said = f"true {true:.4f} ({steps} steps), estimate {estimate.tau:.4f}, uniform {estimate.uniform_anchor_tau:.4f}"
    print(said)
    assert abs(estimate.tau / true - 1) < 0.02, said
    assert estimate.uniform_anchor_tau > 1.05 * true, said
