"""The processes of a distributed run: who is who, what they tell each other, and how they end.

torchrun starts them and says through RANK, WORLD_SIZE and LOCAL_RANK which one this is; ranks 0 .. targets - 1 run the
frozen target, the others train. Where features come from disk, or every process runs a target of its own, all train and
nothing but gradients travels. All coordination goes through the key-value store that torchrun keeps: every wait polls
it, so every wait ends with a failure elsewhere, and no signal handler ever stands behind a blocked call.

torchrun sends SIGTERM to the survivors when a rank dies, and also when a person ends the run. They are told apart by
asking: whoever gets the signal asks all ranks to answer. If every rank does, it was a person: the drafters agree on a
last step, save, and all exit with 0. If one doesn't, it is dead: the others end, and torchrun starts them all again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, cast

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # pyright: ignore

from draftsmith.errors import ConfigError, DraftsmithError, StalledError
from draftsmith.pipeline.launch import (
    LONG_SECONDS,
    Chooser,
    Launch,
    PeerError,
    Roles,
    agree_on_shares,
    assign_roles,
    device_of,
    pauses,
    roles_without_targets,
)
from draftsmith.pipeline.settings import PipelineConfig
from draftsmith.pipeline.stop import Stop

ANSWER_SECONDS = 5.0
"""How long a rank may take to answer that it lives."""


class World:
    """This rank's view of the run. Use as a context manager: leaving it with an error tells the others."""

    def __init__(self, roles: Roles, launch: Launch, config: PipelineConfig, store: Store) -> None:
        self.roles, self.launch = roles, launch
        self.store, self.stop = store, Stop()
        self.stall_seconds = config.stall_seconds
        self.device = device_of(config, roles.local_rank)
        self.control: dist.ProcessGroup | None = None
        """The drafters on the host; None at a target."""
        self.data: dist.ProcessGroup | None = None
        """All ranks where batches travel: NCCL on GPUs; None is gloo, torch's default group here."""
        self.gradients: dist.ProcessGroup | None = None
        """The drafters where gradients travel."""
        self._signals = Signalled()

    def connect(self) -> None:
        """Open the process groups: every rank makes every group, in the same order."""
        roles, store, timeout = self.roles, PrefixStore("groups", self.store), timedelta(seconds=self.stall_seconds)
        dist.init_process_group("gloo", store=store, rank=roles.rank, world_size=roles.size, timeout=timeout)
        drafters = list(range(roles.num_targets, roles.size))
        self.control = self.gradients = _group(drafters, timeout, "gloo")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self.data = _group(list(range(roles.size)), timeout, "nccl")
            self.gradients = _group(drafters, timeout, "nccl")

    @property
    def signals(self) -> Signalled:
        """What a signal handler may touch: it sets a flag, and the next look at the world asks the others."""
        return self._signals

    def tell(self, key: str, value: str = "1") -> None:
        self.store.set(key, value)

    def has(self, key: str) -> bool:
        return self.store.check([key])

    def wait(self, key: str, what: str, limit: float = LONG_SECONDS) -> bytes:
        """The value of `key`, once some rank has told it.

        Raises:
            PeerError: another rank failed meanwhile.
            StalledError: nobody told it in time.
        """
        started = time.monotonic()
        for pause in pauses():
            if self.has(key):
                return self.store.get(key)
            self._raise_failure()
            self.stop.check()
            if time.monotonic() - started > limit:
                me = self.roles.name(self.roles.rank)
                raise StalledError(f"{me} waited over {limit:.0f} s for {what}: see that rank's own output")
            time.sleep(pause)
        raise AssertionError("pauses never end")

    def meet(self, point: str) -> None:
        """Wait for all ranks to come to `point`."""
        self.tell(f"{point}/{self.roles.rank}")
        for rank in range(self.roles.size):
            self.wait(f"{point}/{rank}", f"{self.roles.name(rank)} to be ready ({point})")

    def _raise_failure(self) -> None:
        if self.has("failed"):
            raise PeerError(self.store.get("failed").decode(), is_told=True)

    def look(self) -> None:
        """Called by the main thread a few times a second while the workers run: failures and questions of others.

        Never raises for them: it notes them in `stop`, which ends the workers. This rank's own failure is told at once.
        """
        try:
            if self.stop.error is not None:
                self.tell_failure(self.stop.error)
                return
            self._raise_failure()
            self._answer()
        except PeerError as error:
            self.stop.fail("another rank", error)
        except dist.DistError as error:
            self.stop.fail("another rank", PeerError(f"the store that torchrun keeps is gone ({error})"))

    def _answer(self) -> None:
        signals = self._signals
        if signals.requested and not signals.asked:
            signals.asked = True
            self.tell("asked")
        if signals.heard_at is None:
            if not self.has("asked"):
                return
            signals.heard_at = time.monotonic()
            self.tell(f"alive/{self.roles.rank}")
        if self.stop.requested:
            return
        silent = [rank for rank in range(self.roles.size) if not self.has(f"alive/{rank}")]
        if not silent:
            self.stop.request()
        elif time.monotonic() - signals.heard_at > ANSWER_SECONDS:
            names = ", ".join(self.roles.name(rank) for rank in silent)
            raise PeerError(f"{names} died (no answer in {ANSWER_SECONDS:g} s)")

    def explain(self, error: RuntimeError, peers: list[int]) -> PeerError:
        """What a broken connection means: the peer's own error where it told one, else that it died or stalled."""
        for _ in range(20):
            try:
                self._raise_failure()
            except PeerError as known:
                return known
            except dist.DistError:
                break
            time.sleep(0.05)
        names = " or ".join(self.roles.name(rank) for rank in peers)
        limit = f"--stall-seconds {self.stall_seconds:g}"
        reason = f"stood still for over {limit}" if "imed out" in str(error) else "its process died"
        return PeerError(f"lost the connection to {names}: {reason}")

    def tell_failure(self, error: BaseException) -> None:
        """Tell the other ranks of this rank's own error; the first one told stands."""
        if isinstance(error, PeerError):
            return
        name, message = self.roles.name(self.roles.rank), str(error)
        if not isinstance(error, DraftsmithError):
            message = f"{type(error).__name__}: {message}"
        text = message if message.startswith(name) else f"{name} failed: {message}"
        try:
            self.store.compare_set("failed", "", text)
        except dist.DistError:
            return  # the store went first: nobody is left to tell

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.tell_failure(error)
        elif dist.is_initialized():
            dist.destroy_process_group()


