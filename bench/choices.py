"""Which way of doing a piece of the drafter's step is the fastest, and by how much?

    python bench/choices.py qwen3.6-27b                     every choice, each against the way that draftsmith takes
    python bench/choices.py qwen3.6-27b --only base recompute six-shapes

One CUDA GPU. A row that can't run says why and the next goes on: that a way fails is a finding too. The last line is
one JSON object; `over_base` is a row's time over that of the step as it is.

    base              ranges, tiles built from them, fused loss, manual graphs, library products (cuBLAS)
    recompute         the plain loss under checkpointing: the head's products run again in backward
    ids               the mask's rule by document ids (a gather a key) instead of ranges, the tiles as in base
    create-block-mask tiles by `create_block_mask`, captured, from the ranges: every element of Q x (T + Q) evaluated
    reduce-overhead   torch.compile(mode="reduce-overhead") in place of manual graphs; -thread: from a worker thread
    autotune          inductor's GEMM backends ATEN and TRITON, chosen by timing at compile time
    forward-tiles     flex attention's forward with rows of 64 and of 128 keys a step, instead of its own choice
    six-shapes        one graph for each of six bucket ceilings, against one graph for the budget
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from common import SHAPES, Shape, documents, fill, make_state, matrix_rate
from step import DEVICE, Runner, clean, measure, slots
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from draftsmith.drafter import mask as masks
from draftsmith.drafter import model
from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.drafter.mask import MaskShape, Ranges
from draftsmith.records import FeatureBatch
from draftsmith.train import step as steps
from draftsmith.train.graph import CapturedStep, PlainStep, StepInputs
from draftsmith.train.step import TrainState

CEILINGS = (896, 1280, 1792, 2432, 3328, 8192)
"""The bucket ceilings 770, 1216, 1728, 2432, 3296 and 8192 in whole mask tiles of 128."""

FAILURES = (RuntimeError, AssertionError, TypeError, ValueError, AttributeError, KeyError)
"""What a way that this torch can't do ends in; Dynamo's and inductor's own errors are RuntimeErrors."""

Row = dict[str, Any]
Way = Callable[[Shape, list[FeatureBatch]], Row]


@contextmanager
def swapped(place: Any, name: str, value: Any) -> Iterator[None]:
    """Another function under `name` for the rows that compare one: only benchmarks do this."""
    kept = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, kept)


def captured(shape: Shape, ring: list[FeatureBatch]) -> Row:
    state = make_state(shape, DEVICE, compiled=True)
    return captured_row(state, shape, ring)


def captured_row(state: TrainState, shape: Shape, ring: list[FeatureBatch]) -> Row:
    inputs = StepInputs.allocate(shape.batch, shape.drafter.block_size, DEVICE)
    started = time.perf_counter()
    stepper = CapturedStep(state, inputs, torch.cuda.current_stream())
    seconds = time.perf_counter() - started
    runner = Runner(stepper, ring)
    row: Row = measure(runner, shape, runs=3, repeats=3)
    return {**row, "capture_seconds": seconds, "loss": (inputs.totals[0] / inputs.totals[1]).item()}


def recompute(shape: Shape, ring: list[FeatureBatch]) -> Row:
    return captured(replace(shape, loss=replace(shape.loss, loss_method="recompute")), ring)


