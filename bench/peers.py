"""The same documents and anchors through the rivals' steps and ours: like beside like, in one run.

    python bench/peers.py --shape qwen3.6-27b
    python bench/peers.py --shape qwen3.6-27b --rows ours speculators-adamw --seconds 150

Rows (the shape's T / anchors unless a row names its own):
    ours                       captured; cross entropy to the text
    ours-argmax                captured; cross entropy to the argmax of the teacher's logits: what speculators computes
    ours-kl                    captured; distilled
    speculators-adamw, -muon   as it trains: teacher's logits by its head from the verifier's last hidden states
    speculators-given          AdamW, the teacher's product left out: its code has no way to give labels, so its
                               teacher head is replaced by a module that hands out [1, Q, V] logits made once
    specforge                  AdamW; it can't pack, so one unpacked document of T tokens: the same rows and products,
                               but an anchor attends to half of T on average instead of half a document
    specforge-rows             AdamW; the same documents, one a row, padded to the longest: attends as we do, but
                               projects padding, and draws anchors / documents from each, rounded up
    theirs-512, theirs-3072    speculators' own sizes, 8,192 tokens with 512 and 3,072 anchors, Muon, its default
    ours-512, ours-3072        ours-argmax at those sizes

One CUDA GPU; on a CPU (`--shape tiny`) every row runs once uncompiled, to show that it runs. TFLOP/s count what a row
has to compute (the teacher's product where it is done, attention left out: common.step_flops), not what it does.
A row that doesn't fit, or whose package is absent, says so. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import SHAPES, Shape, documents, fill, make_state, matrix_rate, step_flops
from rivals import SpecForge, SpecForgeSettings, Speculators, SpeculatorsSettings, rows_of
from step import Runner, measure
from torch import Tensor

from draftsmith.drafter.loss import LossSpec, head_logits
from draftsmith.drafter.objectives import LossConfig
from draftsmith.records import FeatureBatch, FrozenEnds
from draftsmith.train.build import chunk_function
from draftsmith.train.graph import CapturedStep, PlainStep, StepInputs

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
TOTAL_STEPS = 10_000
COLUMNS = ("ms", "tokens_per_s", "tflops", "share", "peak_gb", "allocator_calls", "host_ms", "start_seconds")
Step = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a row is built, and which compiled code it shares with its neighbours."""

    build: Callable[[Shape], Step]
    code: str
    sizes: tuple[int, int] | None = None
    """Tokens and anchors where not the shape's own."""
    teacher: bool = False
    """Whether it multiplies by the teacher's head."""


def distilled(shape: Shape) -> Shape:
    """The shape whose batches carry last hidden states, and whose floating-point count has the teacher's product."""
    return replace(shape, loss=LossConfig(loss="kl", weights="decay"))


def ring_of(shape: Shape) -> list[FeatureBatch]:
    ring: list[FeatureBatch] = []
    for seed in range(2):
        batch = FeatureBatch.allocate(shape.batch, DEVICE)
        fill(batch, documents(shape.num_tokens, shape.mean_length, seed), shape.drafter.vocab_size, seed)
        ring.append(batch)
    return ring


def teacher_labels(teacher: Tensor, ends: FrozenEnds) -> Tensor:
    """What the teacher finds likeliest, from its last hidden states."""
    return head_logits(teacher, ends).argmax(-1)


