"""Padding changes the order in which a GPU sums, never what is summed: how far do runs drift apart by it?

The same documents and anchors, once in a budget that they fill and once in one twice as large, at the SmolLM2 shape.
Run with `-s` to see the figures.

Two long runs of one seed that sum in another order end about as far apart in loss as two seeds do, so one pair shows
nothing: of three equal runs each is the odd one out every third time. Hence both budgets run from several seeds, and
padding must neither throw a run out of the spread of seeds nor move their mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.common import SHAPES, Shape, documents, fill, make_state
from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.records import FeatureBatch
from draftsmith.train.graph import CapturedStep, StepInputs

DEVICE = torch.device("cuda", 0)
TOKENS, BATCHES = 8192, 8
SEEDS = range(6)
STUDENT_99 = 4.03
"""Student's t, 5 degrees of freedom, two-sided 99%: for the mean of six differences."""


@pytest.fixture
def own_stream() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


def learnable(batch: FeatureBatch, lengths: list[int], seed: int, directions: Tensor) -> None:
    """Documents whose next token can be read off the features, so that a run learns and drift has something to bend."""
    fill(batch, lengths, 4096, seed)
    following = torch.roll(batch.token_ids_T, -1)
    batch.features_TFH.mul_(0.5).add_(directions[following].to(batch.features_TFH.dtype))
    batch.features_TFH[sum(lengths) :] = 0


def run(shape: Shape, steps: int, seed: int) -> tuple[Tensor, list[float]]:
    """Weights after `steps` captured steps, and the loss of every hundredth (its mean since the one before)."""
    generator = torch.Generator("cuda").manual_seed(7)
    width = shape.batch.num_taps * shape.batch.hidden_size
    directions = torch.randn(4096, width, generator=generator, device=DEVICE)
    slots = [FeatureBatch.allocate(shape.batch, DEVICE) for _ in range(BATCHES)]
    for number, slot in enumerate(slots):
        learnable(slot, documents(TOKENS, 260, number), number, directions)
    state = make_state(shape, DEVICE, compiled=True, total_steps=steps)
    inputs = StepInputs.allocate(shape.batch, shape.drafter.block_size, DEVICE)
    stepper = CapturedStep(state, inputs, torch.cuda.current_stream())
    losses: list[float] = []
    for step in range(steps):
        inputs.batch.copy_(slots[step % BATCHES], non_blocking=True)
        inputs.uniforms_T[:TOKENS].copy_(draw_uniforms(seed, step, 0, TOKENS))
        stepper.accumulate()
        stepper.update()
        if step % 100 == 99:
            losses.append((inputs.totals[0] / inputs.totals[1]).item())
            inputs.totals.zero_()
    return state.parameters.master_N.clone(), losses


def apart(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def faults(exact: Sequence[float], padded: Sequence[float]) -> list[str]:
    """What speaks against padding, from the last losses of each seed in both budgets."""
    gaps = [b - a for a, b in zip(exact, padded, strict=True)]
    spread = max(exact) - min(exact)
    found = [f"seed {seed}: {gap:+.5f}, seeds span {spread:.5f}" for seed, gap in enumerate(gaps) if abs(gap) > spread]
    bound = STUDENT_99 * statistics.stdev(gaps) / len(gaps) ** 0.5
    if abs(statistics.mean(gaps)) > bound:
        found.append(f"{statistics.mean(gaps):+.5f} on average, where chance gives {bound:.5f}")
    return found


def test_a_fault_of_padding_would_be_seen() -> None:
    exact = [0.0110, 0.0113, 0.0117, 0.0112, 0.0115, 0.0111]
    assert not faults(exact, [0.0112, 0.0111, 0.0113, 0.0116, 0.0114, 0.0112])
    assert len(faults(exact, [0.0112, 0.0111, 0.0113, 0.0126, 0.0114, 0.0112])) == 1
    assert len(faults(exact, [value + 0.0004 + 0.0001 * turn for turn, value in enumerate(exact)])) >= 1
    assert len(faults(exact, [value + 0.01 + 0.0001 * turn for turn, value in enumerate(exact)])) == 7


@pytest.mark.gpu
@pytest.mark.usefixtures("own_stream")
def test_padding_drifts_no_further_than_another_seed() -> None:
    exact = replace(SHAPES["smollm2"], num_tokens=TOKENS, num_anchors=512)
    padded = replace(exact, num_tokens=2 * TOKENS)
    short, _ = run(exact, 200, seed=0)
    short_padded, _ = run(padded, 200, seed=0)
    print(f"\nafter 200 steps: weights {apart(short_padded, short):.2e} apart, padded against unpadded")
    runs = [run(exact, 2000, seed) for seed in SEEDS]
    runs_padded = [run(padded, 2000, seed) for seed in SEEDS]
    by_padding = [apart(one, other) for (one, _), (other, _) in zip(runs_padded, runs, strict=True)]
    by_seed = [apart(runs[seed][0], runs[0][0]) for seed in SEEDS if seed]
    print(f"after 2,000: {[f'{x:.2e}' for x in by_padding]}; another seed {[f'{x:.2e}' for x in by_seed]}")
    last, last_padded = [losses[-1] for _, losses in runs], [losses[-1] for _, losses in runs_padded]
    print(f"loss of the last 100: {[f'{x:.5f}' for x in last]}, padded {[f'{x:.5f}' for x in last_padded]}")
    assert all(losses[-1] < 0.8 * losses[0] for _, losses in runs), "nothing was learnt, so nothing is shown"
    assert max(by_padding) < min(by_seed)
    assert not faults(last, last_padded)
