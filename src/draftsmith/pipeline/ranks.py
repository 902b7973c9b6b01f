"""One rank's part of a distributed run: its workers, built from the same Blueprint as a local team's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from draftsmith.data.loader import BatchOrder, shard_numbers
from draftsmith.pipeline.assemble import Blueprint, Team, build_drafter, build_ring, build_targets, draw_plan
from draftsmith.pipeline.buffers import FeatureRing, WaitClock
from draftsmith.pipeline.distributed import GroupReducer, Receiver, SendRing, hear_the_end, say_goodbye, warm_links
from draftsmith.pipeline.placement import Placement
from draftsmith.pipeline.producing import Outlet, Producer, run_producer
from draftsmith.pipeline.reduce import NoReduce, Reducer
from draftsmith.pipeline.team import Worker, joint_loop, make_stream, run_workers
from draftsmith.pipeline.world import World
from draftsmith.records import Document
from draftsmith.target.model import Target
from draftsmith.train.step import TrainState

TELL_SECONDS = 1.0
"""How often a target tells the chief where its time went."""


def placement_of(world: World) -> Placement:
    """Every role as this rank sees it: on its own device."""
    roles, device = world.roles, world.device
    drafters = (device,) * roles.num_drafters
    targets = {"targets": (device,) * roles.num_targets, "joint": drafters, "disk": (torch.device("cpu"),)}
    return Placement(
        targets=targets[roles.feed],
        drafters=drafters,
        joint=roles.feed == "joint",
        why=roles.why,
        remarks=roles.remarks,
    )


class TargetRank:
    """A target's process."""

    def __init__(
        self, world: World, plan: Blueprint, target: Target, documents: Sequence[Document], order: BatchOrder
    ) -> None:
        self._world, self._plan = world, plan
        self._rings = [SendRing(world, drafter) for drafter in range(world.roles.num_drafters)]
        (self.producer,) = build_targets(plan, [target], documents, order, self._rings, first=world.roles.index)

    def run(self, first_step: int, look: Callable[[], None]) -> None:
        """Produce this target's batches from step `first_step` on, until the drafters end; `look` is called meanwhile.

        Raises:
            DraftsmithError: this target's error, or another rank's.
        """
        world, producer = self._world, self.producer
        _settle(world)
        numbers = numbers_of(self._plan, world.roles.index, world.roles.num_targets, first_step)
        clock = Telling(world, producer.clock)

        def loop() -> None:
            send_batches(world, producer, numbers, self._rings)

        def watch() -> None:
            world.look()
            clock.tell()
            look()

        worker = Worker(name=producer.clock.name, device=world.device, stream=make_stream(world.device), loop=loop)
        try:
            run_workers([worker], world.stop, watch)
        finally:
            producer.close()


def send_batches(world: World, producer: Producer, numbers: Iterator[int], rings: Sequence[Outlet]) -> None:
    """The life of a target's thread: its batches until the drafters end, then, however it ended, goodbye.

    Raises:
        StoppedError: the run failed, or the drafters ended before the last number.
        StalledError: no room in time.
    """
    try:
        run_producer(producer, numbers, rings, world.stop)
    finally:
        say_goodbye(world)


Feeder = Callable[[FeatureRing], Producer]
"""Makes what fills a drafter's ring in its own process."""


