"""A rank's numbers, clock and stand-ins. Whole ranks: test_distributed."""

from __future__ import annotations

import time

from torch import distributed as dist

from draftsmith.pipeline.buffers import WaitClock
from draftsmith.pipeline.ranks import Remote, Telling, numbers_of, placement_of
from tests.families import tiny_target
from tests.pipeline.test_world import worlds
from tests.pipeline.tiny import FAMILY, Sizes, blueprint


def test_targets_share_all_numbers_and_each_takes_its_own() -> None:
    plan = blueprint(Sizes(targets=2, drafters=2, draws=4, accumulation=2, steps=7), tiny_target(FAMILY))
    shares = [list(numbers_of(plan, index, 2, 0)) for index in range(2)]
    assert shares == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_resume_begins_with_the_batch_of_the_next_draw() -> None:
    """Step 3 of two draws each has done six draws: the second batch of each drafter is half used."""
    plan = blueprint(Sizes(targets=3, drafters=2, draws=4, accumulation=2, steps=7), tiny_target(FAMILY))
    assert sorted(n for index in range(3) for n in numbers_of(plan, index, 3, 3)) == [2, 3, 4, 5, 6, 7]
    assert list(numbers_of(plan, 0, 3, 3)) == [3, 6], "the numbers that it would have taken anyway"


def test_every_rank_sees_all_roles_on_its_own_device() -> None:
    placement = placement_of(worlds(2, 1)[0])
    assert [str(device) for device in placement.targets] == ["cpu", "cpu"]
    assert len(placement.drafters) == 1
    assert not placement.joint
    assert "torchrun" in placement.why


def test_ranks_without_targets_beside_them_read_or_do_both() -> None:
    disk, joint = (placement_of(worlds(0, 2, feed=feed)[1]) for feed in ("disk", "joint"))
    assert (len(disk.targets), len(disk.drafters), disk.joint) == (1, 2, False)
    assert (len(joint.targets), len(joint.drafters), joint.joint) == (2, 2, True)


def test_a_targets_clock_reaches_the_chiefs_log() -> None:
    store = dist.HashStore()
    target, chief = worlds(1, 1, store)
    clock = WaitClock("target 0")
    clock.started -= 10
    clock.waiting_room, clock.tokens, clock.padded_tokens = 4.0, 300, 400
    remote = Remote(chief, 0)
    remote.listen()
    assert remote.clock.tokens == 0
    telling = Telling(target, clock)
    telling.tell()
    clock.tokens = 999
    telling.tell()  # too soon
    time.sleep(0.01)
    remote.listen()
    assert remote.clock.name == "target 0"
    assert remote.clock.tokens == 300
    shares = remote.clock.shares()
    assert abs(shares["waiting_room"] - 0.4) < 0.02
    assert shares["padding"] == 0.25
