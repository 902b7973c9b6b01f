"""What torchrun started, and who does what: the roles of all ranks, told or chosen before any of them connects."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch.distributed import Store  # pyright: ignore

from draftsmith.errors import ConfigError, DraftsmithError, StalledError
from draftsmith.pipeline.settings import PipelineConfig

LONG_SECONDS = 12 * 3600.0
"""Limit of waits for another rank's preparation: data, compiling, an evaluation."""
SHARES = "shares"
"""Told by the first rank: the roles that it chose for all."""
Feed = Literal["targets", "disk", "joint"]
"""Where a drafter's batches come from: target ranks, shards on disk, or a target beside it in its own process."""


class PeerError(DraftsmithError, RuntimeError):
    """Another rank failed or died; the message says which. `is_told`: that rank says so itself on its own console."""

    def __init__(self, message: str, *, is_told: bool = False) -> None:
        super().__init__(message)
        self.is_told = is_told


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Who does what: targets first."""

    rank: int
    local_rank: int
    num_targets: int
    num_drafters: int
    feed: Feed = "targets"
    why: str
    """The reason of this split, and what a person should know of it."""
    remarks: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return self.num_targets + self.num_drafters

    @property
    def is_target(self) -> bool:
        return self.rank < self.num_targets

    @property
    def index(self) -> int:
        """Which of the targets, or of the drafters, this is."""
        return self.rank if self.is_target else self.rank - self.num_targets

    @property
    def is_chief(self) -> bool:
        """The first drafter: owns the folder, the log, the checkpoints and the display."""
        return self.rank == self.num_targets

    def name(self, rank: int) -> str:
        return f"target {rank}" if rank < self.num_targets else f"drafter {rank - self.num_targets}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What torchrun tells each process."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    """Ranks of this host."""
    restarts: int
    run_id: str
    """torchrun's --rdzv-id; "none" or random where none was given."""

    @classmethod
    def read(cls) -> Launch | None:
        """From torchrun's variables; None in a process that it didn't start, or started alone."""
        if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return None
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            size=int(os.environ["WORLD_SIZE"]),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            run_id=os.environ.get("TORCHELASTIC_RUN_ID", "none"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The machines of a run: equal hosts, and the device of the process that asks."""

    per_host: int
    """Workers of each."""
    count: int
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How many ranks each role gets."""

    targets: int
    drafters: int
    why: str
    remarks: tuple[str, ...] = ()


def assign_roles(shares: Shares, launch: Launch) -> Roles:
    """Targets first.

    Raises:
        ConfigError: the numbers don't add up to the ranks that torchrun started, or a role is missing.
    """
    targets, drafters = shares.targets, shares.drafters
    if targets + drafters != launch.size or targets < 1 or drafters < 1:
        raise ConfigError(
            f"torchrun started {launch.size} ranks, which is not {targets} target(s) + {drafters} drafter(s): start "
            f"--nnodes x --nproc-per-node = targets + drafters ranks, or set --targets and --drafters to match"
        )
    return Roles(
        rank=launch.rank,
        local_rank=launch.local_rank,
        num_targets=targets,
        num_drafters=drafters,
        why=f"{shares.why}, a rank each (torchrun)",
        remarks=shares.remarks,
    )


def roles_without_targets(config: PipelineConfig, launch: Launch, feed: Literal["disk", "joint"]) -> Roles:
    """Every rank trains.

    Raises:
        ConfigError: other numbers are asked for.
    """
    if config.targets != "auto" or config.drafters not in ("auto", launch.size):
        raise ConfigError(
            f"with --features every one of the {launch.size} ranks trains: drop --targets, and --drafters or set it to "
            f"{launch.size}"
        )
    why = {"disk": "features come from disk, a rank each (torchrun)", "joint": "--colocate, a rank each (torchrun)"}
    return Roles(
        rank=launch.rank,
        local_rank=launch.local_rank,
        num_targets=0,
        num_drafters=launch.size,
        feed=feed,
        why=why[feed],
    )


def device_of(config: PipelineConfig, local_rank: int) -> torch.device:
    """Where a rank works."""
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")


Chooser = Callable[[Hosts], Shares]
"""Chooses the roles of all ranks."""


def agree_on_shares(config: PipelineConfig, launch: Launch, store: Store, choose: Chooser) -> Shares:
    """How many ranks each role gets: as asked, what the other role leaves, or as the first rank chooses.

    Raises:
        PeerError: at the other ranks, that the first rank couldn't choose.
        StalledError: it took too long.
    """
    targets, drafters = config.targets, config.drafters
    if targets != "auto" or drafters != "auto":
        if targets == "auto":
            assert drafters != "auto"
            targets = launch.size - drafters
        return Shares(targets=targets, drafters=launch.size - targets if drafters == "auto" else drafters, why="given")
    if launch.rank == 0:
        return _choose_for_all(config, launch, store, choose)
    started = time.monotonic()
    for pause in pauses():
        if store.check([SHARES]):
            break
        if time.monotonic() - started > LONG_SECONDS:
            raise StalledError(f"rank {launch.rank} waited over {LONG_SECONDS:.0f} s for rank 0 to choose the roles")
        time.sleep(pause)
    told: dict[str, Any] = json.loads(store.get(SHARES))
    if "failed" in told:
        raise PeerError(f"rank 0 couldn't choose the roles: {told['failed']}", is_told=True)
    told["remarks"] = tuple(told["remarks"])
    return Shares(**told)


def _choose_for_all(config: PipelineConfig, launch: Launch, store: Store, choose: Chooser) -> Shares:
    """At the first rank: choose, and tell the others, also that it failed."""
    are_equal = launch.size % launch.local_size == 0
    per_host = launch.local_size if are_equal else launch.size
    try:
        shares = choose(
            Hosts(per_host=per_host, count=launch.size // per_host, device=device_of(config, launch.local_rank))
        )
    except Exception as error:
        store.set(SHARES, json.dumps({"failed": str(error)}))
        raise
    store.set(SHARES, json.dumps(asdict(shares)))
    return shares


def pauses() -> Iterator[float]:
    """Seconds between two looks: short at first, 20 ms in the long run."""
    pause = 0.0005
    while True:
        yield pause
        pause = min(0.02, pause * 1.5)
