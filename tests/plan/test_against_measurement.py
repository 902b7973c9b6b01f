"""The plan against `bench/step.py` on one H200: memory within 15%, speed within 20%, held-out shapes included."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.plan.hardware import parse_hardware
from draftsmith.plan.memory import drafter_memory
from draftsmith.plan.workload import Job, draw_flops, draw_seconds
from tests.plan.conftest import make_job

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SHAPES = {
    "qwen3.6-27b": make_job((5120, 17408, 5, 248320, 1024), (32, 8, 128), 16, 49152),
    "qwen3-8b": make_job((4096, 12288, 5, 151936, 512), (32, 8, 128), 16, 16384),
    "smollm2": make_job((576, 1536, 2, 49152, 1024), (9, 3, 64), 8, 16384),
}
"""As bench/common.py has them; constants of speed come from the first and last, of memory from the first alone."""


DISTILLED = replace(SHAPES["qwen3.6-27b"], shape=replace(SHAPES["qwen3.6-27b"].shape, last_hidden=True))
SHAPES |= {"qwen3.6-27b-kl": DISTILLED, "qwen3.6-27b-dense": replace(SHAPES["qwen3.6-27b"], num_anchors=3072)}


def measured(shape: str) -> tuple[dict[str, Any], float]:
    path = RESULTS / f"step-{shape}-h200.json"
    if not path.is_file():
        pytest.skip(f"{shape} was not measured")
    found = json.loads(path.read_text())
    return found["captured"], found["matrix_tflops"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draw_takes_as_long_as_foretold(shape: str) -> None:
    row, rate = measured(shape)
    job: Job = SHAPES[shape]
    card = replace(parse_hardware("h200").card, tflops=rate)
    assert draw_flops(job) == pytest.approx(row["tflops"] * row["ms"] * 1e9, rel=0.01)
    assert 1e3 * draw_seconds(job, card) == pytest.approx(row["ms"], rel=0.2)


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_as_foretold(shape: str) -> None:
    row, _ = measured(shape)
    memory = drafter_memory(SHAPES[shape], ring_here=True)  # the benchmark has two slots beside the input too
    found = {buffer.name: buffer.bytes for buffer in memory.buffers}
    pool = found["activations"] + found["logits chunk"] + found["pool slack"]
    reserved = memory.total - found["CUDA context"]
    assert reserved - pool == pytest.approx(1e9 * row["peak_gb"], rel=0.15)
    assert reserved == pytest.approx(1e9 * row["reserved_gb"], rel=0.15)
