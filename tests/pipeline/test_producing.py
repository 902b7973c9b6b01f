"""A producer's thread serves requests between batches and stays until the drafters have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from draftsmith.pipeline.buffers import FeatureRing, WaitClock
from draftsmith.pipeline.producing import run_producer, serve
from draftsmith.pipeline.stop import Stop, StoppedError
from tests.pipeline.test_buffers import ring_of


class Fake:
    def __init__(self, ring: FeatureRing) -> None:
        self.clock = WaitClock("target 0")
        self.requests: list[Callable[[], None]] = []
        self.ring = ring
        self.log: list[object] = []

    def produce(self, number: int) -> None:
        self.log.append(number)

    def close(self) -> None:
        return


def test_requests_are_served_before_each_batch_in_order_of_arrival() -> None:
    ring = ring_of(1)
    producer = Fake(ring)
    producer.requests += [lambda: producer.log.append("first"), lambda: producer.log.append("second")]
    ring.close()
    run_producer(producer, iter([0, 1]), [ring], Stop())
    assert producer.log == ["first", "second", 0, 1]


def test_a_request_after_the_last_batch_is_served_too() -> None:
    """The ring holds the last batches while the target is done: an evaluation then must not wait for ever."""
    ring = ring_of(1)
    producer = Fake(ring)
    thread = threading.Thread(target=run_producer, args=(producer, iter([0]), [ring], Stop()))
    thread.start()
    while not producer.log:
        time.sleep(0.01)
    served = threading.Event()
    producer.requests.append(served.set)
    assert served.wait(5)
    ring.close()
    thread.join(5)
    assert not thread.is_alive()


def test_a_failure_ends_the_wait_for_the_drafters() -> None:
    stop = Stop()
    stop.fail("drafter 0", ValueError("broken"))
    with pytest.raises(StoppedError):
        run_producer(Fake(ring_of(1)), iter([]), [ring_of(1)], stop)


def test_serve_leaves_nothing() -> None:
    done: list[int] = []
    requests: list[Callable[[], None]] = [lambda: done.append(1)]
    serve(requests)
    serve(requests)
    assert (done, requests) == ([1], [])
