"""Adding up gradients between drafters: one flat buffer and its sums, outside the graphs, never without a timeout.

`local` drafters are threads of one process. Drafter g owns the g-th share of the flat gradient: it adds it up over
every drafter, in drafter order, then each copies the other owners' sums into its own buffer. Copies go device to device
(peer to peer where the GPUs can reach each other). Two barriers with a timeout separate the phases; a failed worker
breaks them at once, so nobody hangs. Sums of two commute, hence one or two drafters are bit-exact under any channel;
three and more are summed in drafter order here, in the library's order elsewhere.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.errors import StalledError
from draftsmith.pipeline.stop import Stop
from draftsmith.train.step import TrainState

CHUNK = 1 << 24
"""Elements a peer copy moves at a time through the scratch buffer (64 MB)."""


class Reducer(Protocol):
    """Sums gradients and loss sums of all drafters in place; called once a step by each of them.

    `is_last` says that this drafter would end with this step; the answer is whether any would. So all end together:
    one that went on alone would wait for the others for ever.
    """

    def reduce(self, state: TrainState, is_last: bool) -> bool: ...


class NoReduce:
    """A single drafter has nothing to add up."""

    def reduce(self, state: TrainState, is_last: bool) -> bool:
        return is_last


class LocalGroup:
    """The drafters of one process: their states, registered before training, and the barriers between phases."""

    def __init__(self, num_drafters: int, stop: Stop, timeout: float) -> None:
        self.states: list[TrainState | None] = [None] * num_drafters
        self.sent: list[Tensor | None] = [None] * num_drafters
        self.events: list[torch.cuda.Event | None] = [None] * num_drafters
        self.ends = [False] * num_drafters
        self._barrier = threading.Barrier(num_drafters)
        self._stop = stop
        self._timeout = timeout
        stop.on_failure(self._barrier.abort)

    def meet(self, drafter: int, phase: str) -> None:
        """Wait until every drafter has enqueued its part of `phase`; on GPUs, order this stream after theirs.

        Raises:
            StalledError: another drafter didn't arrive in time.
        """
        state = self.states[drafter]
        assert state is not None
        device = state.parameters.grad_N.device
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self.events[drafter] = event
        try:
            self._barrier.wait(self._timeout)
        except threading.BrokenBarrierError as error:
            self._stop.check()
            raise StalledError(
                f"drafter {drafter} waited over {self._timeout:g} s for the others to {phase} (limit --stall-seconds)"
            ) from error
        if device.type == "cuda":
            for event in self.events:
                if event is not None:
                    torch.cuda.current_stream(device).wait_event(event)


class LocalReducer:
    """Drafter `drafter`'s side of a LocalGroup."""

    def __init__(self, group: LocalGroup, drafter: int, state: TrainState) -> None:
        self.group, self.drafter = group, drafter
        gradient = state.parameters.grad_N
        self._scratch = torch.zeros(min(CHUNK, gradient.numel()), dtype=gradient.dtype, device=gradient.device)
        self._piece = torch.zeros_like(self._scratch)
        self._sums = torch.zeros_like(state.sums)
        self._piece_of_sums = torch.zeros_like(state.sums)
        group.states[drafter] = state
        group.sent[drafter] = torch.zeros_like(state.sums)

    def reduce(self, state: TrainState, is_last: bool) -> bool:
        """Leave the sum over drafters in `state.parameters.grad_N` and `state.sums`, equal bits on every drafter."""
        group, mine = self.group, self.drafter
        sent = group.sent[mine]
        assert sent is not None
        sent.copy_(state.sums)
        group.ends[mine] = is_last
        group.meet(mine, "finish their gradients")
        ends = any(group.ends)
        gradient = state.parameters.grad_N
        count = len(group.states)
        bounds = [gradient.numel() * index // count for index in range(count + 1)]
        for low in range(bounds[mine], bounds[mine + 1], CHUNK):
            self._add_share(low, min(low + CHUNK, bounds[mine + 1]))
        self._add_sums(state)
        group.meet(mine, "add up their shares")
        for owner, peer in enumerate(group.states):
            if owner != mine:
                assert peer is not None
                share = slice(bounds[owner], bounds[owner + 1])
                gradient[share].copy_(peer.parameters.grad_N[share], non_blocking=True)
        group.meet(mine, "copy the shares")
        return ends

    def _add_share(self, low: int, high: int) -> None:
        """Own share [low, high): the drafters' gradients added in drafter order."""
        group, mine = self.group, self.drafter
        own = group.states[mine]
        assert own is not None
        total = self._scratch[: high - low]
        kept = own.parameters.grad_N[low:high]
        for index, peer in enumerate(group.states):
            assert peer is not None
            piece = peer.parameters.grad_N[low:high]
            if index == 0:
                total.copy_(piece, non_blocking=True)
            elif piece.device == total.device:
                total.add_(piece)
            else:
                total.add_(self._piece[: high - low].copy_(piece, non_blocking=True))
        kept.copy_(total)

    def _add_sums(self, state: TrainState) -> None:
        self._sums.zero_()
        for sent in self.group.sent:
            assert sent is not None
            self._sums.add_(self._piece_of_sums.copy_(sent, non_blocking=True))
        state.sums.copy_(self._sums)
