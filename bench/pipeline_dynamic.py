"""The system that fixed shapes replace, whole: threads and a queue, and nothing in it has a fixed size.

A target thread runs the buckets' forwards uncompiled, cuts every document's hidden states out, packs them to a length
of their own and sends them to the CPU as fresh tensors; a drafter thread brings them back as fresh tensors and takes
the dynamic step of `dynamic.py` over them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import Shape
from dynamic import DynamicStep
from torch import Tensor
from watching import Marks, Watch

from draftsmith.data.loader import BatchOrder
from draftsmith.records import BatchPlan, Document, FeatureBatch, ForwardPlan
from draftsmith.target.anatomy import first_tensor
from draftsmith.target.capture import PAD_ID, run_backbone
from draftsmith.target.model import Target, cut_after

QUEUE_SIZE = 2


class DynamicTarget:
    """Forwards of one numbered batch into fresh CPU tensors of its own length."""

    def __init__(self, target: Target, taps: tuple[int, ...], documents: list[Document], order: BatchOrder) -> None:
        self.target, self.taps, self.documents, self.order = target, taps, documents, order

    @torch.no_grad()
    def __call__(self, number: int) -> tuple[dict[str, Tensor], list[int]]:
        plan = self.order.batch(number)
        with cut_after(self.target, self.taps[-1]):
            pieces = [piece for forward in plan.forwards for piece in self._forward(forward)]
        packed = [self.documents[index] for index in plan.documents]
        batch = {
            "features": torch.cat(pieces).to("cpu"),
            "ids": torch.cat([document.token_ids for document in packed]),
            "mask": torch.cat([document.loss_mask for document in packed]),
        }
        return batch, [document.length for document in packed]

    def _forward(self, forward: ForwardPlan) -> list[Tensor]:
        chosen = [self.documents[index] for index in forward.documents]
        ids = torch.full((forward.rows, forward.length), PAD_ID, dtype=torch.int64)
        for row, document in enumerate(chosen):
            ids[row, : document.length] = document.token_ids
        seen: list[Tensor] = []
        handles = [
            self.target.layers[tap].register_forward_hook(
                lambda _module, _args, output: seen.append(first_tensor(output))
            )
            for tap in self.taps
        ]
        try:
            run_backbone(self.target, ids.to(self.target.device))
        finally:
            for handle in handles:
                handle.remove()
        hidden = torch.cat(seen, dim=-1)
        return [hidden[row, : document.length] for row, document in enumerate(chosen)]


def on_device(batch: dict[str, Tensor], lengths: list[int], shape: Shape, device: torch.device) -> FeatureBatch:
    """The batch as fresh device tensors, exactly as long as its documents."""
    sizes = torch.zeros(shape.batch.num_documents, dtype=torch.int64, device=device)
    return FeatureBatch(
        shape=replace(shape.batch, num_tokens=sum(lengths)),
        token_ids_T=batch["ids"].to(device),
        loss_mask_T=batch["mask"].to(device),
        lengths_D=sizes,
        features_TFH=batch["features"].to(device),
        last_hidden_TH=None,
        num_tokens=torch.tensor(sum(lengths), device=device),
    )


def tokens_of(plan: BatchPlan, documents: list[Document]) -> int:
    return sum(documents[index].length for index in plan.documents)


def measure_dynamic(source: DynamicTarget, shape: Shape, batches: int, draws: int, alone: int) -> dict[str, Any]:
    """Target alone, drafter alone, then both as two threads. `draws` 0 balances both sides, as the pipeline does."""
    device = source.target.device
    step = DynamicStep(shape, [], device)

    def train(batch: dict[str, Tensor], lengths: list[int], times: int) -> None:
        moved = on_device(batch, lengths, shape, device)
        for _ in range(times):
            step._step(moved, lengths)

    first, lengths = source(0)
    train(first, lengths, 2)  # the step compiles here, before threads start
    target_seconds = timed(lambda turn: source(turn), alone, device)
    draw_seconds = timed(lambda _turn: train(first, lengths, 1), alone, device)
    draws = draws or max(1, round(target_seconds / draw_seconds))
    marks = Marks([device])
    with Watch([device]) as watch:
        run_both(source, lambda batch, lengths: train(batch, lengths, draws), batches, marks)
    tokens = sum(tokens_of(source.order.batch(number), source.documents) for number in range(batches)) / batches
    row = marks.summary(max(3, batches // 6))
    return {
        "tokens_per_batch": tokens,
        "target_seconds": target_seconds,
        "draw_seconds": draw_seconds,
        "draws": draws,
        "pipeline_tokens_per_s": tokens / row["seconds_per_batch"],
        "serial_seconds": target_seconds + draws * draw_seconds,
        **row,
        "curves": watch.curves(),
    }


def timed(run: Callable[[int], object], count: int, device: torch.device) -> float:
    """Seconds a call over calls 1 .. count."""
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for turn in range(1, count + 1):
        run(turn)
    torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / count


def run_both(
    source: DynamicTarget, train: Callable[[dict[str, Tensor], list[int]], None], batches: int, marks: Marks
) -> None:
    """A target thread and a drafter thread over a bounded queue; an error of either is raised here."""
    device = source.target.device
    ready: queue.Queue[tuple[dict[str, Tensor], list[int]]] = queue.Queue(QUEUE_SIZE)
    errors: list[BaseException] = []
    over = threading.Event()

    def produce() -> None:
        for number in range(batches):
            made = source(number)
            while not over.is_set():
                try:
                    ready.put(made, timeout=0.2)
                    break
                except queue.Full:
                    continue

    def consume() -> None:
        for _ in range(batches):
            while not over.is_set():
                try:
                    batch, lengths = ready.get(timeout=0.2)
                except queue.Empty:
                    continue
                train(batch, lengths)
                torch.cuda.current_stream(device).synchronize()
                marks.take()
                break

    def guarded(work: Callable[[], None]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                work()
        except BaseException as error:
            errors.append(error)
            over.set()
            raise

    torch.cuda.synchronize(device)
    threads = [threading.Thread(target=guarded, args=(work,)) for work in (produce, consume)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
