"""Whole runs in ranks inside one process, to end them in every way: the product's own loops, rings and handshake.

Every rank is a thread that calls `run_workers` as TargetRank and DrafterRank do, over a store that all share. What is
stood in for: the transfer itself (queues instead of torch.distributed), the target's forward and the drafter's step
(they sleep and note numbers), and the reduce (a barrier).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import distributed as dist

from draftsmith.data.loader import shard_numbers
from draftsmith.errors import DraftsmithError
from draftsmith.pipeline import team
from draftsmith.pipeline.buffers import FeatureRing, RingPlace, Slot, WaitClock
from draftsmith.pipeline.distributed import Receiver, SendRing, hear_the_end
from draftsmith.pipeline.drafter_loop import DrafterTrainLoop, DrawPlan
from draftsmith.pipeline.producing import run_producer, serve
from draftsmith.pipeline.ranks import send_batches
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.team import Worker, run_workers
from draftsmith.pipeline.world import World
from draftsmith.records import BatchShape, FeatureBatch
from draftsmith.train.graph import StepInputs
from tests.pipeline.test_world import worlds

CPU = torch.device("cpu")
SHAPE = BatchShape(num_tokens=2, num_documents=1, num_taps=1, hidden_size=1, dtype=torch.float32, last_hidden=False)
STRUCK = "struck by a bomb"
LIMIT = 30.0
"""Seconds after which a rank counts as left waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Sizes, speeds (seconds) and the end of one run."""

    targets: int
    drafters: int
    slots: int
    draws: int
    steps: int
    forward: tuple[float, ...]
    transfer: float
    store: float
    draw_time: tuple[float, ...]
    after_last: float
    """What the first drafter does after its last step (it saves there), while the others end."""
    stop_after: float | None
    """Seconds until a person asks one rank to stop."""
    error: str
    """The worker that fails on the way, "" for none."""
    error_at: int
    """Batches or steps that it does before."""

    @classmethod
    def draw(cls, seed: int) -> Run:
        """The run of a seed: a third ends by itself, a third by a person, a third by an error."""
        rng = np.random.default_rng(seed)
        targets, drafters = (int(n) for n in rng.integers(1, 4, 2))
        kind = seed % 3
        role, count = ("target", targets) if rng.random() < 0.5 else ("drafter", drafters)
        slow = float(rng.choice([0.0, 2e-4, 2e-3]))
        fast = float(rng.choice([0.0, 2e-4, 2e-3]))
        return cls(
            targets=targets,
            drafters=drafters,
            slots=int(rng.integers(1, 4)),
            draws=int(rng.integers(1, 4)),
            steps=10_000 if kind == 1 else int(rng.integers(1, 25)),
            forward=tuple(float(x) for x in rng.random(targets) * slow),
            transfer=float(rng.random() * rng.choice([0.0, 1e-3])),
            store=float(rng.choice([0.0, 1e-3])),
            draw_time=tuple(float(x) for x in rng.random(drafters) * fast),
            after_last=float(rng.random() * rng.choice([0.0, 0.03])),
            stop_after=float(rng.random() * 0.05) if kind == 1 else None,
            error=f"{role} {int(rng.integers(count))}" if kind == 2 else "",
            error_at=int(rng.integers(1, 4)),
        )


class DistantStore:
    """A store at some distance: a call takes up to `seconds`, some ten times as long, so that other ranks do several
    things between any two calls of one."""

    def __init__(self, seed: int, seconds: float) -> None:
        self._store, self._seconds = dist.HashStore(), seconds
        self._draw = np.random.default_rng(seed)

    def _travel(self) -> None:
        if self._seconds:
            luck = float(self._draw.random())
            time.sleep(self._seconds * (10 if luck < 0.1 else luck))

    def add(self, key: str, amount: int) -> int:
        self._travel()
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._travel()
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def set(self, key: str, value: str) -> None:
        self._travel()
        self._store.set(key, value)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._store.compare_set(key, expected, value)


@dataclass(slots=True)
class Ending:
    """What a run left."""

    still_waiting: list[str]
    errors: dict[int, str]
    """By rank."""
    steps: list[int]
    read: list[list[int]]
    """Numbers of the batches that each drafter trained on, in order."""
    promised: int
    received: int


@dataclass(slots=True)
class Wires:
    """The transfers between ranks: a queue of one for each pair, which a failed run breaks as it breaks connections."""

    seconds: float
    queues: dict[tuple[int, int], queue.Queue[int]] = field(default_factory=dict)
    received: int = 0

    def between(self, target: int, drafter: int) -> queue.Queue[int]:
        return self.queues.setdefault((target, drafter), queue.Queue(1))


class WireSend(SendRing):
    """SendRing whose transfer is a queue."""

    def __init__(self, world: World, drafter: int, wires: Wires) -> None:
        super().__init__(world, drafter)
        self._wire, self._wires = wires.between(world.roles.index, drafter), wires

    def put(self, sequence: int, batch: FeatureBatch, stream: torch.cuda.Stream | None) -> None:
        time.sleep(self._wires.seconds)
        patiently(self._world.stop, lambda: self._wire.put(int(batch.num_tokens.item()), timeout=0.01))


class WireReceiver(Receiver):
    """Receiver whose transfer is a queue."""

    def __init__(self, world: World, ring: FeatureRing, wires: Wires) -> None:
        super().__init__(world, ring)
        self._wires = wires

    def _receive(self, slot: Slot, target: int) -> None:
        wire = self._wires.between(target, self._world.roles.index)
        slot.batch.num_tokens.fill_(patiently(self._world.stop, lambda: wire.get(timeout=0.01)))
        self._wires.received += 1


def patiently(stop: Stop, transfer: Callable[[], Any]) -> Any:
    while True:
        stop.check()
        try:
            return transfer()
        except (queue.Full, queue.Empty):
            continue


class SleepyTarget:
    """Makes numbered batches as TargetForwardLoop does."""

    def __init__(self, name: str, run: Run, seconds: float, rings: list[WireSend]) -> None:
        self.clock, self.requests = WaitClock(name), list[Callable[[], None]]()
        self._run, self._seconds, self._rings, self._made = run, seconds, rings, 0
        self._batch = FeatureBatch.allocate(SHAPE, CPU)

    def close(self) -> None:
        return

    def produce(self, number: int) -> None:
        time.sleep(self._seconds)
        self._made += 1
        if self._run.error == self.clock.name and self._made > self._run.error_at:
            raise ValueError(STRUCK)
        self._batch.num_tokens.fill_(number)
        sequence, drafter = divmod(number, len(self._rings))
        self._rings[drafter].acquire(sequence, self.clock.name, lambda: serve(self.requests))
        self._rings[drafter].put(sequence, self._batch, None)


class SleepyStep:
    """The drafter's step: notes which batch it was given."""

    def __init__(self, name: str, run: Run, seconds: float) -> None:
        self.inputs = StepInputs.allocate(SHAPE, 2, CPU)
        self.state: Any = None
        self.read: list[int] = []
        self._name, self._run, self._seconds, self._done = name, run, seconds, 0

    def accumulate(self) -> None:
        time.sleep(self._seconds)
        number = int(self.inputs.batch.num_tokens.item())
        if not self.read or self.read[-1] != number:
            self.read.append(number)

    def update(self) -> None:
        self._done += 1
        if self._run.error == self._name and self._done >= self._run.error_at:
            raise ValueError(STRUCK)


