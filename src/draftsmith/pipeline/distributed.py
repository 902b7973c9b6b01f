"""FeatureBatches and gradients between processes: torch.distributed into the same preallocated buffers.

A batch goes over in three moves, told through the store: the drafter says that it has room (it has a free slot), the
target says that it sends, then both enter the transfer. So a send is only ever posted to a peer that is about to
receive, nothing waits inside the library for long, and no buffer is overwritten. At the end the drafters tell the
targets, which send what they promised and then say goodbye; a receiver waits for that, not for more batches.

Why no end leaves anybody waiting. All drafters end with the same step, each with every batch that it needed, and close
their rings; the first to do so tells ENDED. From then on
- room stops: a receiver gives room only for a free slot of an open ring, and a drafter that has ended frees none, so
  after ENDED each gives room for at most as many batches as its ring has slots;
- hence every target comes to see ENDED: it looks for room first, and takes what is left of it, but then there is none;
- a promise is always kept, since it is made in the same call that returns to send it, and goodbye comes after it (from
  a `finally`, so also after an error);
- a receiver that gave room in vain sees goodbye. It looks for goodbye before it looks for the promise: a promise made
  before goodbye is thus never missed, and none is made after it.
What a dead process leaves undone is not told here: the transfer breaks, or `World.look` finds that it doesn't answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributed as dist

from draftsmith.pipeline.buffers import FeatureRing, Slot, WaitClock, check_stall
from draftsmith.pipeline.stop import StoppedError
from draftsmith.pipeline.world import World, pauses
from draftsmith.records import FeatureBatch
from draftsmith.train.step import TrainState

WEIGHTS_TAG = 1000
"""Of weights on their way to be measured; buffers of a batch use their place in the batch."""
ENDED = "ended"
"""Told by the drafters when they need no more batches."""


class SendRing:
    """A target's side of a drafter's ring, with the face that TargetForwardLoop fills."""

    def __init__(self, world: World, drafter: int) -> None:
        self._world, self._drafter = world, drafter
        self._peer = world.roles.num_targets + drafter
        self._pair = f"{drafter}-{world.roles.index}"
        self._sent = 0

    def acquire(self, sequence: int, who: str, meanwhile: Callable[[], None]) -> None:
        """Wait until the drafter has room for batch `sequence`, and promise it.

        Raises:
            StalledError: the drafter didn't come to it in time.
            StoppedError: the run failed, or the drafters need nothing more.
        """
        world = self._world
        started = time.monotonic()
        for pause in pauses():
            world.stop.check()
            if world.store.add(f"room/{self._pair}", 0) > self._sent:
                self._sent = world.store.add(f"sent/{self._pair}", 1)
                return
            if world.has(ENDED):
                raise StoppedError("the drafters have ended")
            name = world.roles.name(self._peer)
            check_stall(started, world.stall_seconds, f"{who} waits for {name} to have room for its batch {sequence}")
            meanwhile()
            time.sleep(pause)

    def put(self, sequence: int, batch: FeatureBatch, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """Send the batch that `acquire` promised; on a GPU from `stream`, with an event behind it.

        Raises:
            PeerError: the drafter's process is gone.
        """
        world = self._world
        try:
            if stream is None:
                for tag, tensor in enumerate(batch.tensors().values()):
                    dist.send(tensor, self._peer, group=world.data, tag=tag)
                return None
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                for tensor in batch.tensors().values():
                    dist.send(tensor, self._peer, group=world.data)
                sent = torch.cuda.Event()
                sent.record(stream)
            return sent
        except RuntimeError as error:
            raise world.explain(error, [self._peer]) from error

    def wait_closed(self, seconds: float) -> bool:
        """Wait up to `seconds` for the drafters to end; whether they have."""
        until = time.monotonic() + seconds
        for pause in pauses():
            if self._world.has(ENDED):
                return True
            if time.monotonic() > until:
                break
            time.sleep(pause)
        return False


def say_goodbye(world: World) -> None:
    """A target's last word: it sends nothing more."""
    world.tell(f"gone/{world.roles.index}")