def argmax_chunk(labels_of: Callable[[Tensor, FrozenEnds], Tensor]) -> Any:
    """Cross entropy to what the teacher finds likeliest: our chunk with other labels."""

    def chunk(
        spec: LossSpec, ends: FrozenEnds, hidden: Tensor, labels: Tensor, blocks: Tensor, teacher: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert teacher is not None, "the teacher's last hidden states make the labels"
        plain = replace(spec, config=replace(spec.config, loss="ce"))
        return chunk_function(plain, ends, DEVICE)(plain, ends, hidden, labels_of(teacher, ends), blocks, None)

    return chunk


def ours(shape: Shape, argmax: bool = False) -> Step:
    state = make_state(shape, DEVICE, compiled=ON_GPU, total_steps=TOTAL_STEPS)
    if argmax:
        labels_of = torch.compile(teacher_labels, dynamic=False, fullgraph=True) if ON_GPU else teacher_labels
        state = replace(state, chunk=argmax_chunk(labels_of))
    inputs = StepInputs.allocate(shape.batch, shape.drafter.block_size, DEVICE)
    if ON_GPU:
        return Runner(CapturedStep(state, inputs, torch.cuda.current_stream()), ring_of(shape))
    state = replace(state, config=replace(state.config, attention="dense"))  # flex has no backward on a CPU
    stepper, (batch, *_) = PlainStep(state, inputs), ring_of(shape)
    inputs.batch.copy_(batch)
    inputs.uniforms_T.copy_(torch.rand(shape.num_tokens, dtype=torch.float64))

    def step() -> None:
        stepper.accumulate()
        stepper.update()

    return step


def random_ends(shape: Shape) -> FrozenEnds:
    d = shape.drafter
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    embedding, head = (
        torch.empty(d.vocab_size, d.hidden_size, device=DEVICE, dtype=dtype).normal_(0.0, 0.02) for _ in range(2)
    )
    return FrozenEnds(embedding_VH=embedding, head_VH=head)


def in_turn(step: Callable[[Any], Any], ring: list[Any]) -> Step:
    count = 0

    def run() -> None:
        nonlocal count
        step(ring[count % len(ring)])
        count += 1

    return run


def precise(batch: FeatureBatch) -> FeatureBatch:
    """A CPU check computes in fp32 throughout."""
    if ON_GPU:
        return batch
    last = batch.last_hidden_TH
    return replace(
        batch, features_TFH=batch.features_TFH.float(), last_hidden_TH=None if last is None else last.float()
    )


def speculators(shape: Shape, **settings: Any) -> Step:
    """Weights start at random as its own constructor draws them; the verifier's norm weighs 1."""
    chosen = SpeculatorsSettings(max_anchors=shape.num_anchors, **settings)
    norm = torch.ones(shape.drafter.hidden_size, device=DEVICE)
    rival = Speculators(shape.drafter, random_ends(shape), norm, chosen, TOTAL_STEPS)
    return in_turn(rival.step, [precise(batch) for batch in ring_of(distilled(shape))])


def specforge(shape: Shape, as_rows: bool = False) -> Step:
    ring = [precise(batch) for batch in ring_of(shape)]
    if not as_rows:
        rival = SpecForge(shape.drafter, random_ends(shape), settings_for(shape.num_anchors), TOTAL_STEPS)
        return in_turn(rival.step, ring)
    rows = [rows_of(batch) for batch in ring]
    anchors = math.ceil(shape.num_anchors / min(ids.shape[0] for ids, _, _ in rows))
    rival = SpecForge(shape.drafter, random_ends(shape), settings_for(anchors), TOTAL_STEPS)
    return in_turn(lambda row: rival.step_rows(*row), rows)


def settings_for(num_anchors: int) -> SpecForgeSettings:
    return SpecForgeSettings(num_anchors=num_anchors, gamma=7.0)


THEIRS = {512: (8192, 512), 3072: (8192, 3072)}
ROWS: dict[str, Row] = {
    "ours": Row(build=ours, code="ours"),
    "ours-argmax": Row(build=lambda shape: ours(distilled(shape), True), code="ours-argmax", teacher=True),
    "speculators-adamw": Row(build=lambda s: speculators(s, optimizer="adamw"), code="speculators", teacher=True),
    "speculators-muon": Row(build=lambda s: speculators(s, optimizer="muon"), code="speculators", teacher=True),
    "speculators-given": Row(build=lambda s: speculators(s, optimizer="adamw", teacher=False), code="given"),
    "specforge": Row(build=specforge, code="specforge"),
    "specforge-rows": Row(build=lambda shape: specforge(shape, True), code="specforge-rows"),
    "theirs-512": Row(build=speculators, code="theirs-512", sizes=THEIRS[512], teacher=True),
    "theirs-3072": Row(build=speculators, code="theirs-3072", sizes=THEIRS[3072], teacher=True),
    "ours-512": Row(build=lambda s: ours(distilled(s), True), code="ours-512", sizes=THEIRS[512], teacher=True),
    "ours-3072": Row(build=lambda s: ours(distilled(s), True), code="ours-3072", sizes=THEIRS[3072], teacher=True),
    "ours-kl": Row(build=lambda shape: ours(distilled(shape)), code="ours-kl", teacher=True),
}


def timed(step: Step, shape: Shape) -> dict[str, float]:
    if ON_GPU:
        return measure(step, shape, runs=5, repeats=1)
    started = time.perf_counter()
    step()
    ms = (time.perf_counter() - started) * 1e3
    return {"ms": ms, "tokens_per_s": shape.num_tokens / ms * 1e3, "tflops": step_flops(shape) / ms / 1e9}


def sized(shape: Shape, sizes: tuple[int, int] | None) -> Shape:
    if sizes is None:
        return shape
    tokens, anchors = sizes if ON_GPU else (size // 16 for size in sizes)
    return replace(shape, num_tokens=tokens, num_anchors=anchors)


def run_row(row: Row, shape: Shape, rate: float | None) -> dict[str, Any]:
    """A row's figures, or the reason why it has none."""
    own = sized(shape, row.sizes)
    started = time.perf_counter()
    try:
        step = row.build(own)
        step()
        if ON_GPU:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        result: dict[str, Any] = dict(timed(step, distilled(own) if row.teacher else own))
    except RuntimeError as error:  # absent, out of memory, or a rival's own failure on this version of torch
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"left_out": f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]}
    result |= {"tokens": own.num_tokens, "anchors": own.num_anchors, "start_seconds": seconds}
    if rate is not None:
        result["share"] = result["tflops"] / rate
    return result


