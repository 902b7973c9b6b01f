"""The off-policy alarm: are these answers ones that the target itself would give?

For text sampled from the target at temperature 1, the expected negative log-likelihood of each token is the entropy
of its distribution, so mean(NLL - entropy) is about 0. Colder samples lie below; text by others lies clearly above,
and drafters trained on it reach a fraction of the acceptance (tau 2.54 against 6.00 on the same trainer, arXiv
2602.06036).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from draftsmith.errors import ConfigError, DataError
from draftsmith.records import Document

OWN_BELOW = 0.1
"""Nats a token under which rows count as the target's own; see docs/assumptions.md for the two measured
distributions."""
FOREIGN_ABOVE = 0.25
"""Nats a token above which rows count as another's."""
HISTOGRAM_EDGES = tuple(-1.0 + 0.25 * step for step in range(17))


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicyConfig:
    """How many rows the alarm looks at."""

    off_policy_rows: int | Literal["auto"] = "auto"
    """Rows scored with the target, to tell whether their answers are its own: auto is 200, or 24 on a CPU; 0 none."""
    off_policy_batch: int = 8
    """Rows per forward while scoring."""

    def __post_init__(self) -> None:
        if self.off_policy_rows != "auto" and self.off_policy_rows < 0:
            raise ConfigError(f"--off-policy-rows {self.off_policy_rows} is below 0: give 0 to leave the alarm out")
        if self.off_policy_batch < 1:
            raise ConfigError(f"--off-policy-batch {self.off_policy_batch} must be at least 1")


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Under the target, of one document of n tokens: at place t, of the distribution given tokens 0..t-1 (place 0 is
    unused).

    `nll` [n] negative log-likelihood of token t, `entropy` [n], both in nats.
    """

    nll: Tensor
    entropy: Tensor


Score = Callable[[Sequence[Document]], Sequence[TokenScores]]
"""What scores documents with the target: handed in, since data knows of no model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicyReport:
    """What the alarm found."""

    gaps: tuple[float, ...]
    """mean(NLL - entropy) over supervised tokens, per row, nats a token."""
    num_tokens: int
    mean: float
    """Mean over rows."""
    standard_error: float
    share_foreign: float
    """Share of rows above `FOREIGN_ABOVE`."""

    @property
    def is_foreign(self) -> bool:
        return self.mean > FOREIGN_ABOVE

    @property
    def verdict(self) -> str:
        """One sentence: whose text this is, and what mends it."""
        figure = (
            f"mean(NLL - entropy) = {self.mean:+.2f} ± {2 * self.standard_error:.2f} nats a token over "
            f"{len(self.gaps)} rows"
        )
        if self.mean > FOREIGN_ABOVE:
            return (
                f"{figure}: these answers aren't the target's own; a drafter trained on them reaches a fraction of the "
                "acceptance. draftsmith regenerate replaces them by the target's own."
            )
        if self.mean > OWN_BELOW:
            return (
                f"{figure}: a mixture, or answers sampled above temperature 1 or by a close relative "
                f"({self.share_foreign:.0%} of rows look foreign). draftsmith regenerate makes them the target's own."
            )
        is_cold = self.mean < -2 * self.standard_error - 0.05
        kind = "colder than temperature 1" if is_cold else "at about temperature 1"
        return f"{figure}: the target's own answers, sampled {kind}."

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it: the verdict in words, its numbers, and every row's gap, nats a token."""
        return {
            "verdict": self.verdict,
            "is_foreign": self.is_foreign,
            "num_rows": len(self.gaps),
            "num_tokens": self.num_tokens,
            "mean": self.mean,
            "standard_error": self.standard_error,
            "share_foreign": self.share_foreign,
            "gaps": [round(gap, 4) for gap in self.gaps],
        }

    def print(self, console: Console) -> None:
        """The verdict and the rows' distribution."""
        console.print(("[bold red]" if self.is_foreign else "[green]") + self.verdict)
        counts = histogram(self.gaps)
        widest = max(counts, default=0) or 1
        for low, count in zip((-math.inf, *HISTOGRAM_EDGES), counts, strict=True):
            if count:
                label = "below" if low == -math.inf else f"{low:+.2f}"
                console.print(f"{label:>7} {'█' * max(1, round(40 * count / widest))} {count}")


def histogram(gaps: Sequence[float]) -> list[int]:
    """Rows below the first of `HISTOGRAM_EDGES`, then from each edge to the next, the last one open."""
    counts = [0] * (len(HISTOGRAM_EDGES) + 1)
    for gap in gaps:
        counts[sum(gap >= edge for edge in HISTOGRAM_EDGES)] += 1
    return counts


def check_on_policy(
    documents: Sequence[Document], score: Score, config: OnPolicyConfig, advance: Callable[[int], None] | None = None
) -> OnPolicyReport:
    """Score documents with the target; `advance` is told of each batch's rows.

    All rows given are scored: hand in a sample of the data.

    Raises:
        DataError: no document with a supervised token, or a score that isn't finite or of another length.
    """
    chosen = list(documents)
    gaps: list[float] = []
    num_tokens = 0
    for start in range(0, len(chosen), config.off_policy_batch):
        batch = chosen[start : start + config.off_policy_batch]
        for document, scores in zip(batch, score(batch), strict=True):
            gap, count = _row_gap(document, scores)
            if count:
                gaps.append(gap)
                num_tokens += count
        if advance is not None:
            advance(len(batch))
    if not gaps:
        raise DataError(
            "no supervised token to score: the off-policy alarm needs at least one row (--off-policy-rows 0 skips it)"
        )
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / max(1, len(gaps) - 1)
    return OnPolicyReport(
        gaps=tuple(gaps),
        num_tokens=num_tokens,
        mean=mean,
        standard_error=math.sqrt(variance / len(gaps)),
        share_foreign=sum(gap > FOREIGN_ABOVE for gap in gaps) / len(gaps),
    )


def _row_gap(document: Document, scores: TokenScores) -> tuple[float, int]:
    """(mean gap over supervised tokens that have a token before them, their number)."""
    if scores.nll.shape != document.token_ids.shape or scores.entropy.shape != document.token_ids.shape:
        raise DataError(
            f"a document of {document.length} tokens was scored with {scores.nll.numel()} values: one a token"
        )
    supervised = document.loss_mask.clone()
    supervised[0] = False
    gaps = (scores.nll - scores.entropy)[supervised].to(torch.float64)
    if not torch.isfinite(gaps).all():
        raise DataError("the target's log-likelihood of a row isn't finite: check the target's dtype (fp16 overflows)")
    return (float(gaps.mean()), gaps.numel()) if gaps.numel() else (0.0, 0)


def sample_indices(num_documents: int, count: int) -> list[int]:
    """`count` indices spread evenly over the data (all where there are fewer), the same at every call."""
    count = min(count, num_documents)
    return [place * num_documents // count for place in range(count)]