class Receiver:
    """Takes the targets' place in a drafter's process: receives its batches in number order into its ring."""

    def __init__(self, world: World, ring: FeatureRing) -> None:
        self.clock = WaitClock("receiver")
        self.requests: list[Callable[[], None]] = []
        self._world, self._ring = world, ring
        self._received = [0] * world.roles.num_targets

    def close(self) -> None:
        """Holds nothing open."""
        return

    def produce(self, number: int) -> None:
        """Receive batch `number` from the target that computes it.

        Raises:
            PeerError: that target's process is gone.
            StoppedError: the run failed, or this drafter needs nothing more.
        """
        roles = self._world.roles
        target, sequence = number % roles.num_targets, number // roles.num_drafters
        since = time.perf_counter()
        slot = self._ring.acquire(sequence, "the receiver")
        self.clock.room(since)
        self._agree(target)
        try:
            self._receive(slot, target)
        except RuntimeError as error:
            raise self._world.explain(error, [target]) from error
        self._ring.publish(sequence)

    def _agree(self, target: int) -> None:
        """Say that there is room; return when the target says that it sends."""
        world, pair = self._world, f"{self._world.roles.index}-{target}"
        world.store.add(f"room/{pair}", 1)
        since = time.perf_counter()
        for pause in pauses():
            world.stop.check()
            # Goodbye is looked up first: what was promised before it is still to be taken.
            is_gone = world.has(f"gone/{target}")
            if world.store.add(f"sent/{pair}", 0) > self._received[target]:
                self._received[target] += 1
                break
            if is_gone:
                raise StoppedError(f"{world.roles.name(target)} has ended")
            time.sleep(pause)
        self.clock.input(since)

    def _receive(self, slot: Slot, target: int) -> None:
        tensors = slot.batch.tensors().values()
        if self._world.device.type == "cpu":
            for tag, tensor in enumerate(tensors):
                dist.recv(tensor, target, group=self._world.data, tag=tag)
            return
        stream = torch.cuda.current_stream(self._world.device)
        if slot.read is not None:
            stream.wait_event(slot.read)
        for tensor in tensors:
            dist.recv(tensor, target, group=self._world.data)
        slot.written = torch.cuda.Event()
        slot.written.record(stream)
        # One transfer at a time, and the host knows when it is done: nothing piles up behind a dead peer.
        slot.written.synchronize()


class GroupReducer:
    """Sums gradients over the drafters' processes; the host meets the others first, with a timeout, then the device."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._peers = [rank for rank in range(world.roles.num_targets, world.roles.size) if rank != world.roles.rank]
        self._ends = torch.zeros((), dtype=torch.int32)

    def reduce(self, state: TrainState, is_last: bool) -> bool:
        """Leave the sum over drafters in `state.parameters.grad_N` and `state.sums`.

        Raises:
            PeerError: another drafter is gone, or didn't come within --stall-seconds.
        """
        world = self._world
        self._ends.fill_(int(is_last))
        try:
            dist.all_reduce(self._ends, group=world.control)
            dist.all_reduce(state.parameters.grad_N, group=world.gradients)
            dist.all_reduce(state.sums, group=world.gradients)
        except RuntimeError as error:
            raise world.explain(error, self._peers) from error
        return bool(self._ends.item())


def send_weights(world: World, flat_N: Tensor) -> None:
    """The chief's masters to the first target, which measures them.

    Raises:
        PeerError: the target's process is gone.
    """
    try:
        dist.send(flat_N, 0, tag=WEIGHTS_TAG)
    except RuntimeError as error:
        raise world.explain(error, [0]) from error


def receive_weights(world: World, flat_N: Tensor) -> None:
    """At the first target: the chief's masters into `flat_N`.

    Raises:
        PeerError: the chief's process is gone.
    """
    chief = world.roles.num_targets
    try:
        dist.recv(flat_N, chief, tag=WEIGHTS_TAG)
    except RuntimeError as error:
        raise world.explain(error, [chief]) from error


def warm_links(world: World) -> None:
    """Open every connection once, in an order that all ranks share, before any thread uses one.

    Raises:
        PeerError: a rank is gone.
    """
    roles, token = world.roles, torch.zeros(1, device=world.device)
    try:
        for target in range(roles.num_targets):
            for drafter in range(roles.num_targets, roles.size):
                if roles.rank == target:
                    dist.send(token, drafter, group=world.data)
                elif roles.rank == drafter:
                    dist.recv(token, target, group=world.data)
        if not roles.is_target:
            dist.all_reduce(token, group=world.gradients)
    except RuntimeError as error:
        raise world.explain(error, [rank for rank in range(roles.size) if rank != roles.rank]) from error


def hear_the_end(ring: FeatureRing, world: World) -> Callable[[], None]:
    """For a drafter's main thread, called now and then: tell the targets once this drafter has ended."""
    told = False

    def look() -> None:
        nonlocal told
        world.look()
        if not told and ring.wait_closed(0):
            told = True
            world.tell(ENDED)

    return look
