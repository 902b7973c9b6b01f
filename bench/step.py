"""How fast is the drafter's step, and what does it ask of allocator and host?

    python bench/step.py qwen3.6-27b            captured, compiled uncaptured, eager, and the dynamic way, its anchors
                                                as drawn and (dynamic-sorted) in order
    python bench/step.py smollm2 --only captured

One CUDA GPU. Figures are taken through a ring of device slots: every step copies another batch into the captured
inputs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from dataclasses import replace
from typing import Any

import torch
from common import SHAPES, Shape, documents, event_ms, fill, make_state, matrix_rate, step_flops
from dynamic import DynamicStep

from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.records import FeatureBatch
from draftsmith.train.graph import CapturedStep, PlainStep, StepInputs, Stepper

DEVICE = torch.device("cuda", 0)
DYNAMIC = ("dynamic", "dynamic-sorted")


def slots(shape: Shape, fills: list[list[int]]) -> list[FeatureBatch]:
    ring = [FeatureBatch.allocate(shape.batch, DEVICE) for _ in fills]
    for seed, (slot, lengths) in enumerate(zip(ring, fills, strict=True)):
        fill(slot, lengths, shape.drafter.vocab_size, seed)
    return ring


class Runner:
    """Feeds a stepper from the ring, fresh uniforms every draw, an update every draw."""

    def __init__(self, stepper: Stepper, ring: list[FeatureBatch]) -> None:
        self.stepper, self.ring, self.count = stepper, ring, 0
        num_tokens = ring[0].shape.num_tokens
        self.uniforms = [draw_uniforms(0, i, 0, num_tokens).to(DEVICE) for i in range(8)]

    def __call__(self) -> None:
        self.stepper.inputs.batch.copy_(self.ring[self.count % len(self.ring)], non_blocking=True)
        self.stepper.inputs.uniforms_T.copy_(self.uniforms[self.count % 8], non_blocking=True)
        self.stepper.accumulate()
        self.stepper.update()
        self.count += 1


def measure(run: Any, shape: Shape, runs: int = 5, repeats: int = 4) -> dict[str, float]:
    """Median ms and what one step asks of allocator and host."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = sorted(event_ms(run, repeats) for _ in range(runs))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    started = time.perf_counter()
    run()
    host = time.perf_counter() - started
    calls = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        run()
        torch.cuda.set_sync_debug_mode("default")
    syncs = sum("called a synchronizing" in str(warning.message) for warning in caught)
    torch.cuda.synchronize()
    ms = times[len(times) // 2]
    return {
        "ms": ms, "ms_min": times[0], "ms_max": times[-1], "tflops": step_flops(shape) / ms / 1e9,
        "tokens_per_s": shape.num_tokens / ms * 1e3,
        "labels_per_s": shape.num_anchors * (shape.drafter.block_size - 1) / ms * 1e3,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9, "reserved_gb": torch.cuda.memory_reserved() / 1e9,
        "allocator_calls": calls, "host_syncs": syncs, "host_ms": host * 1e3,
    }  # fmt: skip


def captured(shape: Shape, ring: list[FeatureBatch], flat_steps: int, fills: bool) -> dict[str, Any]:
    stream = torch.cuda.current_stream()
    state = make_state(shape, DEVICE, compiled=True)
    inputs = StepInputs.allocate(shape.batch, shape.drafter.block_size, DEVICE)
    stepper = CapturedStep(state, inputs, stream)
    runner = Runner(stepper, ring)
    row: dict[str, Any] = measure(runner, shape)
    row["capture_seconds"] = stepper.capture_seconds
    levels: list[int] = []
    for _ in range(flat_steps):
        runner()
        levels.append(torch.cuda.memory_allocated())
    torch.cuda.synchronize()
    row["allocated_min"], row["allocated_max"] = min(levels), max(levels)
    row["finite"] = bool(torch.isfinite(state.parameters.master_N).all().item())
    row["loss"] = (inputs.totals[0] / inputs.totals[1]).item()
    if fills:
        row["fills"] = {}
        for used in (1, 770, shape.num_tokens // 2, shape.num_tokens):
            one = replace_ring(ring, shape, used)
            row["fills"][used] = measure(Runner(stepper, one), shape, runs=3, repeats=3)
    return row


def replace_ring(ring: list[FeatureBatch], shape: Shape, used: int) -> list[FeatureBatch]:
    lengths = [used] if used <= 770 else [used // 16] * 16
    fill(ring[0], lengths, shape.drafter.vocab_size, used)
    return ring[:1]


def uncaptured(shape: Shape, ring: list[FeatureBatch], compiled: bool) -> dict[str, Any]:
    state = make_state(shape, DEVICE, compiled=compiled)
    inputs = StepInputs.allocate(shape.batch, shape.drafter.block_size, DEVICE)
    return measure(Runner(PlainStep(state, inputs), ring), shape, runs=3, repeats=2)


def clean() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--only", nargs="*", default=["captured", "compiled", "eager", *DYNAMIC])
    parser.add_argument("--flat-steps", type=int, default=200)
    parser.add_argument("--fills", action="store_true")
    parser.add_argument("--chunk-rows", type=int, default=0)
    parser.add_argument("--rate-seconds", type=float, default=5.0)
    parser.add_argument("--memory-gb", type=float, default=0.0, help="let the process have only this much of the card")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this benchmark needs a CUDA GPU, and none is visible\n")
    if arguments.memory_gb:
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(arguments.memory_gb * 1e9 / total, DEVICE)
    shape = SHAPES[arguments.shape]
    if arguments.chunk_rows:
        shape = replace(shape, loss=replace(shape.loss, chunk_rows=arguments.chunk_rows))
    torch.cuda.set_stream(torch.cuda.Stream(DEVICE))
    result: dict[str, Any] = {"shape": arguments.shape, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    if arguments.memory_gb:
        result["memory_limit_gb"] = arguments.memory_gb
    result["matrix_tflops"] = rate = matrix_rate(arguments.rate_seconds)
    ring = slots(shape, [documents(shape.num_tokens, shape.mean_length, seed) for seed in range(2)])
    for way in arguments.only:
        if way == "captured":
            row = captured(shape, ring, arguments.flat_steps, arguments.fills)
        elif way in DYNAMIC:
            dynamic = DynamicStep(shape, ring, DEVICE, sort_anchors=way == "dynamic-sorted")
            row = measure(dynamic, shape, runs=3, repeats=2)
            del dynamic
        else:
            try:
                row = uncaptured(shape, ring, way == "compiled")
            except torch.OutOfMemoryError as error:  # eager flex attention keeps the whole score matrix
                row = {"error": str(error).splitlines()[0][:150]}
        if "tflops" in row:
            row["share_of_matrix_rate"] = row["tflops"] / rate
        result[way] = row
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        print(way, shown, flush=True)
        clean()
    for way in set(DYNAMIC) & result.keys():
        if "captured" in result and "ms" in result[way]:
            result[f"{way}_over_captured"] = result[way]["ms"] / result["captured"]["ms"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
