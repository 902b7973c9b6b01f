"""The workers of one process: built device after device, run as a thread each, stopped together.

Everything that compiles or captures, backward included, happens while the team is built, in one thread. Threads then
only replay: none of them takes a lock around a forward, a backward or a replay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from draftsmith.data.loader import shard_numbers
from draftsmith.pipeline.buffers import FeatureRing
from draftsmith.pipeline.drafter_loop import DrafterTrainLoop
from draftsmith.pipeline.producing import Producer, run_producer
from draftsmith.pipeline.stop import Stop, StoppedError

JOIN_SECONDS = 0.2
GRACE_SECONDS = 10.0
"""How long workers get to end after a failure before the run ends without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One thread: its name, the device and stream it works on, and its loop."""

    name: str
    device: torch.device
    stream: torch.cuda.Stream | None
    loop: Callable[[], None]


def make_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A private stream of a GPU; None on the CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def first_number(drafters: list[DrafterTrainLoop]) -> int:
    """The first batch number that any drafter still needs."""
    return min(loop.plan.batch_number(loop.next_sequence) for loop in drafters)


def last_number(drafters: list[DrafterTrainLoop]) -> int:
    """One past the last batch number of the run."""
    return max(loop.plan.batch_number(loop.plan.num_sequences() - 1) for loop in drafters) + 1


def split_loops(
    producers: list[Producer], drafters: list[DrafterTrainLoop], rings: list[FeatureRing], stop: Stop
) -> list[Callable[[], None]]:
    """A loop per producer, which takes every n-th number, then one per drafter."""
    first, last = first_number(drafters), last_number(drafters)
    loops: list[Callable[[], None]] = []
    for index, producer in enumerate(producers):
        numbers = shard_numbers(index, len(producers), first, last)
        loops.append(_producing(producer, numbers, rings, stop))
    loops.extend(drafter.run for drafter in drafters)
    return loops


def _producing(producer: Producer, numbers: Iterator[int], rings: list[FeatureRing], stop: Stop) -> Callable[[], None]:
    return lambda: run_producer(producer, numbers, rings, stop)


def joint_loop(producer: Producer, drafter: DrafterTrainLoop, stop: Stop) -> Callable[[], None]:
    """Both roles in turns in one thread: make a batch, use it up, make the next. Each waits while the other works."""

    def run() -> None:
        producer.clock.begin()
        drafter.clock.begin()
        while not drafter.ended:
            stop.check()
            sequence = drafter.next_sequence
            started = time.perf_counter()
            producer.produce(drafter.plan.batch_number(sequence))
            drafter.clock.input(started)
            started = time.perf_counter()
            drafter.consume(sequence)
            producer.clock.room(started)

    return run


def run_workers(workers: list[Worker], stop: Stop, while_running: Callable[[], None]) -> None:
    """Run every worker in a thread of its own until all have ended; `while_running` is called a few times a second.

    Raises:
        DraftsmithError: the first worker's error, once the others have ended or had ten seconds to.
    """
    threads = [
        threading.Thread(target=_guarded, args=(worker, stop), name=worker.name, daemon=True) for worker in workers
    ]
    for thread in threads:
        thread.start()
    try:
        _wait_for(threads, stop, while_running)
    except BaseException as error:
        stop.fail("the run's main thread", error)
        _wait_for(threads, stop, _nothing)
        raise
    stop.raise_error()


def _nothing() -> None:
    return


def _wait_for(threads: list[threading.Thread], stop: Stop, while_running: Callable[[], None]) -> None:
    """Until all threads have ended, or ten seconds after a failure."""
    failed_at: float | None = None
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(JOIN_SECONDS / len(threads))
        while_running()
        if stop.failed:
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > GRACE_SECONDS:
                return


def _guarded(worker: Worker, stop: Stop) -> None:
    """A worker's thread: its device, its stream, its loop; any error ends the run."""
    stop.enter(worker.name)
    try:
        if worker.stream is None:
            worker.loop()
        else:
            torch.cuda.set_device(worker.device)
            with torch.cuda.stream(worker.stream):
                worker.loop()
                worker.stream.synchronize()
    except StoppedError:
        return
    except BaseException as error:
        stop.fail(worker.name, error)
        if not isinstance(error, Exception):
            raise
    finally:
        stop.leave(worker.name)