class BarrierReducer:
    """The drafters meet after every draw and agree on the end, as GroupReducer does through the library."""

    def __init__(self, barrier: threading.Barrier, ends: list[bool], world: World) -> None:
        self._barrier, self._ends, self._world = barrier, ends, world
        world.stop.on_failure(barrier.abort)

    def reduce(self, state: Any, is_last: bool) -> bool:
        self._ends[self._world.roles.index] = is_last
        try:
            self._barrier.wait(LIMIT)
            agreed = any(self._ends)
            self._barrier.wait(LIMIT)
        except threading.BrokenBarrierError as error:
            raise self._world.explain(error, []) from error
        return agreed


def run_to_its_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> Ending:
    """Run all ranks, each in a thread of its own, and see how they end."""
    monkeypatch.setattr(team, "JOIN_SECONDS", 0.01)
    store = DistantStore(run.steps, run.store)
    ranks, wires, errors = (
        worlds(run.targets, run.drafters, cast(dist.Store, store)),
        Wires(run.transfer),
        dict[int, str](),
    )
    barrier, ends = threading.Barrier(run.drafters), [False] * run.drafters
    loops = [_drafter(run, world, wires, barrier, ends) for world in ranks[run.targets :]]
    bodies = [_target_rank(run, world, wires) for world in ranks[: run.targets]]
    bodies += [_drafter_rank(world, *parts) for world, parts in zip(ranks[run.targets :], loops, strict=True)]

    def body(rank: int) -> None:
        try:
            with ranks[rank]:
                bodies[rank]()
        except DraftsmithError as error:
            errors[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    if run.stop_after is not None:
        time.sleep(run.stop_after)
        ranks[run.steps % len(ranks)].signals.request()
    until = time.monotonic() + LIMIT
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    waiting = [ranks[0].roles.name(rank) for rank, thread in enumerate(threads) if thread.is_alive()]
    pairs = [f"sent/{drafter}-{target}" for drafter in range(run.drafters) for target in range(run.targets)]
    return Ending(
        still_waiting=waiting,
        errors=errors,
        steps=[loop.step for loop, _, _ in loops],
        read=[step.read for _, step, _ in loops],
        promised=sum(store.add(pair, 0) for pair in pairs),
        received=wires.received,
    )


def _target_rank(run: Run, world: World, wires: Wires) -> Callable[[], None]:
    """As TargetRank.run."""
    roles = world.roles
    rings = [WireSend(world, drafter, wires) for drafter in range(roles.num_drafters)]
    name = roles.name(roles.rank)
    producer = SleepyTarget(name, run, run.forward[roles.index], rings)
    numbers = shard_numbers(roles.index, roles.num_targets, 0, -(-run.steps // run.draws) * roles.num_drafters)
    worker = Worker(name=name, device=CPU, stream=None, loop=lambda: send_batches(world, producer, numbers, rings))
    return lambda: run_workers([worker], world.stop, world.look)


Parts = tuple[DrafterTrainLoop, SleepyStep, WireReceiver]


def _drafter(run: Run, world: World, wires: Wires, barrier: threading.Barrier, ends: list[bool]) -> Parts:
    index = world.roles.index
    name = world.roles.name(world.roles.rank)
    place = RingPlace(name=f"the ring of {name}", device=CPU, pin=False, num_slots=run.slots, stall_seconds=LIMIT)
    ring, step = FeatureRing(SHAPE, place, world.stop), SleepyStep(name, run, run.draw_time[index])
    plan = DrawPlan(
        seed=0,
        drafter=index,
        num_drafters=run.drafters,
        draws_per_batch=run.draws,
        accumulation=1,
        total_steps=run.steps,
    )
    reducer = BarrierReducer(barrier, ends, world)

    def after_step(_step: int, is_last: bool) -> None:
        if is_last and world.roles.is_chief:
            time.sleep(run.after_last)

    loop = DrafterTrainLoop(name, step, ring, plan, reducer, world.stop, after_step)
    return loop, step, WireReceiver(world, ring, wires)


def _drafter_rank(world: World, loop: DrafterTrainLoop, step: SleepyStep, receiver: WireReceiver) -> Callable[[], None]:
    """As DrafterRank.run."""
    plan, ring = loop.plan, receiver._ring
    numbers = (plan.batch_number(sequence) for sequence in range(loop.next_sequence, plan.num_sequences()))
    workers = [
        Worker(
            name="receiver",
            device=CPU,
            stream=None,
            loop=lambda: run_producer(receiver, numbers, [ring], world.stop),
        ),
        Worker(name=loop.clock.name, device=CPU, stream=None, loop=loop.run),
    ]
    hear = hear_the_end(ring, world)

    def body() -> None:
        run_workers(workers, world.stop, hear)
        hear()

    return body
