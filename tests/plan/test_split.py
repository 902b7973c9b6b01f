from __future__ import annotations

from dataclasses import replace

import pytest

from draftsmith.plan.hardware import parse_hardware
from draftsmith.plan.split import (
    all_splits,
    best_card_use,
    evaluate_disk,
    evaluate_joint,
    evaluate_split,
    network,
    peak_memory,
    reduce_seconds,
)
from draftsmith.plan.workload import Job, drafter_parameters, drafter_rate, target_rate


def test_a_split_goes_as_fast_as_its_slower_side(reference: Job) -> None:
    hardware = parse_hardware("7xh200")
    split = evaluate_split(reference, hardware, 5, 2)
    produced = 5 * target_rate(reference, hardware.card)
    consumed = 2 * drafter_rate(reference, hardware.card, reduce_seconds(reference, hardware, 2))
    assert split.rate == min(produced, consumed)
    assert max(split.idle_targets, split.idle_drafters) == pytest.approx(1 - split.rate / max(produced, consumed))
    assert min(split.idle_targets, split.idle_drafters) == 0


def test_gradients_are_averaged_over_a_ring(tiny: Job) -> None:
    size = 4 * drafter_parameters(tiny.drafter)
    assert reduce_seconds(tiny, parse_hardware("8xh100"), 1) == 0
    assert reduce_seconds(tiny, parse_hardware("8xh100"), 4) == pytest.approx(2 * 3 / 4 * size / 300e9)
    assert reduce_seconds(tiny, parse_hardware("7x96GB"), 2) == pytest.approx(size / 35e9)
    across = parse_hardware("2xh100", hosts=4, link_gbps=100)
    assert reduce_seconds(tiny, across, 4) == pytest.approx(1.5 * size / 12.5e9)


def test_averaging_6_9_gb_over_pcie_takes_what_was_measured(reference: Job) -> None:
    assert 0.14 < reduce_seconds(reference, parse_hardware("7x96GB"), 2) < 0.28


def test_taking_turns_adds_times(tiny: Job) -> None:
    hardware = parse_hardware("h200")
    split = evaluate_joint(tiny, hardware)
    a, b = target_rate(tiny, hardware.card), drafter_rate(tiny, hardware.card)
    assert split.rate == pytest.approx(a * b / (a + b))
    assert (split.idle_targets, split.idle_drafters) == (0, 0)


def test_splits_are_ordered_by_fit_then_rate(reference: Job) -> None:
    hardware = parse_hardware("4xh200")
    splits = all_splits(reference, hardware)
    assert len(splits) == 4
    assert [split.rate for split in splits] == sorted((split.rate for split in splits), reverse=True)
    small = replace(
        hardware, card=replace(hardware.card, memory=evaluate_joint(reference, hardware).memory[0].total - 1)
    )
    assert all_splits(reference, small)[-1].joint
    assert not all_splits(reference, small)[-1].fits


def test_one_gpu_takes_turns_and_several_may_on_any_number_of_hosts(tiny: Job) -> None:
    assert [split.joint for split in all_splits(tiny, parse_hardware("h200"))] == [True]
    assert sum(split.joint for split in all_splits(tiny, parse_hardware("2xh200", hosts=2))) == 1


def test_rings_lie_with_the_drafter_only_where_targets_reach_it(tiny: Job) -> None:
    def names(text: str) -> set[str]:
        return {buffer.name for buffer in evaluate_split(tiny, parse_hardware(text), 1, 1).memory[1].buffers}

    assert "ring" in names("2xh100")
    assert "ring" not in names("2xrtx4090")


def test_one_host_sends_nothing(tiny: Job) -> None:
    crossing = network(tiny, parse_hardware("7xh100"), 5, 2)
    assert (crossing.share, crossing.limit) == (0, float("inf"))
    assert crossing.bytes_per_token == pytest.approx((32 * 49 + 40) / 16)


def test_the_busiest_link_by_hand(tiny: Job) -> None:
    # Two hosts of 8, 11 targets and 5 drafters: all drafters are on host 1 beside 3 targets; 8 of 11 tokens come in.
    hardware = parse_hardware("8xh100", hosts=2, link_gbps=400)
    crossing = network(tiny, hardware, 11, 5)
    assert crossing.share == pytest.approx(8 / 11)
    assert crossing.busiest in ("what host 0 sends", "what host 1 receives")
    assert crossing.limit == pytest.approx(50e9 / (8 / 11 * crossing.bytes_per_token))


def test_a_slow_link_limits_the_rate(tiny: Job) -> None:
    hardware = parse_hardware("8xh100", hosts=2, link_gbps=1e-3)
    split = evaluate_split(tiny, hardware, 11, 5)
    assert split.rate == network(tiny, hardware, 11, 5).limit


def test_the_fullest_role_counts(tiny: Job) -> None:
    hardware = parse_hardware("2xh200")
    split = evaluate_split(tiny, hardware, 1, 1)
    assert peak_memory(split) == max(role.total for role in split.memory)
    assert best_card_use(split, hardware.card) == pytest.approx(peak_memory(split) / hardware.card.memory)


def test_features_from_disk_need_no_target(tiny: Job) -> None:
    hardware = parse_hardware("2xrtx4090")
    split = evaluate_disk(tiny, hardware)
    assert split.rate == 2 * drafter_rate(tiny, hardware.card, reduce_seconds(tiny, hardware, 2))
    assert (split.idle_targets, split.idle_drafters) == (0, 0)
    names = {buffer.name for role in split.memory for buffer in role.buffers}
    assert "target weights" not in names
    assert "ring" not in names
    assert split.describe() == "2 drafter, features from disk"
    assert split.short() == "2D"


def test_splits_have_names(tiny: Job) -> None:
    hardware = parse_hardware("7xh100")
    assert evaluate_split(tiny, hardware, 5, 2).short() == "5T 2D"
    assert evaluate_split(tiny, hardware, 5, 2).describe() == "5 target + 2 drafter"
    assert evaluate_joint(tiny, hardware).short() == "7 joint"
    assert evaluate_joint(tiny, hardware).describe() == "both roles on every GPU"
    assert evaluate_joint(tiny, parse_hardware("h100")).describe() == "both roles in turns"