def tidy(*, forget: bool) -> None:
    if forget:
        torch._dynamo.reset()
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def show(name: str, row: dict[str, Any]) -> None:
    if "left_out" in row:
        print(f"{name:18s} {row['left_out']}", flush=True)
        return
    cells = " ".join(f"{row[column]:>15,.2f}" if column in row else f"{'-':>15s}" for column in COLUMNS)
    print(f"{name:18s} {row['tokens']:>6}/{row['anchors']:<5} {cells}", flush=True)


def ratios(rows: dict[str, Any]) -> dict[str, float]:
    """How many times as long a rival takes as ours of like work."""
    pairs = {
        "speculators-adamw": "ours-argmax", "speculators-muon": "ours-argmax", "speculators-given": "ours",
        "specforge": "ours", "specforge-rows": "ours", "theirs-512": "ours-512", "theirs-3072": "ours-3072",
    }  # fmt: skip
    known = {name: row["ms"] for name, row in rows.items() if "ms" in row}
    return {f"{a} / {b}": known[a] / known[b] for a, b in pairs.items() if a in known and b in known}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3.6-27b")
    parser.add_argument("--rows", nargs="*", choices=sorted(ROWS), default=[name for name in ROWS if name != "ours-kl"])
    parser.add_argument("--seconds", type=float, default=0.0, help="start no further row after this long; 0: all rows")
    parser.add_argument("--rate-seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    began, shape = time.perf_counter(), SHAPES[arguments.shape]
    if ON_GPU:
        torch.cuda.set_stream(torch.cuda.Stream(DEVICE))
    rate = matrix_rate(arguments.rate_seconds) if ON_GPU else None
    result: dict[str, Any] = {"shape": arguments.shape, "torch": torch.__version__, "matrix_tflops": rate, "rows": {}}
    if ON_GPU:
        result["gpu"] = torch.cuda.get_device_name()
    print(f"matrix rate {rate}\n{'':31s} " + " ".join(f"{column:>15s}" for column in COLUMNS))
    before = ""
    for name in arguments.rows:
        if arguments.seconds and time.perf_counter() - began > arguments.seconds:
            result["rows"][name] = {"left_out": f"not started after {arguments.seconds:g} s"}
            show(name, result["rows"][name])
            continue
        tidy(forget=ROWS[name].code != before)
        before = ROWS[name].code
        result["rows"][name] = run_row(ROWS[name], shape, rate)
        show(name, result["rows"][name])
    result["ratios"], result["seconds"] = ratios(result["rows"]), time.perf_counter() - began
    print(json.dumps(result))


if __name__ == "__main__":
    main()
