from __future__ import annotations

from dataclasses import replace

import pytest

from draftsmith.errors import ConfigError
from draftsmith.plan.hardware import parse_hardware
from draftsmith.plan.make import Asked, choose_split, make_plan
from draftsmith.plan.split import evaluate_joint
from draftsmith.plan.workload import Job


def test_an_open_plan_takes_the_fastest_split(reference: Job) -> None:
    plan = make_plan(reference, parse_hardware("7xh200"), Asked())
    assert plan.split == plan.fastest
    assert plan.hours == pytest.approx(3 * 1000 / plan.split.rate / 3600)
    assert plan.gpu_hours == pytest.approx(7 * plan.hours)
    assert plan.draw_ms == pytest.approx(476.5, rel=0.01)
    assert plan.store_bytes == pytest.approx(1000 / 49152 * reference.shape.num_bytes)


def test_what_is_asked_for_is_kept(reference: Job) -> None:
    hardware = parse_hardware("7xh200")
    assert (choose_split(reference, hardware, Asked(targets=5)).drafters) == 2
    assert (choose_split(reference, hardware, Asked(drafters=3)).targets) == 4
    assert choose_split(reference, hardware, Asked(joint=True)).joint
    with pytest.raises(
        ConfigError, match=r"6 targets and 2 drafters don't share 7 GPUs.*--targets auto --drafters auto"
    ):
        choose_split(reference, hardware, Asked(targets=6, drafters=2))


def test_changes_do_what_they_say(reference: Job) -> None:
    plan = make_plan(reference, parse_hardware("7xh200"), Asked(targets=5, drafters=2))
    changes = {change.name: change for change in plan.changes}
    assert set(changes) == {
        "twice the anchors",
        "half the anchors",
        "half the labels",
        "twice the labels",
        "--checkpoint-layers",
        "--target-compute fp8",
        "--colocate",
    }
    assert changes["half the labels"].split.rate > changes["twice the labels"].split.rate
    assert changes["half the labels"].density < reference.density < changes["twice the labels"].density
    assert changes["--colocate"].split.joint


def test_fp8_and_colocation_are_only_offered_where_they_work(reference: Job) -> None:
    names = {change.name for change in make_plan(reference, parse_hardware("4xa100"), Asked()).changes}
    assert "--target-compute fp8" not in names
    across = make_plan(reference, parse_hardware("4xh100", hosts=2), Asked(targets=6))
    assert "--colocate" in {change.name for change in across.changes}
    together = make_plan(reference, parse_hardware("4xh100", hosts=2), Asked(joint=True))
    assert "--colocate" not in {change.name for change in together.changes}
    assert together.crossing.limit == float("inf"), "only gradients travel"


def test_remarks_name_idle_roles_memory_and_network(reference: Job) -> None:
    hardware = parse_hardware("7xh200")
    lopsided = make_plan(reference, hardware, Asked(targets=6, drafters=1))
    assert any(remark.startswith("targets would idle") for remark in lopsided.remarks())
    assert any("--colocate would be" in remark for remark in lopsided.remarks())
    small = make_plan(reference, parse_hardware("2x24GB"), Asked(targets=1, drafters=1))
    assert not small.fits
    assert "doesn't fit: a GPU for the drafter needs" in small.remarks()[0]
    assert small.remarks()[0].count("--checkpoint-layers") == 1
    slow = make_plan(reference, parse_hardware("8xh100", hosts=2, link_gbps=0.01), Asked())
    assert any(remark.startswith("the network is the limit") for remark in slow.remarks())
    tight = replace(hardware, card=replace(hardware.card, memory=round(1.01 * lopsided.split.memory[1].total)))
    assert any("fits within 5%" in remark for remark in make_plan(reference, tight, Asked(targets=6)).remarks())
    slow_target = replace(reference, target=replace(reference.target, layers=(10**12,) * 10))
    starved = make_plan(slow_target, hardware, Asked(targets=1, drafters=6))
    assert any(remark.startswith("drafters would idle") for remark in starved.remarks())


