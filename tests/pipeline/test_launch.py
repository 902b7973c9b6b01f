"""Who is who under torchrun: what it says, roles given, left over, or chosen by the first rank for all."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import distributed as dist

from draftsmith.errors import ConfigError, StalledError
from draftsmith.pipeline import launch as launch_module
from draftsmith.pipeline.launch import (
    SHARES,
    Hosts,
    Launch,
    PeerError,
    Shares,
    agree_on_shares,
    assign_roles,
    device_of,
    roles_without_targets,
)
from draftsmith.pipeline.settings import PipelineConfig

CHOSEN = Shares(targets=3, drafters=1, why="auto: by rates", remarks=("targets would idle 20%",))


def launch_of(rank: int, size: int, local_size: int = 0) -> Launch:
    return Launch(rank=rank, local_rank=rank, size=size, local_size=local_size or size, restarts=0, run_id="none")


def unasked(_hosts: Hosts) -> Shares:
    raise AssertionError("nothing is open")


def agreed(options: dict[str, Any], size: int) -> Shares:
    return agree_on_shares(PipelineConfig(**options), launch_of(1, size), dist.HashStore(), unasked)


@pytest.mark.parametrize(
    ("options", "size", "split"),
    [
        ({"targets": 5}, 8, (5, 3)),
        ({"drafters": 2}, 3, (1, 2)),
        ({"targets": 5, "drafters": 2}, 7, (5, 2)),
    ],
)
def test_roles_by_rank(options: dict[str, Any], size: int, split: tuple[int, int]) -> None:
    roles = [assign_roles(agreed(options, size), launch_of(rank, size)) for rank in range(size)]
    assert (roles[0].num_targets, roles[0].num_drafters) == split
    assert [r.is_target for r in roles] == [True] * split[0] + [False] * split[1]
    assert [r.index for r in roles] == [*range(split[0]), *range(split[1])]
    assert [r.rank for r in roles if r.is_chief] == [split[0]]
    assert roles[0].name(size - 1) == f"drafter {split[1] - 1}"
    assert "torchrun" in roles[0].why


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"targets": 5, "drafters": 2}, 8, r"torchrun started 8 ranks, which is not 5 target\(s\) \+ 2 drafter\(s\)"),
        ({"targets": 4}, 4, "set --targets and --drafters to match"),
        ({"drafters": 4}, 4, "set --targets and --drafters to match"),
    ],
)
def test_ranks_that_do_not_add_up(options: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_roles(agreed(options, size), launch_of(0, size))


def test_the_first_rank_chooses_for_all() -> None:
    store, asked = dist.HashStore(), list[Hosts]()
    heard: dict[int, Shares] = {}
    config = PipelineConfig(device="cpu")

    def choose(hosts: Hosts) -> Shares:
        asked.append(hosts)
        return CHOSEN

    def rank(number: int) -> None:
        heard[number] = agree_on_shares(config, launch_of(number, 4, 2), store, choose if number == 0 else unasked)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (3, 2, 1)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert heard == {}
    rank(0)
    for thread in threads:
        thread.join(5)
    assert heard == dict.fromkeys(range(4), CHOSEN)
    assert asked == [Hosts(per_host=2, count=2, device=torch.device("cpu"))]
    roles = assign_roles(CHOSEN, launch_of(3, 4))
    assert (roles.why, roles.remarks) == ("auto: by rates, a rank each (torchrun)", CHOSEN.remarks)


def test_hosts_that_differ_are_taken_for_one() -> None:
    asked: list[Hosts] = []

    def choose(hosts: Hosts) -> Shares:
        asked.append(hosts)
        return CHOSEN

    agree_on_shares(PipelineConfig(device="cpu"), launch_of(0, 5, 2), dist.HashStore(), choose)
    assert (asked[0].per_host, asked[0].count) == (5, 1)


def test_a_choice_that_fails_is_told_to_all() -> None:
    store = dist.HashStore()

    def choose(_hosts: Hosts) -> Shares:
        raise ConfigError("no such target")

    config = PipelineConfig(device="cpu")
    with pytest.raises(ConfigError, match="no such target"):
        agree_on_shares(config, launch_of(0, 4), store, choose)
    with pytest.raises(PeerError, match="rank 0 couldn't choose the roles: no such target") as caught:
        agree_on_shares(config, launch_of(2, 4), store, unasked)
    assert caught.value.is_told


def test_waiting_for_a_choice_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "LONG_SECONDS", 0.1)
    store = dist.HashStore()
    with pytest.raises(StalledError, match="rank 2 waited over 0 s for rank 0 to choose the roles"):
        agree_on_shares(PipelineConfig(), launch_of(2, 4), store, unasked)
    assert not store.check([SHARES])


@pytest.mark.parametrize(("options", "feed"), [({"colocate": True}, "joint"), ({}, "disk"), ({"drafters": 3}, "disk")])
def test_without_target_ranks_every_rank_trains(options: dict[str, Any], feed: Any) -> None:
    roles = [roles_without_targets(PipelineConfig(**options), launch_of(rank, 3), feed) for rank in range(3)]
    assert [(r.num_targets, r.num_drafters, r.feed) for r in roles] == [(0, 3, feed)] * 3
    assert not any(r.is_target for r in roles)
    assert [r.index for r in roles] == [0, 1, 2]
    assert [r.is_chief for r in roles] == [True, False, False]
    assert roles[0].name(2) == "drafter 2"


@pytest.mark.parametrize("options", [{"targets": 1}, {"drafters": 2}, {"targets": 1, "drafters": 2}])
def test_features_need_no_target_ranks(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="with --features every one of the 3 ranks trains: drop --targets"):
        roles_without_targets(PipelineConfig(**options), launch_of(0, 3), "disk")


def test_launch_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
    )
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert Launch.read() is None
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Launch.read() is None, "one rank is a run in one process"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert Launch.read() == Launch(rank=3, local_rank=1, size=8, local_size=2, restarts=2, run_id="none")


def test_a_rank_works_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(PipelineConfig(), 3) == torch.device("cuda", 3)
    assert device_of(PipelineConfig(device="cpu"), 3) == torch.device("cpu")
