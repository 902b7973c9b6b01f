"""How a batch is agreed on between ranks: room, promise, goodbye. The transfer itself: test_distributed."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from draftsmith.errors import StalledError
from draftsmith.pipeline.distributed import ENDED, Receiver, SendRing, hear_the_end, say_goodbye
from draftsmith.pipeline.stop import StoppedError
from tests.pipeline.test_buffers import ring_of
from tests.pipeline.test_world import worlds


def nothing() -> None:
    return


def test_a_target_waits_for_room_and_works_meanwhile() -> None:
    target, drafter = worlds(1, 1)
    target.stall_seconds = 0.3
    done: list[int] = []
    with pytest.raises(StalledError, match="target 0 waits for drafter 0 to have room for its batch 4"):
        SendRing(target, 0).acquire(4, "target 0", lambda: done.append(1))
    assert done
    drafter.store.add("room/0-0", 1)
    SendRing(target, 0).acquire(4, "target 0", nothing)
    assert drafter.store.add("sent/0-0", 0) == 1


def test_a_promise_is_kept_after_the_end_and_then_comes_goodbye() -> None:
    """Both sides at once: room given before the end must be used, or the receiver would wait for ever."""
    target, drafter = worlds(1, 1)
    ring = ring_of(2, drafter.stop)
    receiver, sender = Receiver(drafter, ring), SendRing(target, 0)
    drafter.store.add("room/0-0", 1)
    drafter.tell(ENDED)
    sender.acquire(0, "target 0", nothing)
    with pytest.raises(StoppedError):
        sender.acquire(1, "target 0", nothing)
    say_goodbye(target)
    drafter.store.add("room/0-0", -1)
    receiver._agree(0)
    with pytest.raises(StoppedError, match="target 0 has ended"):
        receiver._agree(0)


def test_a_failure_ends_both_waits() -> None:
    target, drafter = worlds(1, 1)
    receiver, sender = Receiver(drafter, ring_of(1, drafter.stop)), SendRing(target, 0)
    for world in (target, drafter):
        world.stop.fail("drafter 1", ValueError("broken"))
    with pytest.raises(StoppedError):
        sender.acquire(0, "target 0", nothing)
    with pytest.raises(StoppedError):
        receiver._agree(0)


@pytest.mark.parametrize("seed", range(20))
def test_random_ends_never_leave_a_side_waiting_and_never_lose_a_promise(seed: int) -> None:
    generator = np.random.default_rng(seed)
    target, drafter = worlds(1, 1)
    receiver, sender = Receiver(drafter, ring_of(1, drafter.stop)), SendRing(target, 0)
    sent: list[int] = []
    received: list[int] = []
    slow = [float(x) for x in generator.random(2) * 3e-3]

    def send() -> None:
        try:
            for number in range(100_000):
                time.sleep(slow[0])
                sender.acquire(number, "target 0", nothing)
                sent.append(number)
        except StoppedError:
            say_goodbye(target)

    def receive() -> None:
        try:
            while not drafter.has(ENDED):  # as a closed ring has no room to give
                receiver._agree(0)
                time.sleep(slow[1])
                received.append(len(received))
        except StoppedError:
            return

    threads = [threading.Thread(target=send), threading.Thread(target=receive)]
    for thread in threads:
        thread.start()
    time.sleep(float(generator.random() * 0.05))
    drafter.tell(ENDED)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert received == sent


def test_the_end_of_a_drafter_is_told_once() -> None:
    target, drafter = worlds(1, 1)
    ring = ring_of(1, drafter.stop)
    look = hear_the_end(ring, drafter)
    look()
    assert not SendRing(target, 0).wait_closed(0)
    ring.close()
    look()
    look()
    assert SendRing(target, 0).wait_closed(0)
