"""The hs queue: a ring of preallocated FeatureBatches between targets and one drafter.

Batch number n of the run goes to drafter n % drafters as its sequence number s = n // drafters, and lies in slot s % R
of that drafter's ring. Producers may finish out of order but only ever wait for the slot's previous occupant; the
drafter reads in number order. Since every producer takes its numbers in rising order and slots are assigned by number,
no order of arrival can block the number that is needed next. A drafter that has done its last step closes its ring: all
drafters end with the same step, so nobody needs another batch then, and every producer goes home.

Memory: the ring owns its slots. Between `acquire` and `publish` a slot belongs to the producer, between `receive` and
`release` to the drafter. On a GPU both hand over with an event, so that nobody waits on the host for a copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from draftsmith.errors import StalledError
from draftsmith.pipeline.stop import Stop, StoppedError
from draftsmith.records import BatchShape, FeatureBatch

POLL_SECONDS = 0.2
"""How often a wait looks whether the run has been stopped."""


@dataclass(slots=True, kw_only=True)
class Slot:
    """One FeatureBatch and who may touch it: `sequence` is its content's number, -1 while free."""

    batch: FeatureBatch
    sequence: int = -1
    written: torch.cuda.Event | None = None
    """Recorded by the producer after its last copy in; the reader's stream waits for it."""
    read: torch.cuda.Event | None = None
    """Recorded by the reader after its last copy out; the next producer's stream waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlace:
    """Where a ring's slots lie and how its waits end."""

    name: str
    device: torch.device
    pin: bool
    """Page-locked host memory, for copies between GPUs through the host."""
    num_slots: int
    stall_seconds: float
    """Longest wait before the run ends with a StalledError."""


