"""Does the pipeline keep up with its slower side, and does memory stay level while it does?

    python bench/pipeline.py qwen3-8b --batches 60          targets and drafters on all visible GPUs
    python bench/pipeline.py qwen3-8b --staging host        ring through pinned host memory instead of peer copies
    python bench/pipeline.py qwen3.6-27b --layers 16        a target cut to 16 layers, beside the drafter on one GPU
    python bench/pipeline.py qwen3.6-27b --dynamic          the system that this replaces, whole (pipeline_dynamic.py)

Random weights, log-normal documents. Measures the target alone (its ring drained), the drafter alone (its step
repeated), picks draws so that both sides take about as long, then runs both. On one GPU both share it, and the serial
figure beside tells what that costs. Memory and utilisation are sampled at 10 Hz while both run: `curves` in the last
line, which is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from common import SHAPES, Shape, documents
from pipeline_dynamic import DynamicTarget, measure_dynamic
from target import cut_config
from watching import Marks, Watch

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
from draftsmith.records import Document, TargetFacts
from draftsmith.target.model import Target, TargetConfig, load_target
from draftsmith.target.taps import default_taps
from draftsmith.target.weigh import weigh_target
from draftsmith.train.build import StateSpec
from draftsmith.train.optim import OptimConfig
from draftsmith.train.step import StepConfig

DRAFTER_BYTES = 73e9
"""What the captured step of the 27B shape keeps reserved (bench/step.py), more than any other shape's."""
SLOTS = 4
"""Batches on a shared GPU besides the step's own: two stagings, two ring slots."""
FORWARD_BYTES = 8e9
"""Of a forward's activations and the compiler's scratch."""