def ids_mod(ranges: Ranges, shape: MaskShape) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The reference rule: the key's document equals the anchor's, looked up for every key."""
    rows, block, num_tokens = shape.rows_per_anchor, shape.block_size, shape.num_tokens
    starts = torch.zeros(num_tokens + 1, dtype=torch.int32, device=ranges.low_A.device)
    # A document's id here is the number of anchors' document starts at or before a token.
    starts.index_fill_(0, ranges.low_A.long(), 1)
    document_T = starts[:num_tokens].cumsum(0, dtype=torch.int32)
    document_A, high_A = document_T[ranges.low_A.long()], ranges.high_A
    filled_A = ranges.high_A > 0

    def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor, key = q // rows, kv.clamp(max=num_tokens - 1)
        same = (document_T[key] == document_A[anchor]) & filled_A[anchor] & (kv < high_A[anchor])
        return torch.where(kv < num_tokens, same, (kv - num_tokens) // block == anchor)

    return visible


def ids(shape: Shape, ring: list[FeatureBatch]) -> Row:
    with swapped(masks, "range_mask_mod", ids_mod):
        return captured(shape, ring)


def evaluated_tiles(ranges: Ranges, shape: MaskShape) -> BlockMask:
    rows, keys = shape.num_anchors * shape.rows_per_anchor, shape.num_tokens + shape.num_anchors * shape.block_size
    return COMPILED_MASK(masks.range_mask_mod(ranges, shape), None, None, rows, keys, device=DEVICE)


COMPILED_MASK = torch.compile(create_block_mask, dynamic=False)


def by_create_block_mask(shape: Shape, ring: list[FeatureBatch]) -> Row:
    with swapped(steps, "block_mask", evaluated_tiles):
        return captured(shape, ring)


def reduce_overhead(shape: Shape, ring: list[FeatureBatch]) -> Row:
    state = make_state(shape, DEVICE, compiled=False)
    forward = torch.compile(state.drafter.forward, dynamic=False, fullgraph=True, mode="reduce-overhead")
    chunk = torch.compile(state.chunk, dynamic=False, fullgraph=True, mode="reduce-overhead")
    state = replace(state, forward=forward, chunk=chunk)
    runner = Runner(PlainStep(state, StepInputs.allocate(shape.batch, shape.drafter.block_size, DEVICE)), ring)

    def marked() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        runner()

    for _ in range(3):
        marked()
    return measure(marked, shape, runs=3, repeats=3)


def in_a_thread(shape: Shape, ring: list[FeatureBatch]) -> Row:
    result: Row = {}

    def work() -> None:
        torch.cuda.set_stream(torch.cuda.Stream(DEVICE))
        try:
            result.update(reduce_overhead(shape, ring))
        except FAILURES as error:
            result["error"] = told(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return result


def autotune(shape: Shape, ring: list[FeatureBatch]) -> Row:
    import torch._inductor.config as inductor

    with inductor.patch(max_autotune_gemm=True, max_autotune_gemm_backends="ATEN,TRITON"):
        return captured(shape, ring)


def forward_tiles(shape: Shape, ring: list[FeatureBatch]) -> Row:
    found: Row = {}
    for name, options in {
        "128x64": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 3},
        "128x128": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8, "fwd_num_stages": 2},
    }.items():

        def chosen(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, options: Any = options) -> Any:
            return flex_attention(q, k, v, block_mask=block_mask, kernel_options=options)

        with swapped(model, "flex_attention", chosen):
            try:
                found[name] = captured(shape, ring)
            except FAILURES as error:
                found[name] = {"error": told(error)}
        clean()
    best = min((row for row in found.values() if "ms" in row), key=lambda row: row["ms"], default={"error": "none ran"})
    return {**best, "tiles": {name: row.get("ms", row.get("error")) for name, row in found.items()}}


def six_shapes(shape: Shape, ring: list[FeatureBatch]) -> Row:
    """One graph a ceiling: each step takes one document, padded to the smallest ceiling that holds it.

    The weights are one, so an optimizer step runs once the budget's worth of tokens is through, as in base; anchors
    keep base's density, so both ways learn from as many places.
    """
    whole = make_state(shape, DEVICE, compiled=True)
    density = shape.num_anchors / shape.num_tokens
    steppers: dict[int, CapturedStep] = {}
    started, reserved = time.perf_counter(), torch.cuda.memory_reserved()
    for ceiling in CEILINGS:
        anchors = max(8, round(ceiling * density / 8) * 8)
        state = replace(whole, config=replace(whole.config, num_anchors=anchors))
        small = replace(shape, num_tokens=ceiling, num_anchors=anchors)
        inputs = StepInputs.allocate(small.batch, shape.drafter.block_size, DEVICE)
        steppers[ceiling] = CapturedStep(state, inputs, torch.cuda.current_stream())
    seconds = time.perf_counter() - started
    lengths = documents(shape.num_tokens, shape.mean_length, seed=0)
    batches = {}
    for length in lengths:
        ceiling = next(c for c in CEILINGS if c >= length)
        small = replace(shape, num_tokens=ceiling)
        batches[length] = FeatureBatch.allocate(small.batch, DEVICE)
        fill(batches[length], [length], shape.drafter.vocab_size, length)
        steppers[ceiling].inputs.uniforms_T.copy_(draw_uniforms(0, 0, 0, ceiling))

    def step() -> None:
        for length in lengths:
            stepper = steppers[next(c for c in CEILINGS if c >= length)]
            stepper.inputs.batch.copy_(batches[length], non_blocking=True)
            stepper.accumulate()
        stepper.update()

    row: Row = measure(step, shape, runs=3, repeats=1)
    padded = sum(next(c for c in CEILINGS if c >= length) for length in lengths)
    return {
        **row, "capture_seconds": seconds, "graphs": 2 * len(CEILINGS), "documents": len(lengths),
        "padding_share": 1 - sum(lengths) / padded, "real_tokens_per_s": sum(lengths) / row["ms"] * 1e3,
        "graphs_reserved_gb": (torch.cuda.memory_reserved() - reserved) / 1e9,
    }  # fmt: skip


WAYS: dict[str, Way] = {
    "base": captured,
    "recompute": recompute,
    "ids": ids,
    "create-block-mask": by_create_block_mask,
    "reduce-overhead": reduce_overhead,
    "reduce-overhead-thread": in_a_thread,
    "forward-tiles": forward_tiles,
    "six-shapes": six_shapes,
    "autotune": autotune,
}


def told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--only", nargs="*", choices=sorted(WAYS), default=list(WAYS))
    parser.add_argument("--rate-seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this benchmark needs a CUDA GPU, and none is visible\n")
    shape = SHAPES[arguments.shape]
    torch.cuda.set_stream(torch.cuda.Stream(DEVICE))
    result: Row = {"shape": arguments.shape, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    result["matrix_tflops"] = matrix_rate(arguments.rate_seconds)
    ring = slots(shape, [documents(shape.num_tokens, shape.mean_length, seed) for seed in range(2)])
    for name in arguments.only:
        started = time.perf_counter()
        try:
            row = WAYS[name](shape, ring)
        except FAILURES as error:
            row = {"error": told(error)}
        row["row_seconds"] = time.perf_counter() - started
        if "ms" in row and "ms" in result.get("base", {}):
            row["over_base"] = row["ms"] / result["base"]["ms"]
        result[name] = row
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        print(name, shown, flush=True)
        clean()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
