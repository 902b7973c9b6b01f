"""Features on disk: FeatureBatches captured once as shards, read back through the same rings.

A store holds the batches of one epoch, trimmed to their used rows. Reading goes over them in a fresh order each epoch
(the first in the order captured, so that it equals the online run bit for bit). Every shard is written beside its name
and renamed, with its checksum in a small file of its own, so a killed capture goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from draftsmith.errors import DataError
from draftsmith.pipeline.buffers import FeatureRing, WaitClock
from draftsmith.pipeline.producing import serve
from draftsmith.records import BatchShape, FeatureBatch

INDEX, TEMPORARY = "features.json", ".tmp"
BY_TOKEN = ("token_ids_T", "loss_mask_T", "features_TFH", "last_hidden_TH")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIndex:
    """What a store holds; resuming a capture or training from it compares these."""

    num_batches: int
    num_tokens: int
    num_documents: int
    num_taps: int
    hidden_size: int
    dtype: str
    last_hidden: bool
    target: str
    taps: tuple[int, ...]
    data_fingerprint: str
    num_supervised: int
    """Supervised tokens of the epoch."""
    context: str = ""
    """Which drafter's frozen `fc` and `hidden_norm` made the features into [T, H] (`inputs.context_id`); "" none's."""

    @property
    def shape(self) -> BatchShape:
        return BatchShape(
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_taps=self.num_taps,
            hidden_size=self.hidden_size,
            dtype=torch.float32 if self.dtype == "float32" else torch.bfloat16,
            last_hidden=self.last_hidden,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a capture's features come from."""

    target: str
    taps: tuple[int, ...]
    data_fingerprint: str
    num_supervised: int
    context: str = ""


def index_of(shape: BatchShape, num_batches: int, origin: Origin) -> StoreIndex:
    """The index of a capture of `num_batches` batches."""
    return StoreIndex(
        num_batches=num_batches,
        num_tokens=shape.num_tokens,
        num_documents=shape.num_documents,
        num_taps=shape.num_taps,
        hidden_size=shape.hidden_size,
        dtype=str(shape.dtype).removeprefix("torch."),
        last_hidden=shape.last_hidden,
        target=origin.target,
        taps=origin.taps,
        data_fingerprint=origin.data_fingerprint,
        num_supervised=origin.num_supervised,
        context=origin.context,
    )


def batch_tokens(num_tokens: Tensor) -> int:
    """Used rows of a batch, on the host."""
    return int(num_tokens.item())


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"batch-{number:06d}.safetensors"


class StoreWriter:
    """Writes the batches of a capture; those already there and whole are skipped."""

    def __init__(self, folder: Path, index: StoreIndex) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / INDEX
        wanted = json.loads(json.dumps(asdict(index)))
        if path.exists():
            there = json.loads(path.read_text(encoding="utf-8"))
            there.setdefault("context", "")  # captures from before there was a choice
            changed = sorted(key for key in wanted if there.get(key) != wanted[key])
            if changed:
                raise DataError(
                    f"{folder} holds features of another capture ({', '.join(changed)} differ): give another --out"
                )
        else:
            if any(item.name != INDEX + TEMPORARY for item in folder.iterdir()):
                raise DataError(f"{folder} is not empty and holds no features: give another --out")
            _write_atomically(path, json.dumps(wanted, indent=1).encode())
        self.folder = folder
        self.missing = [n for n in range(index.num_batches) if not _is_whole(shard_path(folder, n))]

    def write(self, number: int, batch: FeatureBatch) -> int:
        """Write batch `number`; returns its bytes."""
        used = batch_tokens(batch.num_tokens)
        tensors: dict[str, Tensor] = {}
        for name, tensor in batch.tensors().items():
            tensors[name] = (tensor[:used] if name in BY_TOKEN else tensor).contiguous().cpu()
        path = shard_path(self.folder, number)
        temporary = path.with_name(path.name + TEMPORARY)
        save_file(tensors, temporary)
        with temporary.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        size = temporary.stat().st_size
        temporary.replace(path)
        _write_atomically(path.with_suffix(".sha256"), digest.encode())
        return size


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _is_whole(path: Path) -> bool:
    checksum = path.with_suffix(".sha256")
    if not path.exists() or not checksum.exists():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == checksum.read_text()


def read_index(folder: Path) -> StoreIndex:
    """The index of the store in `folder`.

    Raises:
        DataError: no store there, or one whose capture wasn't finished.
    """
    path = folder / INDEX
    if not path.exists():
        raise DataError(f"{folder} holds no captured features: run draftsmith capture --out {folder}")
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values["taps"] = tuple(values["taps"])
        index = StoreIndex(**values)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} can't be read ({error}): capture again into a new folder") from error
    missing = [n for n in range(index.num_batches) if not shard_path(folder, n).with_suffix(".sha256").exists()]
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} of {index.num_batches} batches (the first: {missing[0]}): run the same "
            "draftsmith capture again, it goes on where it stopped"
        )
    return index


def stored_batch(number: int, num_batches: int, seed: int) -> int:
    """Which stored batch is the run's batch `number`: the first epoch in captured order, later ones shuffled."""
    epoch, place = divmod(number, num_batches)
    if epoch == 0:
        return place
    return int(np.random.default_rng([seed, epoch]).permutation(num_batches)[place])


class ShardReadLoop:
    """Takes a target's place: reads stored batches into the drafters' rings, in number order.

    The first time it reads a shard it compares its checksum; a run over several epochs pays for that once.
    """

    def __init__(self, name: str, folder: Path, index: StoreIndex, rings: Sequence[FeatureRing], seed: int) -> None:
        self.clock = WaitClock(name)
        self.requests: list[Callable[[], None]] = []
        self._folder, self._index, self._rings, self._seed = folder, index, rings, seed
        self._checked: set[int] = set()

    def close(self) -> None:
        """Holds nothing open between batches."""
        return

    def produce(self, number: int) -> None:
        """Read batch `number` from its shard and hand it to its drafter's ring.

        Raises:
            DataError: the shard is damaged.
        """
        tensors = self._read(stored_batch(number, self._index.num_batches, self._seed))
        sequence, drafter = divmod(number, len(self._rings))
        ring = self._rings[drafter]
        since = time.perf_counter()
        slot = ring.acquire(sequence, self.clock.name, lambda: serve(self.requests))
        self.clock.room(since)
        if slot.read is not None:
            slot.read.synchronize()
        for name, buffer in slot.batch.tensors().items():
            source = tensors[name]
            if name in BY_TOKEN:
                buffer[: source.shape[0]].copy_(source)
                buffer[source.shape[0] :].zero_()
            else:
                buffer.copy_(source)
        ring.publish(sequence)
        used = batch_tokens(tensors["num_tokens"])
        self.clock.tokens += used
        self.clock.padded_tokens += used

    def _read(self, stored: int) -> dict[str, Tensor]:
        path = shard_path(self._folder, stored)
        remedy = "delete it and run the same draftsmith capture again, it writes what is missing"
        try:
            if stored not in self._checked and not _is_whole(path):
                raise DataError(f"shard {path} is damaged (it doesn't match its checksum): {remedy}")
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"shard {path} is damaged ({error}): {remedy}") from error
        self._checked.add(stored)
        return tensors
