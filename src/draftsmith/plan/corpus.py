"""The data of a plan in numbers: assumed, from a sample of rows, or from all of a prepared data set."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.data.buckets import choose_buckets, padding_waste
from draftsmith.plan.workload import Corpus

ASSUMED_PADDING, ASSUMED_FILL = 0.12, 0.95
"""Between what was seen: 9 to 20% of padding in the target's forwards, batches filled to 94 to 98%."""
ASSUMED_TOKENS, ASSUMED_SUPERVISED = 200_000_000, 0.6
"""100,000 conversations of 2,000 tokens, and the share of them that assistants wrote."""
BUCKET_MULTIPLE = 64


def assumed_corpus(tokens: int, supervised_share: float, source: str) -> Corpus:
    """Data that nobody has looked at yet."""
    return Corpus(
        tokens=tokens,
        supervised=max(1, round(tokens * supervised_share)),
        padding=ASSUMED_PADDING,
        fill=ASSUMED_FILL,
        source=source,
        is_assumed=True,
    )


def corpus_of(lengths: Sequence[int], supervised: int, num_buckets: int, source: str) -> Corpus:
    """Documents of these lengths, with `supervised` of their tokens to be learnt."""
    buckets = choose_buckets(lengths, num_buckets, BUCKET_MULTIPLE)
    return Corpus(
        tokens=sum(lengths),
        supervised=supervised,
        padding=padding_waste(lengths, buckets),
        fill=ASSUMED_FILL,
        source=source,
    )
