"""Lengths -> a few (rows, length) shapes, and an epoch's batches as a pure function of (seed, epoch, lengths)."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.errors import CapacityError, ConfigError, DataError
from draftsmith.records import BatchPlan, ForwardPlan

MAX_EDGES = 2048
"""Candidate bucket lengths of the dynamic programme; longer data rounds lengths to a larger multiple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig:
    """How documents are grouped into batches."""

    token_budget: int = 49_152
    """Tokens of a batch (T): the one length the drafter ever sees."""
    max_documents: int = 256
    """Most documents in a batch (D)."""
    seed: int = 0
    """Seeds the order; with the epoch and the data it fixes every batch."""
    mixed: bool = True
    """Mix buckets inside every batch. False puts one bucket in each batch: only to show what that does to gradients."""
    forwards_per_batch: int = 8
    """A forward of the target holds at most `token_budget` / this many padded tokens, so that buckets share every
    batch."""
    look_ahead: int = 32
    """Forwards looked through for one that fills what is left of a batch."""

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.max_documents < 1:
            raise ConfigError("--token-budget and --max-documents must be at least 1")
        if self.forwards_per_batch < 1:
            raise ConfigError(f"--forwards-per-batch {self.forwards_per_batch} must be at least 1")
        if self.look_ahead < 0:
            raise ConfigError(f"--look-ahead {self.look_ahead} is below 0: give 0 to look at the next forward only")

    @property
    def forward_tokens(self) -> int:
        return max(1, self.token_budget // self.forwards_per_batch)


def choose_buckets(lengths: Sequence[int], num_buckets: int = 6, multiple: int = 8) -> tuple[int, ...]:
    """At most `num_buckets` lengths, ascending, that pad these documents with the fewest tokens: exact, by dynamic
    programming.

    Every length is a multiple of `multiple` (of a larger power of two times it where the data is so long that more than
    `MAX_EDGES` candidates would arise). The largest covers the longest document.

    Raises:
        DataError: no documents. ConfigError: fewer than one bucket.
    """
    if num_buckets < 1 or multiple < 1:
        raise ConfigError(f"{num_buckets} buckets in multiples of {multiple}: both must be at least 1")
    if len(lengths) == 0:
        raise DataError("no documents to choose buckets for: prepare data with at least one usable row")
    step = multiple
    while -(-max(lengths) // step) > MAX_EDGES:
        step *= 2
    rounded = -(-np.asarray(lengths, dtype=np.int64) // step)
    edges, counts = np.unique(rounded, return_counts=True)
    size = len(edges)
    below = np.concatenate([[0], np.cumsum(counts)])
    # cost[j]: fewest padded tokens for the shortest j lengths; a last bucket over (i, j] costs its documents times
    # its length.
    cost = np.full(size + 1, np.iinfo(np.int64).max // 2, dtype=np.int64)
    cost[0] = 0
    cuts: list[np.ndarray] = []
    for _ in range(min(num_buckets, size)):
        best = np.empty(size + 1, dtype=np.int64)
        cut = np.zeros(size + 1, dtype=np.int64)
        best[0] = 0
        for j in range(1, size + 1):
            total = cost[:j] + (below[j] - below[:j]) * edges[j - 1]
            cut[j] = int(np.argmin(total))
            best[j] = total[cut[j]]
        cost = best
        cuts.append(cut)
    chosen: list[int] = []
    j = size
    for cut in reversed(cuts):
        if j > 0:
            chosen.append(int(edges[j - 1]) * step)
            j = int(cut[j])
    return tuple(reversed(chosen))


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """Index of the shortest bucket that holds `length`.

    Raises:
        CapacityError: longer than the longest bucket.
    """
    index = bisect.bisect_left(buckets, length)
    if index == len(buckets):
        raise CapacityError(
            f"a document of {length} tokens doesn't fit the longest bucket of {buckets[-1]}: add a bucket that holds "
            "it or lower --max-length"
        )
    return index


def padding_waste(lengths: Sequence[int], buckets: Sequence[int]) -> float:
    """Share of the target's forward tokens that are padding, dummy rows not counted."""
    padded = sum(buckets[bucket_of(length, buckets)] for length in lengths)
    return 1 - sum(lengths) / padded


def forward_rows(bucket: int, order: OrderConfig) -> int:
    """Rows of this bucket's forwards: as many as `forward_tokens` hold, at least one, at most D."""
    return min(max(1, order.forward_tokens // bucket), order.max_documents)


def plan_epoch(
    lengths: Sequence[int], buckets: Sequence[int], order: OrderConfig, epoch: int, first_number: int = 0
) -> list[BatchPlan]:
    """All batches of one epoch, numbered from `first_number`; every document is in exactly one.

    Mixed order: forward i of the n of a bucket gets the key (i + u) / n with one u per bucket, and forwards go by
    key. So among the first m of all N forwards a bucket of n has m * n / N of them within 1 + (number of buckets) *
    n / N; filling batches by looking ahead moves no more than `look_ahead` forwards across the end of a batch.

    Raises:
        CapacityError: a document longer than the token budget or than the longest bucket.
    """
    longest = max(lengths, default=0)
    if longest > order.token_budget:
        raise CapacityError(
            f"a document of {longest} tokens doesn't fit a batch of {order.token_budget}: raise --token-budget or "
            "lower --max-length"
        )
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([order.seed, epoch])))
    queues = _forwards_by_bucket(lengths, buckets, order, generator)
    if order.mixed:
        groups = _fill(_interleave(queues, generator), lengths, order)
    else:
        groups = [group for queue in queues for group in _fill(queue, lengths, order)]
        shuffled: list[int] = generator.permutation(len(groups)).tolist()
        groups = [groups[index] for index in shuffled]
    return [
        BatchPlan(number=first_number + index, epoch=epoch, forwards=tuple(group)) for index, group in enumerate(groups)
    ]


def _forwards_by_bucket(
    lengths: Sequence[int], buckets: Sequence[int], order: OrderConfig, generator: np.random.Generator
) -> list[list[ForwardPlan]]:
    """Shuffled documents chunked into forwards of each bucket's shape; only a bucket's last one may have dummy rows."""
    members: list[list[int]] = [[] for _ in buckets]
    shuffled: list[int] = generator.permutation(len(lengths)).tolist()
    for document in shuffled:
        members[bucket_of(lengths[document], buckets)].append(document)
    queues: list[list[ForwardPlan]] = []
    for bucket, documents in zip(buckets, members, strict=True):
        rows = forward_rows(bucket, order)
        queues.append(
            [
                ForwardPlan(rows=rows, length=bucket, documents=tuple(documents[start : start + rows]))
                for start in range(0, len(documents), rows)
            ]
        )
    return queues


def _interleave(queues: Sequence[Sequence[ForwardPlan]], generator: np.random.Generator) -> list[ForwardPlan]:
    offsets: list[float] = generator.random(len(queues)).tolist()
    keyed = [
        ((place + offset) / len(queue), index, place)
        for index, (queue, offset) in enumerate(zip(queues, offsets, strict=True))
        for place in range(len(queue))
    ]
    return [queues[index][place] for _, index, place in sorted(keyed)]


def _fill(forwards: Iterable[ForwardPlan], lengths: Sequence[int], order: OrderConfig) -> list[list[ForwardPlan]]:
    """Whole forwards into batches: the next that fits, among the first of the queue and `look_ahead` behind it.

    A forward passed over stands first in the next batch, so that none is put off for longer.
    """
    waiting = deque((forward, sum(lengths[d] for d in forward.documents)) for forward in forwards)
    groups: list[list[ForwardPlan]] = []
    while waiting:
        group: list[ForwardPlan] = []
        tokens_left, documents_left = order.token_budget, order.max_documents
        passed: list[tuple[ForwardPlan, int]] = []
        while waiting and len(passed) <= order.look_ahead:
            forward, tokens = waiting.popleft()
            if tokens <= tokens_left and len(forward.documents) <= documents_left:
                group.append(forward)
                tokens_left -= tokens
                documents_left -= len(forward.documents)
            else:
                passed.append((forward, tokens))
        waiting.extendleft(reversed(passed))
        groups.append(group)
    return groups


def fill_share(plans: Sequence[BatchPlan], lengths: Sequence[int], order: OrderConfig) -> float:
    """Share of all batches' T places that hold a token."""
    tokens = sum(lengths[document] for plan in plans for document in plan.documents)
    return tokens / (len(plans) * order.token_budget) if plans else 0.0
