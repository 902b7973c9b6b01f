"""How a batch is agreed on between ranks: room, promise, goodbye. The transfer itself: test_distributed."""

from __future__ import annotations

import pytest

from draftsmith.errors import StalledError
from draftsmith.pipeline.distributed import ENDED, Receiver, SendRing, hear_the_end, say_goodbye
from draftsmith.pipeline.stop import StoppedError
from tests.pipeline.endings import STRUCK, Run, run_to_its_end
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


def check_ending(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run in ranks, as the product drives them, at random sizes, speeds and ends; see endings.py.

    Nobody is left waiting, every promise is kept, and each drafter has read the very batches of its steps, in order.
    """
    run = Run.draw(seed)
    ended = run_to_its_end(run, monkeypatch)
    assert not ended.still_waiting, (run, ended.still_waiting)
    if ended.errors:
        struck = [error for error in ended.errors.values() if error.startswith("WorkerError")]
        assert struck == [f"WorkerError: {run.error} failed: ValueError: {STRUCK}"], (run, ended.errors)
        return
    assert ended.promised == ended.received, run
    assert len(set(ended.steps)) == 1, run
    assert ended.steps[0] == run.steps or run.stop_after is not None, run
    num_sequences = -(-ended.steps[0] // run.draws)
    for drafter, read in enumerate(ended.read):
        assert read == [sequence * run.drafters + drafter for sequence in range(num_sequences)], run


@pytest.mark.parametrize("seed", range(12))
def test_random_ends_leave_nobody_waiting(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_ending(seed, monkeypatch)


@pytest.mark.long
def test_500_random_ends_leave_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100, 600):
        check_ending(seed, monkeypatch)
