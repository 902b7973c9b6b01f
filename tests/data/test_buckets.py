from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.buckets import (
    MAX_EDGES,
    OrderConfig,
    bucket_of,
    choose_buckets,
    fill_share,
    forward_rows,
    padding_waste,
    plan_epoch,
)
from draftsmith.errors import CapacityError, ConfigError, DataError
from draftsmith.records import BatchPlan

LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=60)
ORDER = OrderConfig(token_budget=256, max_documents=12, seed=3)


def padded(lengths: list[int], buckets: tuple[int, ...]) -> int:
    return sum(buckets[bucket_of(length, buckets)] for length in lengths)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), num_buckets=st.integers(1, 4))
def test_buckets_pad_least_of_all_choices(lengths: list[int], num_buckets: int) -> None:
    buckets = choose_buckets(lengths, num_buckets, multiple=4)
    candidates = sorted({-(-length // 4) * 4 for length in lengths})
    best = min(
        padded(lengths, choice)
        for size in range(1, min(num_buckets, len(candidates)) + 1)
        for choice in combinations(candidates, size)
        if choice[-1] == candidates[-1]
    )
    assert padded(lengths, buckets) == best
    assert len(buckets) <= num_buckets
    assert list(buckets) == sorted(set(buckets))


def test_buckets_of_known_lengths() -> None:
    assert choose_buckets([10, 10, 10, 100], num_buckets=2, multiple=1) == (10, 100)
    assert choose_buckets([7], num_buckets=6, multiple=8) == (8,)
    assert padding_waste([10, 10, 20], (20,)) == pytest.approx(1 - 40 / 60)


def test_very_long_documents_keep_the_programme_small() -> None:
    lengths = np.random.Generator(np.random.PCG64(0)).integers(1, 1_000_000, 3000).tolist()
    buckets = choose_buckets(lengths, multiple=8)
    assert buckets[-1] >= max(lengths)
    assert buckets[-1] - max(lengths) <= 8 * 1_000_000 / (MAX_EDGES * 4)


def test_impossible_buckets_are_refused() -> None:
    with pytest.raises(DataError, match="no documents"):
        choose_buckets([])
    with pytest.raises(ConfigError, match="at least 1"):
        choose_buckets([1], 0)
    with pytest.raises(CapacityError, match=r"9 tokens.*bucket of 8"):
        bucket_of(9, (4, 8))


def documents(plans: list[BatchPlan]) -> list[int]:
    return [document for plan in plans for document in plan.documents]


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 5), epoch=st.integers(0, 3), mixed=st.booleans(), ahead=st.integers(0, 6))
def test_no_row_is_lost_or_repeated_and_every_batch_fits(
    lengths: list[int], seed: int, epoch: int, mixed: bool, ahead: int
) -> None:
    order = OrderConfig(token_budget=128, max_documents=7, seed=seed, mixed=mixed, look_ahead=ahead)
    buckets = choose_buckets(lengths, 3)
    plans = plan_epoch(lengths, buckets, order, epoch, first_number=10)
    assert sorted(documents(plans)) == list(range(len(lengths)))
    assert [plan.number for plan in plans] == list(range(10, 10 + len(plans)))
    short: Counter[int] = Counter()
    for plan in plans:
        assert plan.forwards
        assert sum(lengths[d] for d in plan.documents) <= 128
        assert len(plan.documents) <= 7
        for forward in plan.forwards:
            assert forward.rows == forward_rows(forward.length, order)
            assert 0 < len(forward.documents) <= forward.rows
            assert all(lengths[d] <= forward.length for d in forward.documents)
            assert forward.rows == 1 or forward.rows * forward.length <= order.forward_tokens
            short[forward.length] += len(forward.documents) < forward.rows
        if not mixed:
            assert len({forward.length for forward in plan.forwards}) == 1
    assert all(count <= 1 for count in short.values())


def test_a_plan_is_a_pure_function_of_seed_epoch_and_lengths() -> None:
    lengths = np.random.Generator(np.random.PCG64(1)).integers(1, 100, 200).tolist()
    buckets = choose_buckets(lengths)
    assert plan_epoch(lengths, buckets, ORDER, 1) == plan_epoch(lengths, buckets, ORDER, 1)
    assert plan_epoch(lengths, buckets, ORDER, 1) != plan_epoch(lengths, buckets, ORDER, 2)
    other = OrderConfig(token_budget=256, max_documents=12, seed=4)
    assert plan_epoch(lengths, buckets, ORDER, 1) != plan_epoch(lengths, buckets, other, 1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), ahead=st.sampled_from([0, 4, 32]))
def test_every_prefix_is_proportional_by_bucket(seed: int, ahead: int) -> None:
    """Whole batches: the bound of the interleaving plus what looking ahead moves across a batch's end."""
    generator = np.random.Generator(np.random.PCG64(seed))
    lengths = np.minimum(generator.lognormal(3.5, 0.8, 600).astype(int) + 1, 250).tolist()
    buckets = choose_buckets(lengths, 4)
    order = OrderConfig(token_budget=512, max_documents=64, seed=seed, look_ahead=ahead)
    plans = plan_epoch(lengths, buckets, order, 0)
    totals = Counter(forward.length for plan in plans for forward in plan.forwards)
    num_forwards = totals.total()
    seen: Counter[int] = Counter()
    for plan in plans:
        seen.update(forward.length for forward in plan.forwards)
        for bucket in buckets:
            share = totals[bucket] / num_forwards
            bound = 1 + len(buckets) * share + ahead
            assert abs(seen[bucket] - seen.total() * share) <= bound


def test_looking_ahead_fills_batches() -> None:
    lengths = np.minimum(
        np.random.Generator(np.random.PCG64(2)).lognormal(6.2, 0.7, 3000).astype(int) + 1, 4096
    ).tolist()
    buckets = choose_buckets(lengths)
    blind, seeing = (OrderConfig(token_budget=49_152, look_ahead=ahead) for ahead in (0, 32))
    plain = fill_share(plan_epoch(lengths, buckets, blind, 0), lengths, blind)
    filled = fill_share(plan_epoch(lengths, buckets, seeing, 0), lengths, seeing)
    assert filled > plain
    assert filled > 0.9


def test_a_document_longer_than_a_batch_names_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"300 tokens.*batch of 256"):
        plan_epoch([10, 300], (304,), ORDER, 0)


def test_impossible_orders_are_refused() -> None:
    with pytest.raises(ConfigError, match="--token-budget"):
        OrderConfig(token_budget=0)
    with pytest.raises(ConfigError, match="--forwards-per-batch"):
        OrderConfig(forwards_per_batch=0)
    with pytest.raises(ConfigError, match="--look-ahead"):
        OrderConfig(look_ahead=-1)