class FeatureRing:
    """R slots, one reader, any number of producers."""

    def __init__(self, shape: BatchShape, place: RingPlace, stop: Stop) -> None:
        self.place = place
        self._stop = stop
        self._changed = threading.Condition()
        self._slots = [
            Slot(batch=FeatureBatch.allocate(shape, place.device, pin=place.pin)) for _ in range(place.num_slots)
        ]
        self._next_free = list(range(place.num_slots))
        self._closed = False

    @property
    def num_bytes(self) -> int:
        return sum(slot.batch.shape.num_bytes for slot in self._slots)

    @property
    def depth(self) -> int:
        """Batches filled and not yet read."""
        return sum(slot.sequence >= 0 for slot in self._slots)

    @property
    def closed(self) -> bool:
        """Whether the reader needs nothing more."""
        return self._closed

    def close(self) -> None:
        """The reader has done its last step: wake all who wait for room."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_closed(self, seconds: float) -> bool:
        """Wait up to `seconds` for the reader to end; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, seconds)

    def acquire(self, sequence: int, who: str = "a target", meanwhile: Callable[[], None] | None = None) -> Slot:
        """The slot for batch `sequence` of this drafter, once its previous occupant has been read.

        Args:
            sequence: the batch's number in this ring.
            who: the worker that waits, for the error.
            meanwhile: work to do in this thread now and then while waiting.

        Raises:
            StalledError: the reader didn't come to it in time.
            StoppedError: the run failed, or the reader needs nothing more.
        """
        index = sequence % len(self._slots)
        what = f"{who} waits for {self.place.name} to be read (room for batch {sequence})"
        self._wait(lambda: self._next_free[index] == sequence or self._closed, what, meanwhile)
        if self._closed:
            raise StoppedError(f"{self.place.name} is closed")
        return self._slots[index]

    def publish(self, sequence: int) -> None:
        """Hand the filled slot to the reader."""
        with self._changed:
            self._slots[sequence % len(self._slots)].sequence = sequence
            self._changed.notify_all()

    def receive(self, sequence: int, who: str = "the drafter") -> Slot:
        """The filled slot of batch `sequence`.

        Raises:
            StalledError: no target filled it in time.
            StoppedError: the run failed.
        """
        slot = self._slots[sequence % len(self._slots)]
        self._wait(lambda: slot.sequence == sequence, f"{who} waits for the targets (batch {sequence} of its ring)")
        return slot

    def put(self, sequence: int, batch: FeatureBatch, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """Copy a batch into the slot acquired for it and hand that to the reader.

        On a GPU asynchronously on `stream`, with an event behind it: until then `batch` must stay as it is.
        """
        copied = copy_out(batch, self._slots[sequence % len(self._slots)], stream)
        self.publish(sequence)
        return copied

    def has(self, sequence: int) -> bool:
        """Whether batch `sequence` is filled (never waits)."""
        with self._changed:
            return self._slots[sequence % len(self._slots)].sequence == sequence

    def release(self, sequence: int) -> None:
        """Give the slot back; the next producer of it is `sequence + R`."""
        index = sequence % len(self._slots)
        with self._changed:
            self._slots[index].sequence = -1
            self._next_free[index] = sequence + len(self._slots)
            self._changed.notify_all()

    def start_at(self, sequence: int) -> None:
        """Number the empty ring so that `sequence` is the next to be written and read (a resume)."""
        count = len(self._slots)
        for index in range(count):
            self._next_free[index] = sequence + (index - sequence) % count

    def _wait(self, ready: Callable[[], bool], what: str, meanwhile: Callable[[], None] | None = None) -> None:
        started = time.monotonic()
        while True:
            self._stop.check()
            with self._changed:
                if self._changed.wait_for(lambda: ready() or self._stop.failed, POLL_SECONDS):
                    self._stop.check()
                    return
            check_stall(started, self.place.stall_seconds, what)
            if meanwhile is not None:
                meanwhile()


def copy_out(batch: FeatureBatch, slot: Slot, copy_stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Copy a staged batch into a ring slot; on a GPU asynchronously on `copy_stream`, with an event behind it."""
    if copy_stream is None:
        slot.batch.copy_(batch)
        return None
    copy_stream.wait_stream(torch.cuda.current_stream(copy_stream.device))
    if slot.read is not None:
        copy_stream.wait_event(slot.read)
    with torch.cuda.stream(copy_stream):
        slot.batch.copy_(batch, non_blocking=True)
        written = torch.cuda.Event()
        written.record(copy_stream)
    slot.written = written
    return written


def check_stall(started: float, limit: float, what: str) -> None:
    """Bound a wait that began at `started` (time.monotonic).

    Raises:
        StalledError: it has taken longer than `limit` seconds; `what` says who waits for whom.
    """
    waited = time.monotonic() - started
    if waited > limit:
        raise StalledError(
            f"{what} since {waited:.0f} s (limit --stall-seconds {limit:g}): the other side is dead or far slower; the "
            "log's busy and waiting shares show which"
        )


@dataclass(slots=True)
class WaitClock:
    """Where one worker's time went, in seconds of the host: waiting for input, waiting for room, the rest busy."""

    name: str
    started: float = field(default_factory=time.perf_counter)
    waiting_input: float = 0.0
    waiting_room: float = 0.0
    tokens: int = 0
    padded_tokens: int = 0

    def begin(self) -> None:
        """Work starts now: what building took is nobody's idle time."""
        self.started = time.perf_counter()

    def input(self, since: float) -> None:
        self.waiting_input += time.perf_counter() - since

    def room(self, since: float) -> None:
        self.waiting_room += time.perf_counter() - since

    def shares(self) -> dict[str, float]:
        """Busy and waiting shares since `started`, tokens a second, padding share."""
        total = max(1e-9, time.perf_counter() - self.started)
        waiting = self.waiting_input + self.waiting_room
        return {
            "busy": max(0.0, 1.0 - waiting / total),
            "waiting_input": self.waiting_input / total,
            "waiting_room": self.waiting_room / total,
            "tokens_per_s": self.tokens / total,
            "padding": 1.0 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0,
        }
