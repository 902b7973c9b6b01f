"""TargetForwardLoop: what lies in a ring slot is what the target computes for that number, and who gets it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from draftsmith.errors import TargetError
from draftsmith.pipeline.assemble import build_rings
from draftsmith.pipeline.target_loop import TargetForwardLoop
from draftsmith.target.capture import PackedCapture
from tests.families import fresh_target, tiny_target
from tests.pipeline.tiny import FAMILY, SHAPE, TAPS, Sizes, blueprint, documents, order


def test_each_number_goes_to_its_drafters_ring_with_its_own_features() -> None:
    target = fresh_target(FAMILY)
    rings = build_rings(blueprint(Sizes(drafters=2, slots=3), target))
    loop = TargetForwardLoop("target 0", [PackedCapture(target, TAPS, SHAPE)], order(), documents(), rings)
    for number in range(4):
        loop.produce(number)
    assert [ring.depth for ring in rings] == [2, 2]
    with PackedCapture(tiny_target(FAMILY), TAPS, SHAPE) as reference:
        for number in range(4):
            expected = reference.run(order().batch(number), documents())
            slot = rings[number % 2].receive(number // 2)
            for name, tensor in slot.batch.tensors().items():
                assert torch.equal(tensor, expected.tensors()[name]), (number, name)
    used = sum(documents()[d].length for n in range(4) for d in order().batch(n).documents)
    assert loop.clock.tokens == used
    assert loop.clock.padded_tokens >= used
    loop.close()
    assert not any(layer._forward_hooks for layer in target.layers)


def test_two_staging_sets_take_turns_and_give_the_same() -> None:
    target = fresh_target(FAMILY)
    (ring,) = build_rings(blueprint(Sizes(slots=3), target))
    stagings = [PackedCapture(target, TAPS, SHAPE) for _ in range(2)]
    loop = TargetForwardLoop("target 0", stagings, order(), documents(), [ring])
    for number in range(3):
        loop.produce(number)
    assert int(stagings[0].batch.num_tokens) == int(ring.receive(2).batch.num_tokens)
    assert torch.equal(stagings[1].batch.features_TFH, ring.receive(1).batch.features_TFH)
    loop.close()


def test_a_broken_target_is_found_on_the_first_batch_of_a_run() -> None:
    target = fresh_target(FAMILY)
    (ring,) = build_rings(blueprint(Sizes(), target))
    with torch.no_grad():
        next(target.layers[TAPS[0]].parameters()).fill_(float("nan"))
    loop = TargetForwardLoop("target 0", [PackedCapture(target, TAPS, SHAPE)], order(), documents(), [ring])
    with pytest.raises(TargetError, match="non-finite"):
        loop.produce(0)
    assert ring.depth == 0
    loop.close()


def test_time_spent_waiting_for_room_is_counted() -> None:
    target = fresh_target(FAMILY)
    (ring,) = build_rings(blueprint(Sizes(slots=1), target))
    loop = TargetForwardLoop("target 0", [PackedCapture(target, TAPS, SHAPE)], order(), documents(), [ring])
    loop.produce(0)
    served: list[float] = []

    def serve() -> None:
        """Requests are served while the loop waits: only then does the time start after which there is room."""
        served.append(time.monotonic())
        threading.Timer(0.6, lambda: ring.release(0)).start()

    loop.requests.append(serve)
    loop.produce(1)
    assert loop.clock.waiting_room >= 0.6
    assert len(served) == 1
    loop.close()
