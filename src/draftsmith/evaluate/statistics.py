"""Figures of draft-verify decoding over many answers, with intervals by bootstrap over prompts.

tau is pooled: tokens committed by verify steps (bonus included) over verify steps, so long answers count by their
length; an interval resamples whole prompts, since the steps of one answer are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.errors import ConfigError
from draftsmith.evaluate.decode import Agreement, Decoded, Plain, VerifyStep

RESAMPLES = 2000
COVERAGE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One prompt's answer by drafting, and by the target alone where that was asked for."""

    source: str
    domain: str
    num_prompt_tokens: int
    decoded: Decoded
    plain: Plain | None
    agreement: Agreement | None
    """None without plain decoding, and for sampled answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with its 95% interval by bootstrap over prompts."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a set of answers says of a drafter."""

    num_prompts: int
    num_steps: int
    num_tokens: int
    tau: Interval
    tau_per_response: float
    """Mean over answers of their own tau, answers without a step left out."""
    survival: tuple[float, ...]
    """Place k = 1..B-1: share of steps reaching it whose first k drafts were all accepted."""
    conditional: tuple[float, ...]
    """Place k: share accepted among steps whose first k - 1 drafts were."""
    tokens_per_second: float
    plain_tokens_per_second: float | None
    num_identical: int | None
    num_ties: int
    """Answers that part from plain decoding only where rounding decides between two equal tokens."""

    @property
    def speedup(self) -> float | None:
        plain = self.plain_tokens_per_second
        return self.tokens_per_second / plain if plain else None

    @property
    def identical(self) -> str:
        """For people: yes, no with the number, or - where nothing was compared."""
        if self.num_identical is None:
            return "-"
        if self.num_identical == self.num_prompts:
            return "yes"
        parted = self.num_prompts - self.num_identical
        return f"no: {parted} of {self.num_prompts} part ({self.num_ties} at ties)"


def summarize(answers: Sequence[Answered], seed: int = 0) -> Summary:
    """Pool `answers`; an empty list gives zeros."""
    steps = [step for answer in answers for step in answer.decoded.steps]
    survival, conditional = survival_of(steps)
    plains = [answer.plain for answer in answers if answer.plain is not None]
    agreements = [answer.agreement for answer in answers if answer.agreement is not None]
    own = [answer.decoded.tau for answer in answers if answer.decoded.steps]
    seconds = sum(answer.decoded.seconds for answer in answers)
    plain_seconds = sum(plain.seconds for plain in plains)
    plain_tokens = sum(len(plain.token_ids) - 1 for plain in plains)
    return Summary(
        num_prompts=len(answers),
        num_steps=len(steps),
        num_tokens=sum(len(answer.decoded.token_ids) for answer in answers),
        tau=tau_interval(answers, seed),
        tau_per_response=sum(own) / len(own) if own else 0.0,
        survival=tuple(survival),
        conditional=tuple(conditional),
        tokens_per_second=sum(step.committed for step in steps) / seconds if seconds else 0.0,
        plain_tokens_per_second=plain_tokens / plain_seconds if plain_seconds else None,
        num_identical=sum(agreement.identical for agreement in agreements) if agreements else None,
        num_ties=sum(agreement.is_tie for agreement in agreements),
    )


def survival_of(steps: Sequence[VerifyStep]) -> tuple[list[float], list[float]]:
    """Per place k = 1, 2, ...: share of steps whose first k drafts were all accepted, and the same given k - 1."""
    survival: list[float] = []
    conditional: list[float] = []
    for place in range(1, max((step.drafted for step in steps), default=0) + 1):
        # A place that the answer never reached (behind an accepted end, cut by the limit) is unscored, not wrong.
        scored = [step for step in steps if step.scored >= place]
        survived = sum(step.accepted >= place for step in scored)
        before = sum(step.accepted >= place - 1 for step in scored)
        survival.append(survived / len(scored) if scored else 0.0)
        conditional.append(survived / before if before else 0.0)
    return survival, conditional


def _counts(answers: Sequence[Answered]) -> Tensor:
    """Committed tokens and steps per prompt, [prompts, 2] in fp64."""
    rows = [[answer.decoded.committed, len(answer.decoded.steps)] for answer in answers]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)


def _resamples(num_prompts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, max(1, num_prompts), (RESAMPLES, num_prompts), generator=generator)


def _ratio(counts: Tensor) -> Tensor:
    return counts[..., 0] / counts[..., 1].clamp(min=1)


def _interval(value: Tensor, samples: Tensor) -> Interval:
    tail = (1 - COVERAGE) / 2
    low, high = torch.quantile(samples, torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return Interval(value=float(value), low=float(low), high=float(high))


def tau_interval(answers: Sequence[Answered], seed: int = 0) -> Interval:
    """Pooled tau and its interval."""
    counts = _counts(answers)
    if not answers:
        return Interval(value=0.0, low=0.0, high=0.0)
    samples = _ratio(counts[_resamples(len(answers), seed)].sum(1))
    return _interval(_ratio(counts.sum(0)), samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much better one drafter is than another on the same prompts, by paired bootstrap."""

    name: str
    other: str
    tau: Interval

    @property
    def verdict(self) -> str:
        """Better, worse or level, beyond the interval or not."""
        size = f"{abs(self.tau.value):.2f} ± {self.tau.half_width:.2f}"
        if self.tau.low > 0:
            return f"{self.name} is better than {self.other} by {size}"
        if self.tau.high < 0:
            return f"{self.name} is worse than {self.other} by {size}"
        gap = f"{self.tau.value:+.2f} ± {self.tau.half_width:.2f}"
        return f"{self.name} and {self.other} can't be told apart on these prompts: {gap}"


def compare(
    name: str, answers: Sequence[Answered], other: str, others: Sequence[Answered], seed: int = 0
) -> Difference:
    """Paired difference of pooled tau: both drafters answered the same prompts in the same order.

    Raises:
        ConfigError: another number of prompts, or other prompts.
    """
    ours, theirs = ([(a.source, a.num_prompt_tokens) for a in one] for one in (answers, others))
    if ours != theirs or not ours:
        raise ConfigError(f"{name} and {other} didn't answer the same prompts: evaluate both in one command")
    picks = _resamples(len(answers), seed)
    mine, counts = _counts(answers), _counts(others)
    samples = _ratio(mine[picks].sum(1)) - _ratio(counts[picks].sum(1))
    return Difference(name=name, other=other, tau=_interval(_ratio(mine.sum(0)) - _ratio(counts.sum(0)), samples))
