"""What fills rings: the face of a producer and the life of its thread.

Between batches, and while it waits for room, a producer does what others ask of its thread (an evaluation needs the
target, whose modules belong to one thread). It therefore stays after its last batch until the drafters have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from draftsmith.pipeline.buffers import POLL_SECONDS, WaitClock
from draftsmith.pipeline.stop import Stop
from draftsmith.records import FeatureBatch


class Outlet(Protocol):
    """Where a target puts its batches: a drafter's ring, or the way to one in another process."""

    def acquire(self, sequence: int, who: str, meanwhile: Callable[[], None]) -> object:
        """Wait for room for the drafter's batch `sequence`, doing `meanwhile` now and then."""
        ...

    def put(self, sequence: int, batch: FeatureBatch, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """Hand over a batch that there is room for; on a GPU it must stay as it is until the event returned."""
        ...

    def wait_closed(self, seconds: float) -> bool:
        """Wait up to `seconds` for the drafter to end; whether it has."""
        ...


class Producer(Protocol):
    """A TargetForwardLoop, or what stands in for it."""

    clock: WaitClock
    requests: list[Callable[[], None]]
    """Work that needs this producer's thread, done in order of arrival."""

    def produce(self, number: int) -> None:
        """Fill batch `number` and hand it to its drafter's ring."""
        ...

    def close(self) -> None:
        """Let go of what it holds outside itself (hooks on a target)."""
        ...


def serve(requests: list[Callable[[], None]]) -> None:
    """Do what was asked for so far, in order of arrival."""
    while requests:
        requests.pop(0)()


def run_producer(producer: Producer, numbers: Iterator[int], rings: Sequence[Outlet], stop: Stop) -> None:
    """Produce each number, then serve requests until the drafters have ended.

    Raises:
        StoppedError: the run failed, or the drafters ended before the last number.
        StalledError: no room in time.
    """
    producer.clock.begin()
    for number in numbers:
        serve(producer.requests)
        producer.produce(number)
    while not rings[0].wait_closed(POLL_SECONDS):
        stop.check()
        serve(producer.requests)