def make_documents(num_tokens: int, mean_length: int, facts: TargetFacts) -> list[Document]:
    """Random ids but padding: its embedding is zero in random weights, and a linear-attention layer keeps it so."""
    generator = torch.Generator().manual_seed(0)
    made: list[Document] = []
    for length in documents(num_tokens, mean_length, seed=1):
        ids = torch.randint(0, facts.vocab_size, (length,), generator=generator)
        if facts.pad_token_id is not None:
            ids[ids == facts.pad_token_id] = (facts.pad_token_id + 1) % facts.vocab_size
        made.append(Document(token_ids=ids, loss_mask=torch.arange(length) >= length // 4))
    return made


def with_taps(shape: Shape, num_layers: int) -> Shape:
    """The shape's drafter for a target of that many layers."""
    taps = default_taps(num_layers)
    return replace(shape, drafter=replace(shape.drafter, taps=taps, num_target_layers=num_layers))


def blueprint(
    shape: Shape, placement: Placement, target: Target, data: list[Document], arguments: argparse.Namespace
) -> Blueprint:
    d, on_gpu = shape.drafter, placement.on_gpu
    batch_shape = replace(shape.batch, dtype=torch.bfloat16 if on_gpu else torch.float32)
    lengths = [document.length for document in data]
    order = OrderConfig(token_budget=shape.num_tokens)
    drafter = Drafter(d)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
    batching = Batching(
        order=order,
        buckets=choose_buckets(lengths, arguments.buckets, 64),
        num_anchors=shape.num_anchors,
        draws_per_batch=1,
        accumulation=1,
        total_steps=arguments.batches,
    )
    state = StateSpec(
        loss=LossSpec(config=shape.loss, gamma=resolve_gamma(shape.loss, d.block_size), block_size=d.block_size),
        step=StepConfig(num_anchors=shape.num_anchors, attention="flex" if on_gpu else "dense"),
        optim=OptimConfig(),
        total_steps=1_000_000,
        dtype=batch_shape.dtype,
        compiled=on_gpu,
    )
    return Blueprint(
        placement=placement,
        pipeline=PipelineConfig(stall_seconds=240),
        batching=batching,
        shape=batch_shape,
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
    synchronize(team.placement.targets)
    started = time.perf_counter()
    for number in range(first + 1, first + count):
        producer.produce(number)
    synchronize(team.placement.targets)
    thread.join()
    return (time.perf_counter() - started) / (count - 1)


def synchronize(devices: Sequence[torch.device]) -> None:
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def drafter_alone(team: Team, count: int) -> float:
    """Seconds a draw, input copied in each time."""
    loop, stream = team.drafters[0], team.streams[0]
    started = 0.0
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        for turn in range(count + 2):
            if turn == 2:
                synchronize(team.placement.drafters)
                started = time.perf_counter()
            loop.stepper.inputs.batch.copy_(team.rings[0]._slots[0].batch, non_blocking=True)
            loop.stepper.accumulate()
            loop.stepper.update()
        synchronize(team.placement.drafters)
    return (time.perf_counter() - started) / count


def together(team: Team, batches: int, draws: int) -> dict[str, Any]:
    """Both sides for `batches` batches: seconds a batch after the first few, and what memory did meanwhile."""
    loop = team.drafters[0]
    loop.plan = replace(loop.plan, draws_per_batch=draws, total_steps=batches * draws)
    for ring in team.rings:
        ring.start_at(0)
    devices = sorted({*team.placement.targets, *team.placement.drafters}, key=str)
    marks = Marks(devices)

    def note(step: int, _is_last: bool) -> None:
        if step % draws == 0:
            marks.take()

    loop._after_step = note
    synchronize(devices)
    for worker in (*team.producers, *team.drafters):
        worker.clock.started = time.perf_counter()
    with Watch(devices) as watch:
        run_workers(team.workers(), team.stop, lambda: None)
    return {
        **marks.summary(max(3, batches // 6)),
        "shares": {worker.clock.name: worker.clock.shares() for worker in (*team.producers, *team.drafters)},
        "curves": watch.curves(),
    }


def fitting_layers(folder: str, shape: Shape, device: torch.device) -> int:
    """Most layers of the target, in fours (a period of hybrid layers), that fit beside the drafter on one GPU."""
    size = weigh_target(TargetConfig(target=folder))
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1e18
    room = total - DRAFTER_BYTES - FORWARD_BYTES - SLOTS * shape.batch.num_bytes - 2 * size.ends
    layers = len(size.layers)
    while layers > 4 and 2 * sum(size.layers[:layers]) > room:
        layers -= 4
    return layers


def load(arguments: argparse.Namespace, shape: Shape, gpus: list[torch.device]) -> Target:
    """The target with random weights, whole or cut."""
    with cut_config(arguments.target or arguments.shape, arguments.layers or 0) as folder:
        layers = arguments.layers
        if layers is None and gpus[0] == gpus[-1]:
            layers = fitting_layers(folder, shape, gpus[0])
        with cut_config(folder, layers or 0) as cut:
            target = load_target(TargetConfig(target=cut), gpus[0], random_weights=True)
    print(f"target of {target.facts.num_layers} layers on {gpus[0]}", flush=True)
    return target


def measure(
    arguments: argparse.Namespace, shape: Shape, gpus: list[torch.device], target: Target, data: list[Document]
) -> dict[str, Any]:
    """Build the team, then: target alone, drafter alone, both."""
    placement = Placement(targets=(gpus[0],), drafters=(gpus[-1],), joint=False, why="bench")
    plan = blueprint(shape, placement, target, data, arguments)
    order = BatchOrder([document.length for document in data], plan.batching.buckets, plan.batching.order)
    if arguments.staging == "host":
        place = RingPlace(name="the host ring", device=torch.device("cpu"), pin=True, num_slots=2, stall_seconds=240)
        rings = [FeatureRing(plan.shape, place, plan.stop)]
    else:
        rings = build_rings(plan)
    drafters, streams = build_drafters(plan, rings, lambda _step, _last: None)
    producers = build_targets(plan, [target], data, order, rings)
    team = Team(
        producers=list(producers), drafters=drafters, streams=streams, rings=rings, placement=placement, stop=plan.stop
    )
    tokens = sum(document.length for document in data) / order.num_batches(0)
    target_seconds = target_alone(team, 0, 1 + arguments.alone)
    draw_seconds = drafter_alone(team, arguments.alone)
    draws = arguments.draws or max(1, round(target_seconds / draw_seconds))
    print(f"target {target_seconds:.3f} s a batch, drafter {draw_seconds:.3f} s a draw, {draws} draws", flush=True)
    row = together(team, arguments.batches, draws)
    slower, serial = max(target_seconds, draws * draw_seconds), target_seconds + draws * draw_seconds
    return {
        "ring": str(rings[0].place.device),
        "tokens_per_batch": tokens,
        "target_seconds": target_seconds,
        "draw_seconds": draw_seconds,
        "draws": draws,
        "target_tokens_per_s": tokens / target_seconds,
        "pipeline_tokens_per_s": tokens / row["seconds_per_batch"],
        "serial_seconds": serial,
        "serial_over_pipeline": serial / row["seconds_per_batch"],
        "pipeline_over_slower_side": slower / row["seconds_per_batch"],
        **row,
    }


def measure_replaced(
    arguments: argparse.Namespace, shape: Shape, target: Target, data: list[Document]
) -> dict[str, Any]:
    lengths = [document.length for document in data]
    order = OrderConfig(token_budget=shape.num_tokens)
    numbered = BatchOrder(lengths, choose_buckets(lengths, arguments.buckets, 64), order)
    source = DynamicTarget(target, shape.drafter.taps, data, numbered)
    return measure_dynamic(source, shape, arguments.batches, arguments.draws, arguments.alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--target", default="", help="folder with a config.json; left out: the shape's own")
    parser.add_argument("--layers", type=int, help="layers of the target; 0 all; left out: as many as fit one GPU")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--alone", type=int, default=6, help="batches, and draws, measured of each side alone")
    parser.add_argument("--draws", type=int, default=0, help="draws a batch; 0 balances both sides")
    parser.add_argument("--buckets", type=int, default=4, help="lengths that the target is compiled for")
    parser.add_argument("--staging", choices=["peer", "host"], default="peer")
    parser.add_argument("--dynamic", action="store_true", help="the system that this replaces, whole")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if arguments.batches < 8:
        parser.error("--batches: at least 8, of which the first few are left out")
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if arguments.device == "cpu":
        gpus = [torch.device("cpu")]
    target = load(arguments, SHAPES[arguments.shape], gpus)
    shape = with_taps(SHAPES[arguments.shape], target.facts.num_layers)
    data = make_documents(shape.num_tokens * 6, shape.mean_length, target.facts)
    if arguments.dynamic:
        row = measure_replaced(arguments, shape, target, data)
    else:
        row = measure(arguments, shape, gpus, target, data)
    result = {
        "shape": arguments.shape,
        "system": "dynamic" if arguments.dynamic else "fixed",
        "layers": target.facts.num_layers,
        "gpus": len(gpus),
        **row,
    }
    table(result)
    print(json.dumps(result))


def table(result: dict[str, Any]) -> None:
    """The figures without the curves, and what the curves span."""
    for key, value in result.items():
        if key not in ("curves", "shares"):
            print(f"{key:28} {value}")
    for name, curve in result["curves"].items():
        share = [value for value in curve["utilisation"] if value is not None]
        used, held = curve["used_gb"] or [0.0], curve["allocated_gb"] or [0.0]
        mean = sum(share) / len(share) if share else float("nan")
        print(
            f"{name}: utilisation {mean:.0%} on average, at times {min(share, default=0):.0%}; "
            f"{min(used):.1f}-{max(used):.1f} GB used, {min(held):.1f}-{max(held):.1f} GB in tensors"
        )


if __name__ == "__main__":
    main()