class DrafterRank:
    """A drafter's process: its loop, and what fills its ring: a receiver in the targets' place, or its own `feeder`."""

    def __init__(
        self, world: World, plan: Blueprint, after_step: Callable[[int, bool], None], feeder: Feeder | None = None
    ) -> None:
        self._world = world
        index = world.roles.index
        ring = build_ring(plan, index)

        def reducer(_state: TrainState) -> Reducer:
            return NoReduce() if world.roles.num_drafters == 1 else GroupReducer(world)

        loop, self._stream = build_drafter(plan, index, ring, reducer, after_step)
        self._remotes = [Remote(world, target) for target in range(world.roles.num_targets)]
        self._producer = Receiver(world, ring) if feeder is None else feeder(ring)
        self.team = Team(
            producers=list[Producer](self._remotes) if feeder is None else [self._producer],
            drafters=[loop],
            streams=[self._stream],
            rings=[ring],
            placement=plan.placement,
            stop=plan.stop,
            is_remote=feeder is None,
        )

    def run(self) -> None:
        """Train from where the loop stands to the end.

        Raises:
            DraftsmithError: this drafter's error, or another rank's.
        """
        world, (ring,) = self._world, self.team.rings
        _settle(world)
        hear = hear_the_end(ring, world)

        def watch() -> None:
            hear()
            if world.roles.is_chief:
                for remote in self._remotes:
                    remote.listen()

        run_workers(self._workers(), world.stop, watch)
        hear()  # both threads may have ended after the last look: the targets must not wait for a word that never comes

    def _workers(self) -> list[Worker]:
        """The drafter's thread and its producer's, or one for both in turns."""
        world, producer, (loop,), (ring,) = self._world, self._producer, self.team.drafters, self.team.rings
        if self.team.placement.joint:
            both = joint_loop(producer, loop, world.stop)
            name = f"worker {world.roles.index}"
            return [Worker(name=name, device=world.device, stream=self._stream, loop=both)]
        plan = loop.plan
        numbers = (plan.batch_number(sequence) for sequence in range(loop.next_sequence, plan.num_sequences()))
        device = self.team.placement.targets[0]
        return [
            Worker(
                name=producer.clock.name,
                device=device,
                stream=make_stream(device),
                loop=lambda: run_producer(producer, numbers, [ring], world.stop),
            ),
            Worker(name=loop.clock.name, device=world.device, stream=self._stream, loop=loop.run),
        ]


def _settle(world: World) -> None:
    """All ranks are built, what they zeroed and copied on other streams is done, and every connection is open."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    warm_links(world)
    world.meet("built")


def numbers_of(plan: Blueprint, index: int, count: int, first_step: int) -> Iterator[int]:
    """The batches that target `index` of `count` makes from a step on."""
    draws = draw_plan(plan, 0)
    first = draws.batch_number(first_step * draws.accumulation // draws.draws_per_batch)
    return shard_numbers(index, count, first, draws.batch_number(draws.num_sequences()))


class Telling:
    """A target's clock, told to the chief now and then."""

    def __init__(self, world: World, clock: WaitClock) -> None:
        self._world, self._clock = world, clock
        self._told_at = 0.0

    def tell(self) -> None:
        now = time.perf_counter()
        if now - self._told_at < TELL_SECONDS:
            return
        self._told_at = now
        clock = self._clock
        values = {
            "elapsed": now - clock.started,
            "waiting_input": clock.waiting_input,
            "waiting_room": clock.waiting_room,
            "tokens": clock.tokens,
            "padded_tokens": clock.padded_tokens,
        }
        self._world.tell(f"clock/{self._world.roles.index}", json.dumps(values))


class Remote:
    """Stands for a target in another process: carries its clock for the log."""

    def __init__(self, world: World, index: int) -> None:
        self._world, self._index = world, index
        self.clock = WaitClock(f"target {index}")
        self.requests: list[Callable[[], None]] = []
        self._heard_at = 0.0

    def listen(self) -> None:
        """Take over what that target last told."""
        now = time.perf_counter()
        key = f"clock/{self._index}"
        if now - self._heard_at < TELL_SECONDS or not self._world.has(key):
            return
        self._heard_at = now
        values: dict[str, float] = json.loads(self._world.store.get(key))
        self.clock.started = now - values["elapsed"]
        self.clock.waiting_input, self.clock.waiting_room = values["waiting_input"], values["waiting_room"]
        self.clock.tokens, self.clock.padded_tokens = int(values["tokens"]), int(values["padded_tokens"])

    def produce(self, number: int) -> None:
        """Nothing to do here: the target itself makes it."""
        return

    def close(self) -> None:
        """Holds nothing here."""
        return
