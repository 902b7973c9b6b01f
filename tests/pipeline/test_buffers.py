"""The ring: order, bounded waits that say who waits for whom, slots never read after release, no deadlock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from draftsmith.data.loader import shard_numbers
from draftsmith.errors import StalledError
from draftsmith.pipeline.buffers import FeatureRing, RingPlace, WaitClock
from draftsmith.pipeline.producing import run_producer
from draftsmith.pipeline.stop import Stop, StoppedError
from draftsmith.records import BatchShape, FeatureBatch

CPU = torch.device("cpu")
SHAPE = BatchShape(num_tokens=4, num_documents=2, num_taps=1, hidden_size=2, dtype=torch.float32, last_hidden=True)
POISON = -7.0


def ring_of(
    slots: int, stop: Stop | None = None, *, stall: float = 30.0, name: str = "the ring of drafter 0"
) -> FeatureRing:
    place = RingPlace(name=name, device=CPU, pin=False, num_slots=slots, stall_seconds=stall)
    return FeatureRing(SHAPE, place, stop or Stop())


def fill(ring: FeatureRing, sequence: int, value: int) -> None:
    slot = ring.acquire(sequence)
    for tensor in slot.batch.tensors().values():
        tensor.fill_(value)
    ring.publish(sequence)


def values(ring: FeatureRing, sequence: int) -> set[float]:
    slot = ring.receive(sequence)
    return {float(tensor.min()) for name, tensor in slot.batch.tensors().items() if name != "loss_mask_T"}


def test_batches_are_read_in_number_order_whatever_the_order_of_arrival() -> None:
    ring = ring_of(3)
    for sequence in (2, 0, 1):
        fill(ring, sequence, sequence + 1)
    assert ring.depth == 3
    seen = []
    for sequence in range(3):
        seen.append(values(ring, sequence))
        ring.release(sequence)
    assert seen == [{1.0}, {2.0}, {3.0}]
    assert ring.depth == 0


def test_put_writes_every_row_and_hands_over() -> None:
    ring = ring_of(1)
    ring.acquire(0).batch.features_TFH.fill_(7)
    assert ring.put(0, FeatureBatch.allocate(SHAPE, "cpu"), None) is None
    assert ring.has(0)
    assert values(ring, 0) == {0.0}


def test_has_never_waits() -> None:
    ring = ring_of(2)
    assert not ring.has(0)
    fill(ring, 0, 1)
    assert ring.has(0)
    assert not ring.has(2)


def test_the_next_producer_of_a_slot_waits_for_its_release() -> None:
    ring = ring_of(2, stall=0.3)
    fill(ring, 0, 1)
    with pytest.raises(StalledError, match=r"target 1 waits for the ring of drafter 0 to be read \(room for batch 2\)"):
        ring.acquire(2, "target 1")
    ring.receive(0)
    ring.release(0)
    assert ring.acquire(2, "target 1").sequence == -1


def test_a_reader_without_a_batch_ends_with_an_error_that_names_both() -> None:
    ring = ring_of(2, stall=0.3)
    started = time.monotonic()
    with pytest.raises(
        StalledError, match=r"drafter 0 waits for the targets \(batch 5 of its ring\).*--stall-seconds 0.3"
    ):
        ring.receive(5, "drafter 0")
    assert 0.3 <= time.monotonic() - started < 3


def test_a_failure_elsewhere_ends_waits_at_once() -> None:
    stop = Stop()
    ring = ring_of(1, stop)
    ended = []

    def wait(way: Callable[[], object]) -> None:
        with pytest.raises(StoppedError):
            way()
        ended.append(time.monotonic())

    fill(ring, 0, 1)
    threads = [
        threading.Thread(target=wait, args=(lambda: ring.acquire(1),)),
        threading.Thread(target=wait, args=(lambda: ring.receive(1),)),
    ]
    for thread in threads:
        thread.start()
    failed = time.monotonic()
    stop.fail("target 0", ValueError("broken"))
    for thread in threads:
        thread.join(5)
    assert len(ended) == 2
    assert max(ended) - failed < 1


def test_a_request_to_stop_ends_no_wait_but_a_closed_ring_sends_producers_home() -> None:
    stop = Stop()
    ring = ring_of(1, stop)
    fill(ring, 0, 1)
    stop.request()
    threading.Timer(0.3, ring.close).start()
    started = time.monotonic()
    with pytest.raises(StoppedError, match="the ring of drafter 0 is closed"):
        ring.acquire(1)
    assert time.monotonic() - started >= 0.25
    assert ring.closed
    assert values(ring, 0) == {1.0}


def test_a_producer_works_off_requests_while_it_waits_for_room() -> None:
    """An evaluation asked of a target whose ring is full: the drafter stands still until it is done."""
    ring = ring_of(1)
    fill(ring, 0, 1)
    done: list[str] = []

    def meanwhile() -> None:
        done.append("evaluated")
        ring.receive(0)
        ring.release(0)

    ring.acquire(1, "target 0", meanwhile)
    assert done == ["evaluated"]


@pytest.mark.parametrize("first", [0, 1, 5, 6])
def test_a_resumed_ring_starts_at_any_number(first: int) -> None:
    ring = ring_of(3, stall=0.2)
    ring.start_at(first)
    for sequence in range(first, first + 7):
        fill(ring, sequence, sequence)
        assert values(ring, sequence) == {float(sequence)}
        ring.release(sequence)
    with pytest.raises(StalledError):
        ring.acquire(first)


def test_num_bytes_counts_every_slot() -> None:
    ring = ring_of(3)
    batch = ring.acquire(0).batch
    per_slot = sum(tensor.numel() * tensor.element_size() for tensor in batch.tensors().values())
    assert ring.num_bytes == 3 * per_slot == 3 * SHAPE.num_bytes


class Fake:
    """A producer of batches that hold their own number; now and then slow."""

    def __init__(self, name: str, rings: list[FeatureRing], pauses: Iterator[float]) -> None:
        self.clock = WaitClock(name)
        self.requests: list[Callable[[], None]] = []
        self.rings, self.pauses = rings, pauses

    def produce(self, number: int) -> None:
        time.sleep(next(self.pauses))
        sequence, drafter = divmod(number, len(self.rings))
        slot = self.rings[drafter].acquire(sequence, self.clock.name)
        time.sleep(next(self.pauses))
        for tensor in slot.batch.tensors().values():
            tensor.fill_(number)
        self.rings[drafter].publish(sequence)

    def close(self) -> None:
        return


def pauses(generator: np.random.Generator, scale: float) -> Iterator[float]:
    while True:
        yield float(generator.random() * scale) if generator.random() < 0.3 else 0.0


def random_run(seed: int) -> list[list[float]]:
    """Some targets, drafters that meet after every batch as in a reduce, and slots poisoned as they are given back."""
    generator = np.random.default_rng(seed)
    num_targets, num_drafters, slots = (int(n) for n in generator.integers(1, [6, 4, 4]))
    batches = int(generator.integers(1, 9))
    stop = Stop()
    rings = [ring_of(slots, stop, name=f"the ring of drafter {d}") for d in range(num_drafters)]
    speeds = generator.random(num_targets + num_drafters) * 2e-3
    barrier = threading.Barrier(num_drafters)
    seen: list[list[float]] = [[] for _ in rings]

    def drafter(index: int) -> None:
        pause = pauses(np.random.default_rng([seed, index]), float(speeds[index]))
        for sequence in range(batches):
            slot = rings[index].receive(sequence)
            time.sleep(next(pause))
            found = {float(t.max()) for name, t in slot.batch.tensors().items() if name != "loss_mask_T"}
            seen[index].append(found.pop() if len(found) == 1 else POISON)
            for tensor in slot.batch.tensors().values():
                tensor.fill_(POISON)
            rings[index].release(sequence)
            barrier.wait(30)
        rings[index].close()

    def target(index: int) -> None:
        pause = pauses(np.random.default_rng([seed, 100 + index]), float(speeds[num_drafters + index]))
        producer = Fake(f"target {index}", rings, pause)
        numbers = shard_numbers(index, num_targets, 0, batches * num_drafters)
        try:
            run_producer(producer, numbers, rings, stop)
        except StoppedError:
            return

    threads = [threading.Thread(target=drafter, args=(i,)) for i in range(num_drafters)]
    threads += [threading.Thread(target=target, args=(i,)) for i in range(num_targets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), f"seed {seed}"
    return seen


@pytest.mark.parametrize("block", range(4))
def test_200_random_runs_with_tiny_rings_never_deadlock_nor_read_a_released_slot(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        seen = random_run(seed)
        count = len(seen)
        for index, numbers in enumerate(seen):
            assert numbers == [float(sequence * count + index) for sequence in range(len(numbers))], f"seed {seed}"


def test_wait_clock_counts_from_begin() -> None:
    clock = WaitClock("target 0")
    clock.started -= 100
    clock.begin()
    since = time.perf_counter()
    time.sleep(0.05)
    clock.room(since)
    clock.tokens, clock.padded_tokens = 75, 100
    shares = clock.shares()
    assert shares["waiting_room"] > 0.5
    assert shares["waiting_input"] == 0
    assert shares["busy"] == pytest.approx(1 - shares["waiting_room"])
    assert shares["padding"] == 0.25
