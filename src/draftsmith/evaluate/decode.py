"""The draft-verify loop: the true measure of a drafter (arXiv 2602.06036, section 4).

Prefill the target, then per step: draft a block after the last token, run the target over it, keep the longest prefix
it agrees with and its own next token. Batch 1, caches on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError
from draftsmith.evaluate.drafting import Blocks, DraftContext
from draftsmith.evaluate.sampling import GREEDY, Sampler
from draftsmith.evaluate.stepper import Stepper, TapHooks
from draftsmith.records import FrozenEnds
from draftsmith.target.model import Target

TIE = 1e-4
"""A gap between the target's two best logits below which fp32 rounding decides between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """When an answer ends: at `max_new_tokens` by count, or after the first of `stop_ids`, which is kept.

    And how many of a block's drafts are looked at: its first `max_drafts`, 0 for all. The drafter still sees its whole
    block, unlike with a smaller `block_size`, which is another input than it was trained on.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    max_drafts: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens {self.max_new_tokens} decodes nothing; needed: 1 or more")
        if self.max_drafts < 0:
            raise ConfigError(f"--max-drafts {self.max_drafts} is below 0; 0 verifies every draft of a block")

    def drafts(self, size: int) -> int:
        """Drafts to verify of a block of `size` places, the known one included."""
        return min(size - 1, self.max_drafts or size - 1)

    def cut(self, token_ids: Sequence[int], room: int) -> tuple[list[int], bool]:
        """`token_ids` up to the first stop token and at most `room`; whether the answer ends here."""
        kept = list(token_ids[:room])
        stops = [place for place, token in enumerate(kept) if token in self.stop_ids]
        if stops:
            return kept[: stops[0] + 1], True
        return kept, len(kept) == room


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyStep:
    """One verify step: places drafted, accepted by the target, and tokens committed (bonus included, after cuts)."""

    drafted: int
    accepted: int
    committed: int

    @property
    def scored(self) -> int:
        """Places that the answer reached: those behind an accepted end are neither right nor wrong."""
        return self.drafted if self.committed > self.accepted else self.committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """An answer and how it came about. The first token is the prefill's, committed by no verify step."""

    token_ids: tuple[int, ...]
    steps: tuple[VerifyStep, ...]
    prefill_seconds: float
    seconds: float
    """Of all verify steps, the prefill left out."""
    num_reruns: int
    """Target forwards that only ran accepted tokens again (targets whose cache can't be cropped)."""

    @property
    def committed(self) -> int:
        return sum(step.committed for step in self.steps)

    @property
    def tau(self) -> float:
        """Tokens committed a verify step, the bonus token included; 0 where there was no step."""
        return self.committed / len(self.steps) if self.steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """An answer decoded one token at a time, with the gap between the two best logits at each token."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    prefill_seconds: float
    seconds: float


Tell = Callable[[Sequence[int], int], None]


@torch.no_grad()
def decode(
    target: Target,
    drafter: Drafter,
    ends: FrozenEnds,
    prompt_ids: Sequence[int],
    limits: DecodeLimits,
    sampler: Sampler = GREEDY,
    tell: Tell | None = None,
) -> Decoded:
    """Answer `prompt_ids` by drafting blocks and verifying them.

    Args:
        target: whose answer it is; hooks stand on its tapped layers meanwhile.
        drafter: on any device and in any dtype; it casts what it is given.
        ends: the target's embedding and head, `target.ends()` or a copy nearer to the drafter.
        prompt_ids: at least one token.
        limits: when to stop.
        sampler: greedy unless told otherwise.
        tell: called as tokens are committed, with them and how many of them were drafted (they come first).

    Raises:
        ConfigError: an empty prompt.
    """
    check_prompt(prompt_ids)
    steps: list[VerifyStep] = []
    with TapHooks(target, drafter.config.taps) as hooks:
        began = now(target)
        stepper = Stepper(target)
        context = DraftContext.start(drafter, ends)
        answer = [int(sampler.choose(stepper.run(prompt_ids, last_only=True))[0])]
        context.extend(hooks.features()[0])
        prefilled = now(target)
        if tell is not None:
            tell(answer, 0)
        done = limits.cut(answer, limits.max_new_tokens)[1]
        while not done:
            room = limits.max_new_tokens - len(answer)
            # Near the limit a block is no wider than what may still come, the known token included.
            size = min(drafter.config.block_size, room + 1)
            blocks = Blocks.single(answer[-1], context.length, size, context.device)
            drafts, q = sampler.propose(context.logits(context.hidden(blocks)[0, 1 : 1 + limits.drafts(size)]))
            block = [answer[-1], *(int(token) for token in drafts)]
            accepted, bonus = sampler.verify(drafts, q, stepper.run(block))
            kept, done = limits.cut([*block[1 : accepted + 1], bonus], room)
            steps.append(VerifyStep(drafted=len(drafts), accepted=accepted, committed=len(kept)))
            answer += kept
            if tell is not None:
                tell(kept, min(accepted, len(kept)))
            if not done:
                # The bonus token has not been read by the target yet: it opens the next block.
                context.extend(hooks.features()[0, : len(kept)])
                stepper.commit(len(kept))
        ended = now(target)
    return Decoded(
        token_ids=tuple(answer),
        steps=tuple(steps),
        prefill_seconds=prefilled - began,
        seconds=ended - prefilled,
        num_reruns=stepper.num_reruns,
    )


@torch.no_grad()
def plain_decode(target: Target, prompt_ids: Sequence[int], limits: DecodeLimits, sampler: Sampler = GREEDY) -> Plain:
    """Answer `prompt_ids` by the target alone, one token a forward.

    Raises:
        ConfigError: an empty prompt.
    """
    check_prompt(prompt_ids)
    began = now(target)
    stepper = Stepper(target)
    logits = stepper.run(prompt_ids, last_only=True)
    prefilled = now(target)
    answer: list[int] = []
    gaps: list[Tensor] = []
    done = False
    while not done:
        best = logits[0].topk(2).values
        gaps.append(best[0] - best[1])
        answer.append(int(sampler.choose(logits)[0]))
        done = len(answer) == limits.max_new_tokens or answer[-1] in limits.stop_ids
        if not done:
            logits = stepper.run(answer[-1:], last_only=True)
    ended = now(target)
    return Plain(
        token_ids=tuple(answer),
        gaps=tuple(float(gap) for gap in torch.stack(gaps).cpu()),
        prefill_seconds=prefilled - began,
        seconds=ended - prefilled,
    )


def plain_greedy(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The target's own greedy answer, up to its end of answer."""
    limits = DecodeLimits(max_new_tokens=max_new_tokens, stop_ids=target.facts.eos_token_ids)
    return list(plain_decode(target, prompt_ids, limits).token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Whether two answers are the same, and if not, where they part and how close the target's two best tokens were."""

    identical: bool
    place: int = -1
    """Of the first differing token, counted from 0; -1 where none differs."""
    gap: float = 0.0

    @property
    def is_tie(self) -> bool:
        """They part only where rounding decides."""
        return not self.identical and self.gap < TIE

    def __str__(self) -> str:
        if self.identical:
            return "yes"
        kind = "a tie: rounding decides" if self.is_tie else "not a tie"
        return f"no: they part at token {self.place}, top-2 gap {self.gap:.2g} ({kind})"


def compare_answers(token_ids: Sequence[int], plain: Plain) -> Agreement:
    """Compare a drafted answer with plain decoding, token for token."""
    pairs = list(zip(token_ids, plain.token_ids, strict=False))
    place = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    if place == len(token_ids) == len(plain.token_ids):
        return Agreement(identical=True)
    return Agreement(identical=False, place=place, gap=plain.gaps[min(place, len(plain.gaps) - 1)])


def check_prompt(prompt_ids: Sequence[int]) -> None:
    if len(prompt_ids) == 0:
        raise ConfigError("a prompt of 0 tokens can't be answered: remove it from --prompts")


def now(target: Target) -> float:
    """Seconds, after the device has finished what it was given."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
