"""Building a team: rings where they belong, equal starts, names, ends shared where they are there already."""

from __future__ import annotations

import pytest
import torch

from draftsmith.errors import ConfigError
from draftsmith.pipeline.assemble import build_drafters, build_rings, ends_on
from draftsmith.records import FrozenEnds
from tests.families import tiny_target
from tests.pipeline.tiny import CPU, FAMILY, SHAPE, Sizes, blueprint, no_step, targets_of, team_of


def test_a_ring_per_drafter_with_the_slots_asked_for() -> None:
    said: list[str] = []
    plan = blueprint(Sizes(drafters=2, slots=3), tiny_target(FAMILY))
    object.__setattr__(plan, "say", said.append)
    rings = build_rings(plan)
    assert [ring.place.name for ring in rings] == ["the ring of drafter 0", "the ring of drafter 1"]
    assert [ring.num_bytes for ring in rings] == [3 * SHAPE.num_bytes] * 2
    assert said[0].startswith("the ring of drafter 0: 3 x 0.00 GB on cpu")
    assert not any(ring.place.pin for ring in rings)


def test_joint_roles_need_one_slot() -> None:
    (ring,) = build_rings(blueprint(Sizes(slots=3, joint=True), tiny_target(FAMILY)))
    assert ring.place.num_slots == 1


def test_drafters_start_equal_and_apart() -> None:
    plan = blueprint(Sizes(drafters=2), tiny_target(FAMILY))
    loops, streams = build_drafters(plan, build_rings(plan), no_step)
    one, other = (loop.stepper.state.parameters.master_N for loop in loops)
    assert torch.equal(one, other)
    assert one.data_ptr() != other.data_ptr()
    assert streams == [None, None]
    assert [loop.clock.name for loop in loops] == ["drafter 0", "drafter 1"]


def test_only_the_first_drafter_tells() -> None:
    told: list[int] = []
    plan = blueprint(Sizes(drafters=2), tiny_target(FAMILY))
    loops, _ = build_drafters(plan, build_rings(plan), lambda step, _last: told.append(step))
    loops[1]._after_step(1, False)
    loops[0]._after_step(2, False)
    assert told == [2]


def test_sizes_that_do_not_fit_are_refused_before_anything_is_built() -> None:
    plan = blueprint(Sizes(), tiny_target(FAMILY))
    object.__setattr__(plan.state.step, "num_anchors", SHAPE.num_tokens + 1)
    with pytest.raises(ConfigError, match="--anchors 97"):
        build_drafters(plan, build_rings(plan), no_step)


@pytest.mark.parametrize(
    ("sizes", "names", "chief"),
    [
        (Sizes(targets=2, drafters=1), ["target 0", "target 1", "drafter 0"], "drafter 0"),
        (Sizes(targets=2, drafters=2, joint=True), ["worker 0", "worker 1"], "worker 0"),
    ],
)
def test_workers(sizes: Sizes, names: list[str], chief: str) -> None:
    models = targets_of(sizes.targets)
    team = team_of(blueprint(sizes, models[0]), models)
    assert [worker.name for worker in team.workers()] == names
    assert team.chief_worker == chief
    team.close()
    assert not any(layer._forward_hooks for model in models for layer in model.layers)


def test_ends_are_shared_where_they_lie_already_and_tied_ends_stay_tied() -> None:
    weight = torch.randn(8, 4)
    tied = ends_on(FrozenEnds(embedding_VH=weight, head_VH=weight, logit_scale=0.5), CPU, torch.float32)
    assert tied.embedding_VH is weight
    assert tied.head_VH is weight
    assert tied.logit_scale == 0.5
    half = ends_on(FrozenEnds(embedding_VH=weight, head_VH=weight), CPU, torch.bfloat16)
    assert half.head_VH is half.embedding_VH
    apart = FrozenEnds(embedding_VH=weight, head_VH=weight.clone(), head_bias_V=torch.ones(8))
    moved = ends_on(apart, CPU, torch.bfloat16)
    assert moved.head_VH is not moved.embedding_VH
    assert moved.head_bias_V is not None
    assert moved.head_bias_V.dtype == torch.bfloat16
