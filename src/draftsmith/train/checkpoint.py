"""Training checkpoints: what they hold, how they are found, checked and restored.

    RUN/checkpoints/step-00000123/{masters,optimizer}.safetensors + meta.json
    RUN/checkpoints/best.json        which of them scored best

Taken between steps, where gradients and sums are zero, so neither is saved. `checkpoint_writer.py` writes them; here is
what a run folder may hold, and how it is read: every byte against its checksum, the one before where one is damaged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.records import EMPTY
from draftsmith.train.step import TrainState

logger = logging.getLogger(__name__)

FORMAT = 1
MASTERS, OPTIMIZER, META, BEST = "masters.safetensors", "optimizer.safetensors", "meta.json", "best.json"
EXTRA = "extra."
"""Prefix, inside the optimizer's file, of tensors that the training loop adds."""
FOLDER = re.compile(r"(\.replaced-)?step-(\d{8,})")
"""A checkpoint; `.replaced-` where a newer one of that step was about to take its name when the writer died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When training saves itself, and what it keeps."""

    save_every: int = 500
    """Steps between checkpoints; the last step and an interrupted run always save one."""
    keep: int = 2
    """Newest checkpoints kept, besides the best."""

    def __post_init__(self) -> None:
        if self.save_every < 1:
            raise ConfigError(f"--save-every {self.save_every} is not 1 or more; use a large number to save rarely")
        if self.keep < 1:
            raise ConfigError(f"--keep {self.keep} would delete the only checkpoint; needed: 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands between two steps."""

    step: int
    """Updates done."""
    batch: int
    """Number of the next batch."""
    draw: int
    """Next draw of that batch; with the seed and the batch number it is all the state that randomness has."""
    metrics_bytes: int
    """Length of metrics.jsonl; a resume cuts off what came after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What every checkpoint of a run says about it."""

    config: Mapping[str, Any]
    """The resolved configuration as plain JSON values."""
    data_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint, its tensors on the CPU (mapped from the files, so read when used)."""

    path: Path
    position: Position
    record: RunRecord
    versions: Mapping[str, str]
    score: float | None
    masters: Mapping[str, Tensor]
    """fp32, by parameter name."""
    optimizer: Mapping[str, Tensor]
    extra: Mapping[str, Tensor]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def delete_folders(folders: Iterable[Path]) -> None:
    """Take the name away first: a folder half deleted must not look like a checkpoint."""
    for folder in folders:
        leaving = folder.with_name(f".deleting-{folder.name}")
        folder.rename(leaving)
        shutil.rmtree(leaving)


def checkpoint_folders(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first; one that stepped aside after the one that took its name."""
    found: list[tuple[int, bool, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[2]), match[1] is None, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def read_best(folder: Path) -> tuple[str, float] | None:
    """Name and score of the best checkpoint in a `checkpoints` folder, the earliest of equals.

    Read from the checkpoints themselves: a writer killed just before it noted the best in best.json loses nothing.
    """
    best: tuple[str, float] | None = None
    for path in reversed(checkpoint_folders(folder)):
        try:
            score = _read_meta(path)["score"]
        except CheckpointError:
            continue  # damaged: `load_checkpoint` is where that is said
        if score is not None and (best is None or score > best[1]):
            best = (path.name, float(score))
    return best


def best_checkpoint(run_dir: Path) -> Path | None:
    """The folder of the best checkpoint of a run; None before the first evaluation."""
    best = read_best(run_dir / "checkpoints")
    return None if best is None else run_dir / "checkpoints" / best[0]


def discard_after(run_dir: Path, step: int) -> list[str]:
    """Delete checkpoints later than `step`, which a resume from there leaves behind; their names, for the log."""
    folder = run_dir / "checkpoints"
    later = [path for path in checkpoint_folders(folder) if int(path.name.rpartition("-")[2]) > step]
    delete_folders(later)
    return [path.name for path in later]


def load_checkpoint(path: Path) -> Checkpoint:
    """The newest readable checkpoint of a run folder, or exactly the checkpoint folder given.

    Every file is checked against its checksum; a damaged checkpoint of a run is skipped with a warning in the log.

    Raises:
        CheckpointError: no such folder, no checkpoint in it, or none that is undamaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder: give a run folder, or a checkpoint in RUN/checkpoints")
    if not (path / "checkpoints").is_dir() and ((path / META).exists() or FOLDER.fullmatch(path.name)):
        return _read(path)
    candidates = checkpoint_folders(path / "checkpoints")
    if not candidates:
        raise CheckpointError(f"{path} holds no checkpoint: nothing to continue from; start anew with another --out")
    problems: list[str] = []
    for candidate in candidates:
        try:
            return _read(candidate)
        except CheckpointError as error:
            problems.append(str(error))
            logger.warning("%s; trying the one before", error)
    raise CheckpointError(f"no checkpoint in {path} can be read: " + "; ".join(problems))


def _read(folder: Path) -> Checkpoint:
    meta = _read_meta(folder)
    try:
        for name, expected in meta["files"].items():
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(f"checkpoint {folder} is damaged: {name} has {size} of {expected['bytes']} bytes")
            if sha256(folder / name) != expected["sha256"]:
                raise CheckpointError(f"checkpoint {folder} is damaged: {name} doesn't match its checksum")
        masters, saved = load_file(folder / MASTERS), load_file(folder / OPTIMIZER)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}") from error
    return Checkpoint(
        path=folder,
        position=Position(**meta["position"]),
        record=RunRecord(config=meta["config"], data_fingerprint=meta["data_fingerprint"]),
        versions=meta["versions"],
        score=meta["score"],
        masters=masters,
        optimizer={name: tensor for name, tensor in saved.items() if not name.startswith(EXTRA)},
        extra={name.removeprefix(EXTRA): tensor for name, tensor in saved.items() if name.startswith(EXTRA)},
    )


def _read_meta(folder: Path) -> dict[str, Any]:
    """meta.json less its last line, which is the checksum of the rest."""
    try:
        text, _, last = (folder / META).read_text().rstrip("\n").rpartition("\n")
        if json.loads(last) != {"sha256": hashlib.sha256(text.encode()).hexdigest()}:
            raise CheckpointError(f"checkpoint {folder} is damaged: {META} doesn't match its checksum")
        meta = json.loads(text)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read: {error}") from error
    if meta["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {meta['format']}, this draftsmith reads {FORMAT}: "
            f"use draftsmith {meta['versions']['draftsmith']}, which wrote it"
        )
    return meta


@torch.no_grad()
def restore(state: TrainState, checkpoint: Checkpoint, extra: Mapping[str, Tensor] = EMPTY) -> None:
    """Bring `state`, and the tensors of `extra`, to where `checkpoint` was taken: in place, bit for bit.

    Raises:
        CheckpointError: a tensor missing, left over, or of another shape or dtype; the state is then unchanged.
    """
    masters = state.parameters.named(state.parameters.master_N)
    optimizer = state.optimizer.tensors()
    pairs = ((checkpoint.masters, masters), (checkpoint.optimizer, optimizer), (checkpoint.extra, extra))
    for saved, live in pairs:
        _check_fit(checkpoint.path, saved, live)
    for saved, live in pairs:
        for name, tensor in live.items():
            tensor.copy_(saved[name])
    state.parameters.publish()
    state.parameters.grad_N.zero_()
    state.sums.zero_()


def _check_fit(path: Path, saved: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    remedy = "resume with the configuration it was trained with (it stands in the run's checkpoints)"
    if saved.keys() != live.keys():
        missing, extra = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys())
        raise CheckpointError(f"{path} doesn't fit: it lacks {missing or 'nothing'}, holds also {extra}; {remedy}")
    for name, tensor in live.items():
        theirs = saved[name]
        if theirs.shape != tensor.shape or theirs.dtype != tensor.dtype:
            raise CheckpointError(
                f"{path} doesn't fit: {name} is {theirs.dtype} {list(theirs.shape)} there and "
                f"{tensor.dtype} {list(tensor.shape)} here; {remedy}"
            )
