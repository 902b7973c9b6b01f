"""Loss curves of 20 real steps, kept in tests/golden: a change that moves them is a change of the method.

`python -m tests.train.test_golden` writes them anew, after a change that is meant to move them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftsmith.drafter.objectives import LossConfig
from draftsmith.train.optim import OptimConfig
from tests.train.tiny import Tiny, tiny_batch, train

GOLDEN = Path(__file__).parents[1] / "golden" / "step.json"
STEPS = 20
TOLERANCE = 1e-4
"""Relative. Processors differ in the last bits; inputs off by 1e-6 move the curves by less than 1e-5 (tested below)."""

OPTIM = OptimConfig(lr=1e-3, warmup=0.2, weight_decay=0.01)
RECIPES = {
    "ce, dpace, wsd": Tiny(total_steps=STEPS, optim=OPTIM, loss=LossConfig(chunk_rows=64)),
    "lk, decay, fused": Tiny(
        total_steps=STEPS, optim=OPTIM, loss=LossConfig(loss="lk", weights="decay", chunk_rows=64)
    ),
    "kl, dpace, recomputed": Tiny(
        total_steps=STEPS, optim=OPTIM, loss=LossConfig(loss="kl", loss_method="recompute", chunk_rows=64)
    ),
}


def curve(recipe: str, jitter: float = 0.0) -> list[float]:
    batch = tiny_batch()
    batch.features_TFH.mul_(1 + jitter * torch.randn(batch.features_TFH.shape))
    return train(RECIPES[recipe].build(), batch, STEPS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_curve_is_the_one_kept(recipe: str) -> None:
    kept = json.loads(GOLDEN.read_text())[recipe]
    assert curve(recipe) == pytest.approx(kept, rel=TOLERANCE)


def test_a_run_is_a_function_of_its_seed_bit_for_bit() -> None:
    assert curve("ce, dpace, wsd") == curve("ce, dpace, wsd")


def test_the_tolerance_is_far_above_rounding_and_far_below_the_fall() -> None:
    exact, jittered = curve("ce, dpace, wsd"), curve("ce, dpace, wsd", 1e-6)
    assert jittered == pytest.approx(exact, rel=TOLERANCE / 10)
    assert exact[-1] < exact[0] * (1 - 100 * TOLERANCE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    GOLDEN.write_text(json.dumps({recipe: curve(recipe) for recipe in RECIPES}, indent=1) + "\n")
