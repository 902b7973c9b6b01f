"""What a run starts from: its folder, its data, its drafter's first weights, its captured features."""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from draftsmith.data.loader import BatchOrder
from draftsmith.data.prepare import PrepareConfig, prepare
from draftsmith.data.prepared import PreparedData, load_prepared
from draftsmith.drafter.initialise import init_from_target
from draftsmith.drafter.model import Drafter, DrafterConfig, init_weights
from draftsmith.errors import CheckpointError, DataError
from draftsmith.pipeline.documents import Documents, hold_out
from draftsmith.pipeline.settings import DataOptions, Init
from draftsmith.pipeline.store import StoreIndex, StoreWriter
from draftsmith.records import Document
from draftsmith.target.capture import Context, PackedCapture
from draftsmith.target.model import Target

ACCOUNT = "account.json"
MARKS = ("config.json", "metrics.jsonl", "checkpoints")
"""Any of these makes a folder a run."""
ON_POLICY = "on_policy.json"
"""What the off-policy alarm found before training."""
ANSWERS = "answers.jsonl"
"""What the target answered before training, where it was to."""
LEFT_OVER = frozenset(
    (
        *("data", "data.partial", ".writing-config.json", "launch.json", ".writing-launch.json"),
        *(ON_POLICY, f".writing-{ON_POLICY}"),
        *(ANSWERS, f"{ANSWERS}.partial", f"{ANSWERS}.new", f"{ANSWERS}.account.json"),
    )
)
"""What a run killed before it was a run leaves: conversations answered and prepared, whole or in part, which are used
again, whose answers they are, and which launch of torchrun it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """Documents to train on, those held out, and what pins the data set down."""

    train: Documents
    held_out: Documents
    fingerprint: str
    num_supervised: int
    """Supervised tokens of the documents to train on."""


def claim_folder(out: Path, *, resume: bool) -> Path:
    """Make the run's folder.

    Raises:
        CheckpointError: it already holds a run, or something else.
    """
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file: give --out a folder")
    holds_run = any((out / mark).exists() for mark in MARKS)
    if holds_run and not resume:
        raise CheckpointError(f"{out} already holds a run: give another --out, or continue it with --resume {out}")
    if resume and not holds_run:
        raise CheckpointError(f"{out} holds no run to resume: check the path, or start one with --out {out}")
    if not resume and out.exists() and any(path.name not in LEFT_OVER for path in out.iterdir()):
        raise CheckpointError(f"{out} is not empty: give --out a new folder (nothing in it was touched)")
    out.mkdir(parents=True, exist_ok=True)
    return out


def write_whole(path: Path, text: str) -> None:
    """Write a file that a kill leaves as it was or as it will be, never in between."""
    scratch = path.with_name(f".writing-{path.name}")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def load_data(
    options: DataOptions, config: PrepareConfig, target: Target, run: Path | None, console: Console
) -> TrainingData:
    """Prepare conversations into the run's folder (None: in memory) or open a prepared data set; hold some out."""
    folder = Path(options.data)
    if (folder / ACCOUNT).is_file():
        data = load_prepared(folder)
        _check_template(data, target, folder)
    else:
        sources = [part.strip() for part in options.data.split(",") if part.strip()]
        data = prepare(sources, target.tokenizer, None if run is None else run / "data", config, console)
    train, held_out = hold_out(data, options.hold_out)
    fingerprint = str(data.facts["fingerprint"])
    return TrainingData(train=train, held_out=held_out, fingerprint=fingerprint, num_supervised=train.num_supervised())


def _check_template(data: PreparedData, target: Target, folder: Path) -> None:
    prepared = data.facts.get("template_hash")
    if target.facts.template_hash and prepared != target.facts.template_hash:
        raise DataError(
            f"{folder} was prepared with another chat template than {target.facts.name} has: prepare it again with "
            f"--target {target.facts.name}"
        )


def start_drafter(
    config: DrafterConfig, init: Init, target: Target | None, seed: int, say: Callable[[str], None]
) -> Drafter:
    """A drafter with its first weights, fp32 on the CPU."""
    drafter = Drafter(config)
    init_weights(drafter, seed)
    if init == "target" and target is not None:
        report = init_from_target(drafter, list(target.layers), target.final_norm, target.facts.layer_types)
        for line in report.lines():
            say(line)
    else:
        say("drafter starts from random weights")
    return drafter


def context_of(drafter: Drafter, device: torch.device, dtype: torch.dtype) -> Context:
    """The drafter's `fc` and `hidden_norm` as they are, on a target's device: features [T, F*H] to context [T, H]."""
    part = nn.Sequential(copy.deepcopy(drafter.fc), copy.deepcopy(drafter.hidden_norm))
    return part.to(device, dtype)


def context_id(drafter: Drafter) -> str:
    """Tells one drafter's `fc` and `hidden_norm` from another's: a digest of both in bf16, as exports hold them."""
    digest = hashlib.sha256()
    for weight in (drafter.fc.weight, drafter.hidden_norm.weight):
        digest.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def capture_features(
    folder: Path,
    capture: PackedCapture,
    documents: Sequence[Document],
    order: BatchOrder,
    index: StoreIndex,
    tell: Callable[[int, int, int], None],
) -> StoreIndex:
    """Capture one epoch's batches into `folder`, going on where an earlier try stopped.

    Args:
        capture: with the index's shape; the caller closes it.
        tell: called after each batch with (batches done, batches in all, tokens of this batch).
    """
    writer = StoreWriter(folder, index)
    needed = len(writer.missing) * index.shape.num_bytes
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"the features need about {needed / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free: choose another "
            "folder, or train without --cache-features"
        )
    for done, number in enumerate(writer.missing, start=index.num_batches - len(writer.missing) + 1):
        batch = capture.run(order.batch(number), documents)
        if number == 0:
            capture.check([documents[document] for document in order.batch(0).documents])
        writer.write(number, batch)
        tell(done, index.num_batches, int(batch.num_tokens.item()))
    return index


def compute_dtype(on_gpu: bool) -> torch.dtype:
    """bfloat16 on a GPU; float32 on the CPU, where bf16 has no fast kernels."""
    return torch.bfloat16 if on_gpu else torch.float32
