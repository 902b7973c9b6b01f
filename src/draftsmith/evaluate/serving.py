"""Does a running server draft as the drafter did here? The same prompts, the same steps, place by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError
from draftsmith.evaluate.decode import Decoded, DecodeLimits, VerifyStep, decode
from draftsmith.evaluate.parity import CAUSES, Check, Verdict
from draftsmith.evaluate.prompts import Prompt, encode_prompt
from draftsmith.evaluate.server import Served, Server
from draftsmith.target.model import Target

TOLERANCE = 0.05
ROUNDING = "rounding: compare in fp32 (serve with --dtype float32, and --dtype float32 here) or on more prompts"
ELSEWHERE = "the server drafts otherwise: check its drafter folder with draftsmith verify, without --server"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """How a server's drafting is held against ours."""

    server: str = ""
    """URL of a running vLLM or SGLang that serves the target with the drafter; empty compares without a server."""
    tolerance: float = TOLERANCE
    """Largest difference in tau (relative) and in the acceptance of any place (besides chance) that passes where the
    counts aren't identical, as in bf16; 0 asks for identical counts."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ConfigError(f"--tolerance {self.tolerance} is not between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One prompt answered here and there."""

    ours: Decoded
    """Cut where the server's answer was; its last step keeps its accepted tokens, as servers count them."""
    served: Served

    @property
    def accepted_by_place(self) -> tuple[int, ...]:
        """Ours, of k = 1, 2, ..."""
        places = max((step.drafted for step in self.ours.steps), default=0)
        return tuple(sum(step.accepted >= place for step in self.ours.steps) for place in range(1, places + 1))

    @property
    def is_same(self) -> bool:
        """The same steps and accepted tokens."""
        served = self.served
        return served.num_drafts == len(self.ours.steps) and _trim(served.accepted_by_place) == _trim(
            self.accepted_by_place
        )


def _trim(counts: Sequence[int]) -> list[int]:
    kept = list(counts)
    while kept and kept[-1] == 0:
        kept.pop()
    return kept


def decode_as_served(target: Target, drafter: Drafter, prompt_ids: Sequence[int], max_new_tokens: int) -> Decoded:
    """Our loop as a server runs it: whole blocks up to the length limit, the last step counted before its cut.

    `decode` narrows blocks that would pass the limit; so it runs a block further here, and what began past the limit
    is dropped.
    """
    stops = target.facts.eos_token_ids
    further = DecodeLimits(max_new_tokens=max_new_tokens + drafter.config.block_size, stop_ids=stops)
    whole = decode(target, drafter, target.ends(), prompt_ids, further)
    kept: list[VerifyStep] = []
    length = 1
    for step in whole.steps:
        if length >= max_new_tokens:
            break
        kept.append(step)
        length += step.committed
    return replace(whole, token_ids=whole.token_ids[:max_new_tokens], steps=tuple(kept))


def replay(
    server: Server, target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[Pair]:
    """Answer every prompt there and here.

    Raises:
        ConfigError: as `Server.answer`.
    """
    return [
        Pair(
            ours=decode_as_served(target, drafter, ids, max_new_tokens),
            served=server.answer(ids, max_new_tokens),
        )
        for ids in prompts
    ]


def verify_server(
    server: Server,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 64,
    tolerance: float = TOLERANCE,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Verdict:
    """Hold a server's answers and acceptance against our own loop's.

    Args:
        server: running, idle, greedy by request.
        target, drafter: what it should be serving; in fp32 for identical counts.
        prompts: replayed as token ids, so that its chat template is looked at apart from its drafting.
        max_new_tokens: of each answer.
        tolerance: as `ServingConfig.tolerance`.
        template_kwargs: the prompts are rendered with them, here and there.

    Raises:
        ConfigError: no prompts, or as `Server.answer`.
        DataError: as `encode_prompt`.
    """
    if not prompts:
        raise ConfigError("no prompts to replay: name a set or a JSONL file with --prompts")
    kwargs = template_kwargs or {}
    encoded = [encode_prompt(target, prompt, kwargs) for prompt in prompts]
    pairs = replay(server, target, drafter, encoded, max_new_tokens)
    checks = (
        check_template(server, prompts, encoded, kwargs),
        check_block(pairs, drafter.config.block_size),
        check_text(pairs, target, tolerance),
        check_counts(pairs, tolerance),
        check_places(pairs, tolerance),
    )
    return Verdict(drafter=f"{server.model} at {server.url}", checks=checks)


def check_template(
    server: Server, prompts: Sequence[Prompt], encoded: Sequence[Sequence[int]], kwargs: Mapping[str, Any]
) -> Check:
    """The server's chat template writes the prompts as ours does."""
    compared = 0
    for prompt, ids in zip(prompts, encoded, strict=True):
        theirs = server.rendered(prompt.messages, kwargs) if prompt.messages else None
        if theirs is None:
            continue
        compared += 1
        if theirs != list(ids):
            detail = f"a prompt has {len(theirs)} tokens by the server's template, {len(ids)} by ours"
            cause = "chat template: prompts are written another way than in training"
            return Check(name="template", passed=False, detail=detail, cause=cause)
    detail = f"{compared} prompts are written alike" if compared else "skipped: the server doesn't show its prompts"
    return Check(name="template", passed=True, detail=detail)


def check_block(pairs: Sequence[Pair], block_size: int) -> Check:
    """The server drafts as many tokens a step as the drafter was trained for."""
    drafts = sum(pair.served.num_drafts for pair in pairs)
    told = [pair.served.num_drafted for pair in pairs if pair.served.num_drafted is not None]
    if not told or not drafts:
        return Check(name="block", passed=True, detail="skipped: the server doesn't tell how many tokens it drafts")
    width = sum(told) / drafts
    if width == block_size - 1:
        return Check(name="block", passed=True, detail=f"{block_size - 1} drafts a step")
    detail = f"{width:.4g} drafts a step there, {block_size - 1} trained"
    cause = f"{CAUSES['block_size']} (num_speculative_tokens should be {block_size - 1})"
    return Check(name="block", passed=False, detail=detail, cause=cause)


def check_text(pairs: Sequence[Pair], target: Target, tolerance: float) -> Check:
    """The server's answers are the target's own; within a tolerance they may part later on, as ties do in bf16."""
    parted = [place for pair in pairs if (place := _parts_at(pair, target)) is not None]
    if not parted:
        return Check(name="text", passed=True, detail=f"all {len(pairs)} answers are the same")
    detail = f"{len(parted)} of {len(pairs)} answers part, the first at token {min(parted)}"
    if len(parted) == len(pairs) and max(parted) == 0:
        return Check(name="text", passed=False, detail=detail, cause="another target is served, or other weights of it")
    if tolerance == 0:
        return Check(name="text", passed=False, detail=detail, cause=ROUNDING)
    return Check(name="text", passed=True, detail=f"{detail} (ties fall differently in other arithmetic)")


def _parts_at(pair: Pair, target: Target) -> int | None:
    """The first token that differs; None where none does. A closing end of answer may be left out."""
    stops = target.facts.eos_token_ids
    ours = [token for token in pair.ours.token_ids if token not in stops]
    if pair.served.token_ids is None:
        decoder = target.tokenizer
        return None if decoder.decode(ours, skip_special_tokens=True) == pair.served.text else 0
    theirs = [token for token in pair.served.token_ids if token not in stops]
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (mine, other) in pairs if mine != other), min(len(ours), len(theirs)))


