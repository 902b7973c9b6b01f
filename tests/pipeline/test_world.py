"""Who is who under torchrun, and how ranks tell a person's stop from a peer's death."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch import distributed as dist

from draftsmith.errors import ConfigError, StalledError
from draftsmith.pipeline import world as world_module
from draftsmith.pipeline.settings import PipelineConfig
from draftsmith.pipeline.stop import StoppedError
from draftsmith.pipeline.world import Feed, Launch, PeerError, Roles, World, assign_roles, join_world

CONFIG = PipelineConfig(device="cpu", stall_seconds=30)


def worlds(num_targets: int, num_drafters: int, store: dist.Store | None = None, feed: Feed = "targets") -> list[World]:
    """The ranks of a run as they see each other, in one process and without connections."""
    shared = store or dist.HashStore()
    size = num_targets + num_drafters
    return [
        World(
            Roles(rank=rank, local_rank=rank, num_targets=num_targets, num_drafters=num_drafters, feed=feed),
            Launch(rank=rank, local_rank=rank, size=size, restarts=0, run_id="none"),
            CONFIG,
            shared,
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("options", "size", "split"),
    [
        ({}, 2, (1, 1)),
        ({}, 7, (5, 2)),
        ({}, 8, (6, 2)),
        ({"targets": 5}, 8, (5, 3)),
        ({"drafters": 2}, 3, (1, 2)),
        ({"targets": 5, "drafters": 2}, 7, (5, 2)),
    ],
)
def test_roles_by_rank(options: dict[str, Any], size: int, split: tuple[int, int]) -> None:
    roles = [assign_roles(PipelineConfig(**options), rank, rank, size) for rank in range(size)]
    assert (roles[0].num_targets, roles[0].num_drafters) == split
    assert [r.is_target for r in roles] == [True] * split[0] + [False] * split[1]
    assert [r.index for r in roles] == [*range(split[0]), *range(split[1])]
    assert [r.rank for r in roles if r.is_chief] == [split[0]]
    assert roles[0].name(size - 1) == f"drafter {split[1] - 1}"


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"targets": 5, "drafters": 2}, 8, r"torchrun started 8 ranks, which is not 5 target\(s\) \+ 2 drafter\(s\)"),
        ({"targets": 4}, 4, "set --targets and --drafters to match"),
    ],
)
def test_ranks_that_do_not_add_up(options: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_roles(PipelineConfig(**options), 0, 0, size)


@pytest.mark.parametrize(
    ("options", "reads_features", "feed"),
    [({"colocate": True}, False, "joint"), ({}, True, "disk"), ({"drafters": 3}, True, "disk")],
)
def test_without_target_ranks_every_rank_trains(options: dict[str, Any], reads_features: bool, feed: str) -> None:
    roles = [assign_roles(PipelineConfig(**options), rank, rank, 3, reads_features=reads_features) for rank in range(3)]
    assert [(r.num_targets, r.num_drafters, r.feed) for r in roles] == [(0, 3, feed)] * 3
    assert not any(r.is_target for r in roles)
    assert [r.index for r in roles] == [0, 1, 2]
    assert [r.is_chief for r in roles] == [True, False, False]
    assert roles[0].name(2) == "drafter 2"


@pytest.mark.parametrize("options", [{"targets": 1}, {"drafters": 2}, {"targets": 1, "drafters": 2}])
def test_features_need_no_target_ranks(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="with --features every one of the 3 ranks trains: drop --targets"):
        assign_roles(PipelineConfig(**options), 0, 0, 3, reads_features=True)


def test_launch_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert Launch.read() is None
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Launch.read() is None, "one rank is a run in one process"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert Launch.read() == Launch(rank=3, local_rank=1, size=8, restarts=2, run_id="none")
    assert join_world(PipelineConfig(channel="local")) is None


def test_the_distributed_channel_needs_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert join_world(PipelineConfig()) is None
    with pytest.raises(ConfigError, match="--channel distributed needs torchrun"):
        join_world(PipelineConfig(channel="distributed"))


def test_a_signal_to_one_rank_is_a_persons_stop_once_every_rank_has_answered() -> None:
    ranks = worlds(2, 2)
    ranks[1].signals.request()
    for world in ranks:
        world.look()
    assert not any(world.stop.requested for world in ranks), "before rank 1 asked, rank 0 had nothing to hear"
    for _ in range(2):
        for world in ranks:
            world.look()
    assert all(world.stop.requested for world in ranks)
    assert not any(world.stop.failed for world in ranks)


def test_a_signal_after_a_peers_death_is_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "ANSWER_SECONDS", 0.2)
    ranks = worlds(2, 2)
    alive = [ranks[0], ranks[2], ranks[3]]
    for world in alive:
        world.signals.request()
        world.look()
    time.sleep(0.3)
    for world in alive:
        world.look()
        assert world.stop.failed
        assert not world.stop.requested
        with pytest.raises(PeerError, match=r"^target 1 died \(no answer in 0.2 s\)") as caught:
            world.stop.raise_error()
        assert not caught.value.is_told


def test_a_ranks_own_error_reaches_the_others_under_its_name_and_the_first_stands() -> None:
    ranks = worlds(1, 2)
    ranks[0].stop.fail("target 0", ValueError("no such layer"))
    ranks[0].look()
    ranks[2].tell_failure(ValueError("later"))
    for world in ranks[1:]:
        world.look()
        with pytest.raises(PeerError, match=r"^target 0 failed: ValueError: no such layer$") as caught:
            world.stop.raise_error()
        assert caught.value.is_told


def test_leaving_with_an_error_tells_it_and_a_peers_error_is_not_told_again() -> None:
    ranks = worlds(1, 1)
    with pytest.raises(ValueError, match="broken"), ranks[1]:
        raise ValueError("broken")
    assert ranks[0].store.get("failed") == b"drafter 0 failed: ValueError: broken"
    fresh = worlds(1, 1)
    with pytest.raises(PeerError), fresh[0]:
        raise PeerError("drafter 0 died")
    assert not fresh[1].has("failed")
    with fresh[0]:
        pass


def test_waits_end_with_the_word_with_a_failure_or_with_their_limit() -> None:
    ranks = worlds(1, 1)
    threading.Timer(0.1, lambda: ranks[1].tell("claimed", "fresh")).start()
    assert ranks[0].wait("claimed", "the chief") == b"fresh"
    with pytest.raises(StalledError, match="target 0 waited over 0 s for the moon"):
        ranks[0].wait("moon", "the moon", limit=0.1)
    ranks[0].stop.fail("target 0", ValueError("x"))
    with pytest.raises(StoppedError):
        ranks[0].wait("moon", "the moon")
    ranks[0].tell_failure(ValueError("x"))
    with pytest.raises(PeerError, match="target 0 failed: ValueError: x"):
        ranks[1].wait("moon", "the moon")


def test_all_meet_or_none() -> None:
    ranks = worlds(1, 2)
    met: list[int] = []
    threads = [
        threading.Thread(target=lambda w=world: (w.meet("built"), met.append(w.roles.rank))) for world in ranks[:2]
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert met == []
    ranks[2].meet("built")
    for thread in threads:
        thread.join(5)
    assert sorted(met) == [0, 1]


def test_a_broken_connection_is_explained() -> None:
    ranks = worlds(1, 1)
    error = ranks[0].explain(RuntimeError("Connection closed by peer"), [1])
    assert str(error) == "lost the connection to drafter 0: its process died"
    slow = ranks[0].explain(RuntimeError("Timed out waiting 30000ms for recv"), [1])
    assert str(slow) == "lost the connection to drafter 0: stood still for over --stall-seconds 30"
    ranks[1].tell_failure(ValueError("out of memory"))
    assert str(ranks[0].explain(RuntimeError("closed"), [1])) == "drafter 0 failed: ValueError: out of memory"