@dataclass(slots=True)
class Signalled:
    """A signal and what came of it; `requested` is all that a handler sets."""

    requested: bool = False
    asked: bool = False
    heard_at: float | None = field(default=None)

    def request(self) -> None:
        self.requested = True


def _group(ranks: list[int], timeout: timedelta, backend: str) -> dist.ProcessGroup | None:
    """A group of some ranks; None where this rank isn't among them (and for torch: all ranks)."""
    group: Any = dist.new_group(ranks, timeout=timeout, backend=backend)
    return group if isinstance(group, dist.ProcessGroup) else None


def join_world(config: PipelineConfig, choose: Chooser, *, reads_features: bool = False) -> World | None:
    """Join the ranks that torchrun started; None for a run in one process.

    Args:
        config: the roles asked for, and how long to wait.
        choose: asked by the first rank where the roles are left open.
        reads_features: whether features come from disk, so that no rank runs a target.

    Raises:
        ConfigError: --channel distributed without torchrun, or ranks that don't match the roles.
        PeerError: the first rank couldn't choose.
    """
    launch = Launch.read()
    if config.channel == "local" or (config.channel == "auto" and launch is None):
        return None
    if launch is None:
        raise ConfigError(
            "--channel distributed needs torchrun: torchrun --nproc-per-node N -m draftsmith train ..., one rank per "
            "worker, 2 or more"
        )
    timeout = timedelta(seconds=config.stall_seconds)
    meet = cast(Callable[..., Iterator[Any]], rendezvous)
    found: Store = next(meet("env://", rank=launch.rank, world_size=launch.size, timeout=timeout))[0]
    store = PrefixStore(f"draftsmith/{launch.restarts}", found)
    if reads_features or config.colocate:
        roles = roles_without_targets(config, launch, "disk" if reads_features else "joint")
    else:
        roles = assign_roles(agree_on_shares(config, launch, store, choose), launch)
    world = World(roles, launch, config, store)
    world.connect()
    return world