def check_counts(pairs: Sequence[Pair], tolerance: float) -> Check:
    """Steps and accepted tokens: identical prompt by prompt, or tau within the tolerance."""
    ours, theirs = _totals(pairs)
    if all(pair.is_same for pair in pairs):
        detail = f"the same {ours[0]} steps and {ours[1]} accepted drafts, prompt by prompt"
        return Check(name="counts", passed=True, detail=detail)
    tau, tau_there = (1 + accepted / max(1, steps) for steps, accepted in (ours, theirs))
    detail = (
        f"{sum(not pair.is_same for pair in pairs)} of {len(pairs)} prompts differ: {ours[0]} steps and {ours[1]} "
        f"accepted here, {theirs[0]} and {theirs[1]} there (tau {tau:.3f}, {tau_there:.3f})"
    )
    if abs(tau_there / tau - 1) <= tolerance:
        return Check(name="counts", passed=True, detail=f"{detail}; within {tolerance:.0%}")
    close = abs(tau_there / tau - 1) < TOLERANCE
    return Check(name="counts", passed=False, detail=detail, cause=ROUNDING if close else ELSEWHERE)


def _totals(pairs: Sequence[Pair]) -> tuple[tuple[int, int], tuple[int, int]]:
    ours = (sum(len(pair.ours.steps) for pair in pairs), sum(sum(pair.accepted_by_place) for pair in pairs))
    served = [pair.served for pair in pairs]
    return ours, (sum(one.num_drafts for one in served), sum(sum(one.accepted_by_place) for one in served))


def check_places(pairs: Sequence[Pair], tolerance: float) -> Check:
    """Share of steps that accepted the first k drafts, place by place."""
    (steps, _), (steps_there, _) = _totals(pairs)
    ours, theirs = (
        _pool([pair.accepted_by_place for pair in pairs]),
        _pool([pair.served.accepted_by_place for pair in pairs]),
    )
    places = max(len(ours), len(theirs))
    shares = [count / max(1, steps) for count in (*ours, *(0,) * (places - len(ours)))]
    shares_there = [count / max(1, steps_there) for count in (*theirs, *(0,) * (places - len(theirs)))]
    detail = "first k drafts accepted, % of steps: " + ", ".join(
        f"{100 * mine:.0f}/{100 * other:.0f}" for mine, other in zip(shares, shares_there, strict=True)
    )
    worst = [
        place
        for place, (mine, other) in enumerate(zip(shares, shares_there, strict=True), start=1)
        if abs(mine - other) > (tolerance + _chance(mine, steps, steps_there) if tolerance else 0.0)
    ]
    if not worst:
        return Check(name="places", passed=True, detail=f"{detail} (here/there)")
    words = f"{detail} (here/there); place {worst[0]} differs"
    return Check(name="places", passed=False, detail=words, cause=ELSEWHERE)


def _chance(share: float, steps: int, steps_there: int) -> float:
    """Two standard errors of a difference between shares of so many steps each."""
    return 2 * (max(share * (1 - share), 0.01) * (1 / max(1, steps) + 1 / max(1, steps_there))) ** 0.5


def _pool(counts: Sequence[Sequence[int]]) -> list[int]:
    places = max((len(one) for one in counts), default=0)
    return [sum(one[place] for one in counts if place < len(one)) for place in range(places)]
