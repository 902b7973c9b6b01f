"""Sampled decoding is distributed as the target alone."""

from __future__ import annotations

import pytest
import torch

from draftsmith.errors import ConfigError
from draftsmith.evaluate.decode import DecodeLimits, decode, plain_decode
from draftsmith.evaluate.sampling import DraftPolicy, Sampler
from tests.evaluate.overfit import drafter_config, overfit, random_drafter
from tests.families import tiny_target

V = 5


def sampler(seed: int, policy: DraftPolicy = "argmax", temperature: float = 1.3) -> Sampler:
    return Sampler(temperature=temperature, draft_policy=policy, generator=torch.Generator().manual_seed(seed))


def chi_squared(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected).square() / expected).sum())


@pytest.mark.parametrize("policy", ["argmax", "sample"])
def test_G13_both_policies_preserve_the_targets_distribution(policy: DraftPolicy) -> None:
    """Two places drafted from wrong distributions: the three tokens that come out follow the target's chain."""
    draw = torch.Generator().manual_seed(3)
    first = torch.randn(V, generator=draw)
    second = torch.randn(V, V, generator=draw)
    third = torch.randn(V, V, generator=draw)
    drafter = torch.stack([first, second[first.argmax()]]) + 0.7 * torch.randn(2, V, generator=draw)
    choose = sampler(0, policy)
    num_draws = 8_000
    counts = torch.zeros(V, V)
    accepted = 0
    for _ in range(num_draws):
        drafts, q = choose.propose(drafter)
        target = torch.stack([first, second[drafts[0]], third[drafts[1]]])
        kept, bonus = choose.verify(drafts, q, target)
        tokens = [*drafts[:kept].tolist(), bonus]
        accepted += kept
        # A step that ends early goes on as the next step would: with the target's own choice.
        if len(tokens) == 1:
            tokens.append(int(choose.choose(second[tokens[0]][None])[0]))
        counts[tokens[0], tokens[1]] += 1
    p = torch.softmax(first / 1.3, 0)[:, None] * torch.softmax(second / 1.3, 1)
    # 24 degrees of freedom: 51.2 is exceeded by chance once in a thousand seeds.
    assert chi_squared(counts, p * num_draws) < 51.2
    assert accepted > num_draws / 8


def test_a_wrong_residual_would_be_seen() -> None:
    """The same statistic on a rule that redraws from p itself: far beyond the limit, so the test above can fail."""
    draw = torch.Generator().manual_seed(3)
    p = torch.softmax(torch.randn(V, generator=draw), 0)
    d = int(p.argmax())
    counts = torch.zeros(V)
    for _ in range(5_000):
        kept = bool(torch.rand(1, generator=draw) < p[d])
        counts[d if kept else int(torch.multinomial(p, 1, generator=draw))] += 1
    assert chi_squared(counts, p * 5_000) > 51.2


@pytest.mark.long
@pytest.mark.parametrize("policy", ["argmax", "sample"])
def test_sampled_answers_follow_plain_sampling(policy: DraftPolicy) -> None:
    """The whole loop against exact probabilities of the first three tokens, grouped into equally likely bins."""
    case = overfit("llama")
    target, prompt = case.target, [97, 98, 99]
    drafter = random_drafter(drafter_config(target, taps=(1, 2, 4)))
    limits = DecodeLimits(max_new_tokens=3)
    num_draws, num_bins = 1500, 8
    logits = target.model(input_ids=torch.tensor([prompt])).logits[0, -1]
    first = torch.softmax(logits.detach() / 0.7, -1)
    tops = first.topk(12).indices.tolist()
    pairs = torch.zeros(len(tops), num_bins)
    expected = torch.zeros(len(tops), num_bins)
    bins: list[torch.Tensor] = []
    for row, token in enumerate(tops):
        after = torch.softmax(target.model(input_ids=torch.tensor([[*prompt, token]])).logits[0, -1].detach() / 0.7, -1)
        bins.append(((after.cumsum(0) - after / 2) * num_bins).long().clamp(max=num_bins - 1))
        expected[row] = first[token] * torch.zeros(num_bins).index_add(0, bins[-1], after)
    for seed in range(num_draws):
        tokens = decode(target, drafter, target.ends(), prompt, limits, sampler(seed, policy, 0.7)).token_ids
        if tokens[0] in tops:
            row = tops.index(tokens[0])
            pairs[row, bins[row][tokens[1]]] += 1
    enough = expected * num_draws >= 5
    freedom = int(enough.sum())
    assert freedom >= 8
    # Mean `freedom`, deviation sqrt(2 * freedom): four deviations.
    assert chi_squared(pairs[enough], expected[enough] * num_draws) < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("policy", ["argmax", "sample"])
def test_a_seed_gives_the_same_answer_again(policy: DraftPolicy) -> None:
    case = overfit("llama")
    limits = DecodeLimits(max_new_tokens=12)
    answers = [
        decode(case.target, case.drafter, case.target.ends(), [97, 98, 99], limits, sampler(seed, policy)).token_ids
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_plain_sampling_is_seeded_too() -> None:
    target = tiny_target("llama")
    limits = DecodeLimits(max_new_tokens=12)
    answers = [plain_decode(target, [97], limits, sampler(seed)).token_ids for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_greedy_verification_by_hand() -> None:
    logits = torch.eye(4)[[1, 2, 3, 0]]
    for drafts, expected in (([1, 2, 3], (3, 0)), ([1, 0, 3], (1, 2)), ([0, 2, 3], (0, 1))):
        assert Sampler().verify(torch.tensor(drafts), None, logits) == expected


def test_equal_distributions_accept_everything() -> None:
    """p == q leaves no residual: nothing may turn into NaN, and every draft is kept."""
    logits = torch.randn(4, V)
    choose = sampler(0, "sample")
    for _ in range(50):
        drafts, q = choose.propose(logits[:3])
        assert choose.verify(drafts, q, logits)[0] == 3


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="--temperature -1"):
        Sampler(temperature=-1.0)
    with pytest.raises(ConfigError, match="--seed"):
        Sampler(temperature=0.5)
