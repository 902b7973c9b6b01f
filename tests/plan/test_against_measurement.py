"""The plan against `bench/step.py` on one H200: memory within 15%, speed within 20%, held-out shapes included."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.plan.hardware import parse_hardware
from draftsmith.plan.memory import drafter_memory
from draftsmith.plan.split import evaluate_split
from draftsmith.plan.workload import Corpus, Job, drafter_parameters, draw_flops, draw_seconds
from draftsmith.target.model import TargetConfig
from draftsmith.target.weigh import weigh_target
from tests.plan.conftest import make_job

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SHAPES = {
    "qwen3.6-27b": make_job((5120, 17408, 5, 248320, 1024), (32, 8, 128), 16, 49152),
    "qwen3-8b": make_job((4096, 12288, 5, 151936, 512), (32, 8, 128), 16, 16384),
    "smollm2": make_job((576, 1536, 2, 49152, 1024), (9, 3, 64), 8, 16384),
}
"""As bench/common.py has them; constants of speed come from the first and last, of memory from the first alone."""


SMALL_CARD = make_job((4096, 12288, 3, 151936, 256), (32, 8, 128), 16, 8192)
SHAPES["qwen3-8b-24gb"] = replace(SMALL_CARD, checkpoint_layers=True, chunk_rows=1024)
DISTILLED = replace(SHAPES["qwen3.6-27b"], shape=replace(SHAPES["qwen3.6-27b"].shape, last_hidden=True))
SHAPES |= {"qwen3.6-27b-kl": DISTILLED, "qwen3.6-27b-dense": replace(SHAPES["qwen3.6-27b"], num_anchors=3072)}


SELF_TEST_COPY = 4
"""Bytes per parameter that runs until 2026-12-01 kept reserved after the capture: the self-test took abs() of the
gradient, which it no longer does. All results here are of such runs; this goes with their next measurement."""


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
    # The benchmark counts model operations: what checkpointed layers compute again is left out there, not here.
    assert draw_flops(replace(job, checkpoint_layers=False)) == pytest.approx(row["tflops"] * row["ms"] * 1e9, rel=0.01)
    assert 1e3 * draw_seconds(job, card) == pytest.approx(row["ms"], rel=0.2)


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_as_foretold(shape: str) -> None:
    row, _ = measured(shape)
    memory = drafter_memory(SHAPES[shape], ring_here=True)  # the benchmark has two slots beside the input too
    found = {buffer.name: buffer.bytes for buffer in memory.buffers}
    pool = found["activations"] + found["logits chunk"] + found["pool slack"]
    reserved = memory.total - found["CUDA context"]
    assert reserved - pool == pytest.approx(1e9 * row["peak_gb"], rel=0.15)
    before = reserved + SELF_TEST_COPY * drafter_parameters(SHAPES[shape].drafter)
    assert before == pytest.approx(1e9 * row["reserved_gb"], rel=0.15)


@pytest.mark.parametrize("line", range(2), ids=["peer copies", "through the host"])
def test_a_pipeline_of_two_gpus_runs_as_foretold(line: int) -> None:
    found = json.loads((RESULTS / "pipeline-qwen3-8b-2xh200.json").read_text().splitlines()[line])
    target = weigh_target(TargetConfig(target="Qwen/Qwen3-8B"))
    tokens, padding = found["tokens_per_batch"], found["shares"]["target 0"]["padding"]
    job = replace(
        SHAPES["qwen3-8b"],
        target=target,
        drafter=replace(SHAPES["qwen3-8b"].drafter, taps=(1, 9, 17, 25, 33), num_target_layers=36),
        corpus=Corpus(tokens=1000, supervised=750, padding=padding, fill=tokens / 16384, source="bench"),
        draws=found["draws"],
    )
    split = evaluate_split(job, parse_hardware("2xh200"), 1, 1)
    assert split.target_rate == pytest.approx(found["target_tokens_per_s"], rel=0.2)
    assert split.rate == pytest.approx(found["pipeline_tokens_per_s"], rel=0.2)
    weights = sum(buffer.bytes for buffer in split.memory[0].buffers if buffer.name != "CUDA context")
    assert weights == pytest.approx(max(found["allocated"]["cuda:0"]), rel=0.15)
