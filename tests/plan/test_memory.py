from __future__ import annotations

from dataclasses import replace

from draftsmith.data.buckets import OrderConfig
from draftsmith.plan.hardware import parse_hardware
from draftsmith.plan.memory import (
    RoleMemory,
    drafter_memory,
    elements,
    joint_memory,
    target_memory,
)
from draftsmith.plan.workload import Job, drafter_parameters


def by_name(role: RoleMemory) -> dict[str, int]:
    return {buffer.name: buffer.bytes for buffer in role.buffers}


def test_a_drafters_buffers_by_hand(tiny: Job) -> None:
    found = by_name(drafter_memory(tiny, ring_here=True))
    count = drafter_parameters(tiny.drafter)
    assert found["masters"] == found["gradients"] == 4 * count
    assert (found["moments"], found["shadow"]) == (8 * count, 2 * count)
    assert found["embedding and head"] == 2 * 16 * 4 * 2
    batch = 32 * (5 * 4 * 2 + 8 + 1) + 4 * 8 + 8
    assert found["ring"] == 2 * batch
    assert found["graph input"] == batch + 32 * 4 + (4 + 3 * 4) * 8
    assert "ring" not in by_name(drafter_memory(tiny, ring_here=False))


def test_a_targets_buffers_by_hand(tiny: Job) -> None:
    found = by_name(target_memory(tiny))
    assert found["target weights"] == 2 * (10_000 + 2 * 16 * 4)
    assert found["staging"] == 2 * (32 * 49 + 40)
    assert by_name(target_memory(replace(tiny, fp8=True)))["target weights"] == 10_000 + 2 * 2 * 16 * 4
    assert found["forward"] == 32 // OrderConfig().forwards_per_batch * (4 * 4 + 2 * (2 * 2 + 2 * 1 * 2) + 3 * 8) * 2


def test_a_joint_gpu_shares_the_ends_and_holds_one_waiting_batch(tiny: Job) -> None:
    names = by_name(joint_memory(tiny))
    assert "embedding and head" not in names
    assert names["ring"] == 32 * 49 + 40
    assert {"target weights", "masters", "activations"} <= set(names)


def test_a_role_fits_up_to_the_cards_memory(tiny: Job) -> None:
    role = target_memory(tiny)
    card = replace(parse_hardware("h200").card, memory=role.total)
    assert role.fits(card)
    assert not role.fits(replace(card, memory=role.total - 1))


def test_the_logits_say_what_an_element_takes(tiny: Job) -> None:
    (chunk,) = [buffer for buffer in drafter_memory(tiny, ring_here=False).buffers if buffer.name == "logits chunk"]
    assert (chunk.bytes, chunk.why) == (9 * 16 * 2, "9 rows x 16 x 2 bytes")


def test_parameters_are_said_with_three_digits() -> None:
    assert [elements(count) for count in (26_895_998_464, 1_730_213_120, 134_515_008, 8_740_480, 712)] == [
        "26.9B",
        "1.73B",
        "135M",
        "8.74M",
        "712",
    ]
