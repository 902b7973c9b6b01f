"""How ranks tell each other of ends, and a person's stop from a peer's death. Who is who: test_launch."""

from __future__ import annotations

import threading
import time

import pytest
from torch import distributed as dist

from draftsmith.errors import ConfigError, StalledError
from draftsmith.pipeline import world as world_module
from draftsmith.pipeline.launch import Feed, Hosts, Launch, PeerError, Roles, Shares
from draftsmith.pipeline.settings import PipelineConfig
from draftsmith.pipeline.stop import StoppedError
from draftsmith.pipeline.world import World, join_world

CONFIG = PipelineConfig(device="cpu", stall_seconds=30)


def worlds(num_targets: int, num_drafters: int, store: dist.Store | None = None, feed: Feed = "targets") -> list[World]:
    """The ranks of a run as they see each other, in one process and without connections."""
    shared = store or dist.HashStore()
    size = num_targets + num_drafters
    return [
        World(
            Roles(
                rank=rank,
                local_rank=rank,
                num_targets=num_targets,
                num_drafters=num_drafters,
                feed=feed,
                why="a rank each (torchrun)",
            ),
            Launch(rank=rank, local_rank=rank, size=size, local_size=size, restarts=0, run_id="none"),
            CONFIG,
            shared,
        )
        for rank in range(size)
    ]


def unasked(_hosts: Hosts) -> Shares:
    raise AssertionError("nothing is open")


def test_the_distributed_channel_needs_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert join_world(PipelineConfig(), unasked) is None
    with pytest.raises(ConfigError, match="--channel distributed needs torchrun"):
        join_world(PipelineConfig(channel="distributed"), unasked)


def test_a_local_channel_is_no_world_even_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert join_world(PipelineConfig(channel="local"), unasked) is None


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
