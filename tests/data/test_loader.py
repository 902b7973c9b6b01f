from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from draftsmith.data.buckets import OrderConfig, choose_buckets
from draftsmith.data.loader import BatchOrder, shard_numbers
from draftsmith.errors import ConfigError, DataError

LENGTHS = np.random.Generator(np.random.PCG64(0)).integers(1, 90, 150).tolist()
BUCKETS = choose_buckets(LENGTHS, 3)
ORDER = OrderConfig(token_budget=256, max_documents=20, seed=1)


def test_numbering_continues_over_epochs_and_every_epoch_is_whole() -> None:
    order = BatchOrder(LENGTHS, BUCKETS, ORDER)
    for epoch in range(3):
        first = order.first_number(epoch)
        plans = [order.batch(first + index) for index in range(order.num_batches(epoch))]
        assert [plan.number for plan in plans] == list(range(first, first + len(plans)))
        assert {plan.epoch for plan in plans} == {epoch}
        assert sorted(d for plan in plans for d in plan.documents) == list(range(len(LENGTHS)))


def test_any_batch_can_be_resumed_at() -> None:
    walked = BatchOrder(LENGTHS, BUCKETS, ORDER)
    plans = [walked.batch(number) for number in range(80)]
    for number in (0, 17, 40, 79):
        assert BatchOrder(LENGTHS, BUCKETS, ORDER).batch(number) == plans[number]
    assert walked.batch(3) == plans[3], "going back replans the epoch"


def test_threads_may_share_an_order() -> None:
    order = BatchOrder(LENGTHS, BUCKETS, ORDER)
    with ThreadPoolExecutor(4) as pool:
        plans = list(pool.map(order.batch, range(60)))
    alone = BatchOrder(LENGTHS, BUCKETS, ORDER)
    assert plans == [alone.batch(number) for number in range(60)]


def test_shards_are_disjoint_and_cover_everything() -> None:
    taken = [list(shard_numbers(worker, 3, 5, 30)) for worker in range(3)]
    assert sorted(number for shard in taken for number in shard) == list(range(5, 30))
    assert all(number % 3 == worker for worker, shard in enumerate(taken) for number in shard)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(DataError, match="no documents"):
        BatchOrder([], (8,), ORDER)
    with pytest.raises(ConfigError, match="numbered from 0"):
        BatchOrder(LENGTHS, BUCKETS, ORDER).batch(-1)
    with pytest.raises(ConfigError, match="doesn't exist"):
        shard_numbers(3, 3, 0, 9)
