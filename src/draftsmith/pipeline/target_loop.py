"""TargetForwardLoop: numbered batches in, filled ring slots out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from draftsmith.data.loader import BatchOrder
from draftsmith.pipeline.buffers import WaitClock
from draftsmith.pipeline.producing import Outlet, serve
from draftsmith.records import BatchPlan, Document
from draftsmith.target.capture import PackedCapture


class TargetForwardLoop:
    """One frozen target: runs the forwards of its numbers in rising order, copies them into the drafters' rings.

    Two staging sets take turns, so that the forward of the next batch writes one while the other is still being copied
    out on a side stream. The ring assigns batch n to drafter n % drafters.
    """

    def __init__(
        self,
        name: str,
        stagings: Sequence[PackedCapture],
        order: BatchOrder,
        documents: Sequence[Document],
        rings: Sequence[Outlet],
    ) -> None:
        self.clock = WaitClock(name)
        self.requests: list[Callable[[], None]] = []
        self._stagings, self._order, self._documents = stagings, order, documents
        self._rings = rings
        self._turn = 0
        self._checked = False
        device = stagings[0].device
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: list[torch.cuda.Event | None] = [None] * len(stagings)

    def close(self) -> None:
        """Take the hooks off the target."""
        for staging in self._stagings:
            staging.close()

    def produce(self, number: int) -> None:
        """Run batch `number` and hand it to its drafter's ring. The calling thread needs no grad state."""
        plan = self._order.batch(number)
        index = self._turn % len(self._stagings)
        self._turn += 1
        copied = self._copied[index]
        if copied is not None:
            torch.cuda.current_stream(self._stagings[index].device).wait_event(copied)
        batch = self._stagings[index].run(plan, self._documents)
        if not self._checked:
            # Once a run, before anything trains on it: a NaN or all-zero tap is a broken target.
            self._stagings[index].check([self._documents[document] for document in plan.documents])
            self._checked = True
        self._count(plan)
        sequence, drafter = divmod(number, len(self._rings))
        ring = self._rings[drafter]
        since = time.perf_counter()
        ring.acquire(sequence, self.clock.name, lambda: serve(self.requests))
        self.clock.room(since)
        self._copied[index] = ring.put(sequence, batch, self._copy_stream)

    def _count(self, plan: BatchPlan) -> None:
        self.clock.tokens += sum(self._documents[document].length for document in plan.documents)
        self.clock.padded_tokens += sum(forward.rows * forward.length for forward in plan.forwards)
