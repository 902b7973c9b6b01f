"""The order of batches over epochs: any batch by its number, planned lazily, the same on every worker and after a
resume."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from draftsmith.data.buckets import OrderConfig, plan_epoch
from draftsmith.errors import ConfigError, DataError
from draftsmith.records import BatchPlan

KEPT_EPOCHS = 2
"""Plans kept in memory: workers near the border of two epochs ask for both."""


class BatchOrder:
    """Numbered batches without end: epoch after epoch, each a fresh order of the same documents.

    A pure function of (lengths, buckets, order); asking costs one plan per epoch. Threads may share one.
    """

    def __init__(self, lengths: Sequence[int], buckets: Sequence[int], order: OrderConfig) -> None:
        if len(lengths) == 0:
            raise DataError("no documents to put in order: prepare data with at least one usable row")
        self._lengths = list(lengths)
        self._buckets = tuple(buckets)
        self._order = order
        self._starts = [0]
        self._plans: dict[int, list[BatchPlan]] = {}
        self._lock = threading.Lock()

    def batch(self, number: int) -> BatchPlan:
        """The batch of this number, from 0 on."""
        if number < 0:
            raise ConfigError(f"batch {number} doesn't exist: batches are numbered from 0")
        epoch = self.epoch_of(number)
        return self._epoch(epoch)[number - self._starts[epoch]]

    def epoch_of(self, number: int) -> int:
        """The epoch that holds batch `number`."""
        while number >= self._starts[-1]:
            self._epoch(len(self._starts) - 1)
        return next(epoch for epoch in reversed(range(len(self._starts))) if self._starts[epoch] <= number)

    def first_number(self, epoch: int) -> int:
        """Number of the first batch of `epoch`: with it, how many batches all epochs before hold."""
        while len(self._starts) <= epoch:
            self._epoch(len(self._starts) - 1)
        return self._starts[epoch]

    def num_batches(self, epoch: int) -> int:
        """Batches in `epoch`; it differs a little between epochs, since forwards fall together differently."""
        return self.first_number(epoch + 1) - self.first_number(epoch)

    def _epoch(self, epoch: int) -> list[BatchPlan]:
        with self._lock:
            if epoch not in self._plans:
                plan = plan_epoch(self._lengths, self._buckets, self._order, epoch, self._starts[epoch])
                self._plans[epoch] = plan
                if len(self._starts) == epoch + 1:
                    self._starts.append(self._starts[epoch] + len(plan))
                while len(self._plans) > KEPT_EPOCHS:
                    del self._plans[next(kept for kept in self._plans if kept != epoch)]
            return self._plans[epoch]


def shard_numbers(worker: int, num_workers: int, start: int, stop: int) -> Iterator[int]:
    """Batch numbers in [start, stop) that target `worker` of `num_workers` takes: those equal to it modulo their count.

    Raises:
        ConfigError: a worker outside 0 .. num_workers - 1.
    """
    if not 0 <= worker < num_workers:
        raise ConfigError(f"target worker {worker} of {num_workers} doesn't exist: workers count from 0")
    first = start + (worker - start) % num_workers
    return iter(range(first, stop, num_workers))
