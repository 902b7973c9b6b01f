"""DrafterTrainLoop: ring slots in, optimizer steps out; the training step in execution order.

Draw d of a drafter uses its batch d // draws_per_batch, with anchors seeded by (seed, batch number, draw). A step is
`accumulation` draws on every drafter, a reduce, an update. Nothing here reads from the device except at log points.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.pipeline.buffers import FeatureRing, Slot, WaitClock
from draftsmith.pipeline.reduce import Reducer
from draftsmith.pipeline.stop import Stop
from draftsmith.records import FeatureBatch
from draftsmith.train.graph import Stepper

STEPS_IN_FLIGHT = 2
"""The host waits for the step before the last, or it would run ahead of the device without bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawPlan:
    """How batches turn into steps on one drafter."""

    seed: int
    drafter: int
    num_drafters: int
    draws_per_batch: int
    accumulation: int
    total_steps: int

    def batch_number(self, sequence: int) -> int:
        """The run's number of this drafter's `sequence`-th batch."""
        return sequence * self.num_drafters + self.drafter

    def num_sequences(self) -> int:
        """Batches this drafter reads in the whole run."""
        return -(-self.total_steps * self.accumulation // self.draws_per_batch)


class DrafterTrainLoop:
    """One drafter: reads its ring in number order, trains, and calls `after_step(step)` when an update is enqueued."""

    def __init__(
        self,
        name: str,
        stepper: Stepper,
        ring: FeatureRing,
        plan: DrawPlan,
        reducer: Reducer,
        stop: Stop,
        after_step: Callable[[int, bool], None],
    ) -> None:
        self.clock = WaitClock(name)
        self.step = 0
        """Updates enqueued: what the weights are the result of, also in the middle of the next step."""
        self.draws_done = 0
        self.ended = plan.total_steps == 0
        """Whether the last step is done: the plan's, or the one that all drafters agreed to stop at."""
        self.stepper, self.plan = stepper, plan
        self._ring, self._reducer, self._stop, self._after_step = ring, reducer, stop, after_step
        self._feed = Feed(ring, stepper)
        self._flight: list[torch.cuda.Event] = []
        on_gpu = stepper.inputs.uniforms_T.is_cuda
        # Pinned and more than are in flight, so that filling one never races with the copy of an older draw.
        self._uniforms = [
            torch.zeros_like(stepper.inputs.uniforms_T, device="cpu", pin_memory=on_gpu)
            for _ in range((STEPS_IN_FLIGHT + 2) * plan.accumulation)
        ]

    def start_at(self, step: int) -> None:
        """Stand where a checkpoint of `step` was taken, the ring with it."""
        self.step = step
        self.draws_done = step * self.plan.accumulation
        self.ended = step >= self.plan.total_steps
        self._ring.start_at(self.next_sequence)

    @property
    def next_sequence(self) -> int:
        """The batch of this drafter that its next draw is from."""
        return self.draws_done // self.plan.draws_per_batch

    def run(self) -> None:
        """Train until the last step, or until a stop was asked for, at the end of a step that all drafters end with."""
        self.clock.begin()
        while not self.ended:
            self.consume(self.next_sequence)
        self._ring.close()

    def consume(self, sequence: int) -> None:
        """All remaining draws of one batch."""
        since = time.perf_counter()
        self._feed.load(sequence, self.clock.name)
        self.clock.input(since)
        first = self.draws_done % self.plan.draws_per_batch
        for draw in range(first, self.plan.draws_per_batch):
            self._draw(self.plan.batch_number(sequence), draw)
            if draw == first:
                self._feed.prefetch(sequence + 1, self.plan.num_sequences())
            if self.draws_done % self.plan.accumulation == 0:
                self._end_step()
            if self.ended:
                break
        self.clock.tokens += self.stepper.inputs.batch.shape.num_tokens

    def _draw(self, batch_number: int, draw: int) -> None:
        uniforms = self._uniforms[self.draws_done % len(self._uniforms)]
        uniforms.copy_(draw_uniforms(self.plan.seed, batch_number, draw, uniforms.numel()))
        self.stepper.inputs.uniforms_T.copy_(uniforms, non_blocking=True)
        self.stepper.accumulate()
        self.draws_done += 1

    def _end_step(self) -> None:
        """Reduce, update, tell; the drafters agree here on whether it was the last step."""
        is_last = self._stop.requested or self.step + 1 >= self.plan.total_steps
        is_last = self._reducer.reduce(self.stepper.state, is_last)
        self.stepper.update()
        self.step += 1
        self._throttle()
        self._after_step(self.step, is_last)
        self.ended = is_last

    def _throttle(self) -> None:
        if not self.stepper.inputs.uniforms_T.is_cuda:
            return
        event = torch.cuda.Event()
        event.record()
        self._flight.append(event)
        if len(self._flight) > STEPS_IN_FLIGHT:
            self._flight.pop(0).synchronize()


class Feed:
    """Moves ring slots into the step's input batch; on a GPU the next host slot travels while the current step runs."""

    def __init__(self, ring: FeatureRing, stepper: Stepper) -> None:
        self._ring, self._inputs = ring, stepper.inputs
        self._device = stepper.inputs.uniforms_T.device
        self._through_host = self._device.type == "cuda" and ring.place.device != self._device
        self._ahead = FeatureBatch.allocate(self._inputs.batch.shape, self._device) if self._through_host else None
        self._ahead_sequence = -1
        self._arrived: torch.cuda.Event | None = None
        self._drained: torch.cuda.Event | None = None
        self._copy_stream = torch.cuda.Stream(self._device) if self._through_host else None

    def load(self, sequence: int, who: str) -> None:
        """Batch `sequence` into the step's input, ordered on the current stream."""
        if self._ahead is None:
            slot = self._ring.receive(sequence, who)
            self._copy_slot(slot, self._inputs.batch)
            self._ring.release(sequence)
            return
        if self._ahead_sequence != sequence:
            self._fetch(sequence, who)
        assert self._arrived is not None
        torch.cuda.current_stream(self._device).wait_event(self._arrived)
        self._inputs.batch.copy_(self._ahead, non_blocking=True)
        self._drained = torch.cuda.Event()
        self._drained.record(torch.cuda.current_stream(self._device))
        self._ahead_sequence = -1

    def prefetch(self, sequence: int, num_sequences: int) -> None:
        """Start the next batch's journey, if it is there already and there is one."""
        if self._ahead is not None and sequence < num_sequences and self._ring.has(sequence):
            self._fetch(sequence, "the drafter")

    def _fetch(self, sequence: int, who: str) -> None:
        assert self._ahead is not None
        assert self._copy_stream is not None
        slot = self._ring.receive(sequence, who)
        if self._drained is not None:
            self._copy_stream.wait_event(self._drained)
        with torch.cuda.stream(self._copy_stream):
            self._copy_slot(slot, self._ahead)
            self._arrived = torch.cuda.Event()
            self._arrived.record(self._copy_stream)
        self._ring.release(sequence)
        self._ahead_sequence = sequence

    def _copy_slot(self, slot: Slot, into: FeatureBatch) -> None:
        if self._device.type != "cuda":
            into.copy_(slot.batch)
            return
        stream = torch.cuda.current_stream(self._device)
        if slot.written is not None:
            stream.wait_event(slot.written)
        into.copy_(slot.batch, non_blocking=True)
        slot.read = torch.cuda.Event()
        slot.read.record(stream)
