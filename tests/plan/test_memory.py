from __future__ import annotations

from dataclasses import replace

import pytest

from draftsmith.plan.hardware import parse_hardware
from draftsmith.plan.memory import (
    RoleMemory,
    activation_bytes,
    chunk_bytes,
    drafter_memory,
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


def test_activations_by_hand(tiny: Job) -> None:
    per_row = 4 * 4 + 3 * 4 + 2 * 2 + 3 * 8  # a layer
    rows = 12 * (per_row * 2 + 3 * 4)
    context = 32 * (5 * 2 * 2 + 3 * 4)
    assert activation_bytes(tiny) == 2 * (rows + context + drafter_parameters(tiny.drafter))


def test_the_logits_chunk_holds_whole_blocks(tiny: Job) -> None:
    assert chunk_bytes(replace(tiny, chunk_rows=10)) == 8 * 16 * 10
    assert chunk_bytes(replace(tiny, chunk_rows=10, shape=replace(tiny.shape, last_hidden=True))) == 2 * 8 * 16 * 10


def test_the_reference_holds_what_was_measured(reference: Job) -> None:
    memory = drafter_memory(reference, ring_here=True)
    found = by_name(memory)
    pool = found["activations"] + found["logits chunk"] + found["pool slack"]
    assert 29e9 < pool < 32e9
    standing = memory.total - pool - found["CUDA context"]
    assert standing == pytest.approx(43.9e9, rel=0.01)
    assert memory.total - found["CUDA context"] == pytest.approx(72.9e9, rel=0.05)


def test_double_anchors_take_what_the_prototype_took(reference: Job) -> None:
    # Held out from calibration: 57.5 GB against 41.8 of an earlier implementation.
    more = activation_bytes(replace(reference, num_anchors=2048)) - activation_bytes(reference)
    assert more == pytest.approx(57.5e9 - 41.8e9, rel=0.15)


def test_recomputing_layers_keeps_one_layers_activations(reference: Job) -> None:
    light = replace(reference, checkpoint_layers=True)
    assert activation_bytes(light) < 0.5 * activation_bytes(reference)


def test_a_targets_buffers_by_hand(tiny: Job) -> None:
    found = by_name(target_memory(tiny))
    assert found["target weights"] == 2 * (10_000 + 2 * 16 * 4)
    assert found["staging"] == 2 * (32 * 49 + 40)
    assert by_name(target_memory(replace(tiny, fp8=True)))["target weights"] == 10_000 + 2 * 2 * 16 * 4
    assert found["forward"] == 8 * (4 * 4 + 2 * (2 * 2 + 2 * 1 * 2) + 3 * 8) * 2


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
