"""Does the pipeline keep up with its slower side, and does memory stay level while it does?

    python bench/pipeline.py qwen3-8b --batches 60          targets and drafters on all visible GPUs
    python bench/pipeline.py qwen3-8b --staging host        ring through pinned host memory instead of peer copies

Random weights, log-normal documents. Measures the target alone (its ring drained), the drafter alone (its step
repeated), picks draws so that both sides take about as long, then runs both. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, Shape, documents

from draftsmith.data.buckets import OrderConfig, choose_buckets
from draftsmith.data.loader import BatchOrder
from draftsmith.drafter.loss import LossSpec
from draftsmith.drafter.model import Drafter
from draftsmith.drafter.objectives import resolve_gamma
from draftsmith.pipeline.assemble import Blueprint, Team, build_drafters, build_rings, build_targets
from draftsmith.pipeline.buffers import FeatureRing, RingPlace
from draftsmith.pipeline.placement import Placement
from draftsmith.pipeline.resolve import Batching
from draftsmith.pipeline.settings import PipelineConfig
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.team import run_workers
from draftsmith.records import Document
from draftsmith.target.model import Target, TargetConfig, load_target
from draftsmith.train.build import StateSpec
from draftsmith.train.optim import OptimConfig
from draftsmith.train.step import StepConfig

CONFIGS = Path(__file__).parent.parent / "src" / "draftsmith" / "assets" / "configs"


def make_documents(num_tokens: int, mean_length: int, vocab_size: int) -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    made: list[Document] = []
    for length in documents(num_tokens, mean_length, seed=1):
        ids = torch.randint(0, vocab_size, (length,), generator=generator)
        made.append(Document(token_ids=ids, loss_mask=torch.arange(length) >= length // 4))
    return made


def blueprint(shape: Shape, placement: Placement, target: Target, data: list[Document], batches: int) -> Blueprint:
    d = replace(
        shape.drafter,
        taps=(1, 9, 17, 25, 33) if target.facts.num_layers == 36 else shape.drafter.taps,
        num_target_layers=target.facts.num_layers,
    )
    lengths = [document.length for document in data]
    order = OrderConfig(token_budget=shape.num_tokens)
    drafter = Drafter(d)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
    batching = Batching(
        order=order,
        buckets=choose_buckets(lengths, 4, 64),
        num_anchors=shape.num_anchors,
        draws_per_batch=1,
        accumulation=1,
        total_steps=batches,
    )
    state = StateSpec(
        loss=LossSpec(config=shape.loss, gamma=resolve_gamma(shape.loss, d.block_size), block_size=d.block_size),
        step=StepConfig(num_anchors=shape.num_anchors, attention="flex"),
        optim=OptimConfig(),
        total_steps=1_000_000,
        dtype=torch.bfloat16,
        compiled=True,
    )
    return Blueprint(
        placement=placement,
        pipeline=PipelineConfig(stall_seconds=120),
        batching=batching,
        shape=shape.batch,
        state=state,
        drafter=drafter,
        ends=target.ends(),
        seed=0,
        stop=Stop(),
        say=lambda text: print(text, flush=True),
    )


def target_alone(team: Team, first: int, count: int) -> float:
    """Seconds a batch of the first target, its ring drained as fast as it fills."""
    producer, ring = team.producers[0], team.rings[0]

    def drain() -> None:
        for sequence in range(first, first + count):
            ring.receive(sequence, "the bench drains")
            ring.release(sequence)

    ring.start_at(first)
    thread = threading.Thread(target=drain)
    thread.start()
    producer.produce(first)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for number in range(first + 1, first + count):
        producer.produce(number)
    torch.cuda.synchronize()
    thread.join()
    return (time.perf_counter() - started) / (count - 1)


def drafter_alone(team: Team, count: int) -> float:
    """Seconds a draw, input copied in each time."""
    loop, stream = team.drafters[0], team.streams[0]
    assert stream is not None
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        for turn in range(count + 2):
            if turn == 2:
                stream.synchronize()
                started = time.perf_counter()
            loop.stepper.inputs.batch.copy_(team.rings[0]._slots[0].batch, non_blocking=True)
            loop.stepper.accumulate()
            loop.stepper.update()
        stream.synchronize()
    return (time.perf_counter() - started) / count


def together(team: Team, batches: int, draws: int) -> dict[str, Any]:
    """Both sides for `batches` batches: seconds a batch after the first few, and what memory did meanwhile."""
    loop = team.drafters[0]
    loop.plan = replace(loop.plan, draws_per_batch=draws, total_steps=batches * draws)
    for ring in team.rings:
        ring.start_at(0)
    marks: list[float] = []
    levels: dict[str, list[int]] = {}
    calls: list[int] = []
    devices = sorted({*team.placement.targets, *team.placement.drafters}, key=str)

    def note(step: int, _is_last: bool) -> None:
        if step % draws == 0:
            marks.append(time.perf_counter())
            for device in devices:
                levels.setdefault(str(device), []).append(torch.cuda.memory_allocated(device))
            drafter = team.placement.drafters[0]
            calls.append(torch.cuda.memory_stats(drafter)["allocation.all.allocated"])

    loop._after_step = note
    for device in devices:
        torch.cuda.synchronize(device)
    for worker in (*team.producers, *team.drafters):
        worker.clock.started = time.perf_counter()
    run_workers(team.workers(), team.stop, lambda: None)
    skip = max(3, batches // 6)
    return {
        "seconds_per_batch": (marks[-1] - marks[skip]) / (len(marks) - 1 - skip),
        "drafter_allocator_calls_per_batch": (calls[-1] - calls[skip]) / (len(calls) - 1 - skip),
        "allocated": {name: [min(values[skip:]), max(values[skip:])] for name, values in levels.items()},
        "shares": {worker.clock.name: worker.clock.shares() for worker in (*team.producers, *team.drafters)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=["qwen3-8b", "qwen3.6-27b"])
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--staging", choices=["peer", "host"], default="peer")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    placement = Placement(targets=(gpus[0],), drafters=(gpus[-1],), joint=False, why="bench")
    target = load_target(TargetConfig(target=str(CONFIGS / arguments.shape)), gpus[0], random_weights=True)
    data = make_documents(shape.num_tokens * 6, shape.mean_length, target.facts.vocab_size)
    plan = blueprint(shape, placement, target, data, arguments.batches)
    order = BatchOrder([document.length for document in data], plan.batching.buckets, plan.batching.order)
    if arguments.staging == "host":
        place = RingPlace(name="the host ring", device=torch.device("cpu"), pin=True, num_slots=2, stall_seconds=120)
        rings = [FeatureRing(plan.shape, place, plan.stop)]
    else:
        rings = build_rings(plan)
    drafters, streams = build_drafters(plan, rings, lambda _step, _last: None)
    producers = build_targets(plan, [target], data, order, rings)
    team = Team(
        producers=list(producers), drafters=drafters, streams=streams, rings=rings, placement=placement, stop=plan.stop
    )
    tokens = sum(document.length for document in data) / order.num_batches(0)
    target_seconds, draw_seconds = target_alone(team, 0, 8), drafter_alone(team, 6)
    draws = max(1, round(target_seconds / draw_seconds))
    row = together(team, arguments.batches, draws)
    slower = max(target_seconds, draws * draw_seconds)
    result = {
        "shape": arguments.shape,
        "gpus": len(gpus),
        "ring": str(rings[0].place.device),
        "tokens_per_batch": tokens,
        "target_seconds": target_seconds,
        "draw_seconds": draw_seconds,
        "draws": draws,
        "target_tokens_per_s": tokens / target_seconds,
        "pipeline_tokens_per_s": tokens / row["seconds_per_batch"],
        "serial_seconds": target_seconds + draws * draw_seconds,
        "pipeline_over_slower_side": slower / row["seconds_per_batch"],
        **row,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