def test_a_slow_average_is_named(reference: Job) -> None:
    plan = make_plan(reference, parse_hardware("7x96GB"), Asked(targets=5, drafters=2))
    assert plan.reduce_share == pytest.approx(plan.reduce_ms / (plan.draw_ms + plan.reduce_ms))
    assert any("--accumulation" in remark for remark in plan.remarks())
    rarely = make_plan(replace(reference, accumulation=8), parse_hardware("7x96GB"), Asked(targets=5, drafters=2))
    assert not any("--accumulation" in remark for remark in rarely.remarks())


def test_features_from_disk_are_planned_without_a_target(reference: Job) -> None:
    plan = make_plan(reference, parse_hardware("2xh100"), Asked(from_disk=True))
    assert plan.split.from_disk
    assert plan.crossing.limit == float("inf")
    assert {change.split.from_disk for change in plan.changes} == {True}
    assert "--target-compute fp8" not in {change.name for change in plan.changes}


def test_half_and_twice_the_labels_are_of_the_draws_that_were_given(reference: Job) -> None:
    """Sixteen draws were asked for: half of them are eight, whatever --labels-per-token would have said."""
    job = replace(reference, draws=16)
    changes = {change.name: change for change in make_plan(job, parse_hardware("h200"), Asked()).changes}
    assert changes["half the labels"].density == pytest.approx(job.density / 2)
    assert changes["twice the labels"].density == pytest.approx(job.density * 2)
    once = make_plan(replace(reference, draws=1), parse_hardware("h200"), Asked())
    assert "half the labels" not in {change.name for change in once.changes}, "one draw is the least"


def test_other_anchors_get_the_draws_that_train_would_choose(reference: Job) -> None:
    """Where draws follow the labels, twice the anchors take the draws that come nearest to the same labels."""
    job = reference
    assert job.draws_per_batch == 3
    changes = {change.name: change for change in make_plan(job, parse_hardware("h200"), Asked()).changes}
    for name, times in (("twice the anchors", 2), ("half the anchors", 0.5)):
        train_would = replace(job, num_anchors=round(times * job.num_anchors))
        assert changes[name].density == train_would.density
    given = {
        change.name: change for change in make_plan(replace(job, draws=3), parse_hardware("h200"), Asked()).changes
    }
    assert given["half the anchors"].density == pytest.approx(replace(job, draws=3).density)


def test_a_faster_split_is_named_once_and_by_its_flags(reference: Job) -> None:
    hardware = parse_hardware("7xh200")
    both = evaluate_joint(reference, hardware).memory[0].total
    small = replace(hardware, card=replace(hardware.card, memory=both - 1))
    lopsided = make_plan(reference, small, Asked(targets=6, drafters=1))
    assert not lopsided.fastest.joint
    flags = f"--targets {lopsided.fastest.targets} --drafters {lopsided.fastest.drafters}"
    assert " ".join(lopsided.remarks()).count(flags) == 1
    assert not any("than what is asked for" in remark for remark in lopsided.remarks())
    equal = replace(reference, target=replace(reference.target, layers=(7 * 10**8,) * 10))
    balanced = make_plan(equal, hardware, Asked(targets=3, drafters=4))
    assert balanced.fastest.joint
    assert any("(--colocate) would be" in remark for remark in balanced.remarks())


def test_a_gpu_without_a_role_is_named(reference: Job) -> None:
    plan = make_plan(reference, parse_hardware("8xh200"), Asked(targets=5, drafters=2))
    assert any(remark.startswith("1 of 8 GPUs has no role") for remark in plan.remarks())
    two = make_plan(reference, parse_hardware("8xh200"), Asked(targets=4, drafters=2))
    assert any(remark.startswith("2 of 8 GPUs have no role") for remark in two.remarks())
    for asked in (Asked(targets=5), Asked(joint=True), Asked(from_disk=True), Asked()):
        assert not any("no role" in remark for remark in make_plan(reference, plan.hardware, asked).remarks())
