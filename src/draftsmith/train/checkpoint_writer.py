"""Writes checkpoints in the background, so that none is ever half there and no step waits for a disk.

A folder gets its name only once every file in it is on the disk, so a name is a promise; checksums catch what breaks
later. The training thread pays for one copy into host buffers that stand from the start; a thread does the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from draftsmith import __version__
from draftsmith.errors import CheckpointError
from draftsmith.records import EMPTY
from draftsmith.train.checkpoint import (
    BEST,
    EXTRA,
    FORMAT,
    MASTERS,
    META,
    OPTIMIZER,
    CheckpointConfig,
    Position,
    RunRecord,
    checkpoint_folders,
    delete_folders,
    read_best,
    sha256,
)
from draftsmith.train.step import TrainState

LEFTOVER = re.compile(r"\.(writing|deleting|replaced)-step-.*")


@final
class CheckpointWriter:
    """Writes checkpoints of one TrainState from a thread of its own; one writer per run.

    Owns host buffers as large as masters and moments together (12 bytes a parameter, page-locked beside a GPU).
    """

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        state: TrainState,
        record: RunRecord,
        extra: Mapping[str, Tensor] = EMPTY,
    ) -> None:
        """Allocate the buffers and sweep up what a killed writer left.

        Args:
            run_dir: the run; `checkpoints` is made in it.
            config: how many to keep.
            state: what is saved; its tensors must keep their addresses.
            record: goes into every checkpoint.
            extra: further tensors to save and restore, by name (sums not yet logged, for example).
        """
        self._folder = run_dir / "checkpoints"
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            if LEFTOVER.fullmatch(path.name) and not _is_needed(path):
                shutil.rmtree(path)
        self._config, self._record = config, record
        self._best = read_best(self._folder)
        master_N = state.parameters.master_N
        is_cuda = master_N.is_cuda
        live = state.optimizer.tensors() | {EXTRA + name: tensor for name, tensor in extra.items()}

        def on_host(tensor: Tensor) -> Tensor:
            # Written once, so that the first save doesn't wait for the system to find the pages.
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda).zero_()

        host_N = on_host(master_N)
        self._masters = state.parameters.named(host_N)
        self._optimizer = {name: on_host(tensor) for name, tensor in live.items()}
        self._pairs = ((master_N, host_N), *((live[name], host) for name, host in self._optimizer.items()))
        self._copied = torch.cuda.Event(blocking=True) if is_cuda else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, position: Position, score: float | None = None) -> None:
        """Take the state as it is after the work queued so far, and write it in the background.

        Waits only for the checkpoint before, where that is still being written. `score` (higher is better) makes this
        one the best if no earlier one reached it; the best is never deleted.

        Raises:
            CheckpointError: the checkpoint before couldn't be written.
        """
        self.wait()
        for tensor, host in self._pairs:
            host.copy_(tensor.detach(), non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._pairs[0][0].device))
        self._pending = self._thread.submit(self._write, position, score)

    def wait(self) -> None:
        """Return once the last checkpoint is on the disk.

        Raises:
            CheckpointError: it couldn't be written.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"a checkpoint couldn't be written to {self._folder}: {error}; free space there (or mend the "
                "permissions), then continue with --resume"
            ) from error

    def close(self) -> None:
        """Wait for the last checkpoint, then end the thread. Errors as from `wait`."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, position: Position, score: float | None) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        name = f"step-{position.step:08d}"
        folder = self._folder / f".writing-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_file(self._masters, folder / MASTERS)
        save_file(self._optimizer, folder / OPTIMIZER)
        _write_meta(folder, position, self._record, score)
        _settle(folder, self._folder / name)
        if score is not None and (self._best is None or score > self._best[1]):
            self._best = (name, score)
            _write_best(self._folder, self._best)
        kept = {name, self._best[0]} if self._best else {name}
        steps = [path.name for path in checkpoint_folders(self._folder) if not path.name.startswith(".")]
        delete_folders(self._folder / old for old in steps[self._config.keep :] if old not in kept)


def _write_meta(folder: Path, position: Position, record: RunRecord, score: float | None) -> None:
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        for name in (MASTERS, OPTIMIZER)
    }
    body = {
        "format": FORMAT,
        "position": asdict(position),
        "config": dict(record.config),
        "data_fingerprint": record.data_fingerprint,
        "score": score,
        "versions": {
            "draftsmith": __version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        "files": files,
    }
    text = json.dumps(body, indent=2, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    # The digest is a last line of its own, so that a flipped bit in the step number doesn't pass either.
    (folder / META).write_text(f"{text}\n{json.dumps({'sha256': digest})}\n")


def _sync(path: Path) -> None:
    """Ask the disk to hold a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _settle(folder: Path, final_folder: Path) -> None:
    """Give a finished folder its name, durably; one of that name before steps aside until the new one is there."""
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)
    aside = final_folder.with_name(f".replaced-{final_folder.name}")
    if final_folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final_folder.rename(aside)
    folder.rename(final_folder)
    _sync(final_folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _is_needed(leftover: Path) -> bool:
    """Whether a replaced folder stands without its successor: the writer died between two renames."""
    prefix = ".replaced-"
    return leftover.name.startswith(prefix) and not leftover.with_name(leftover.name.removeprefix(prefix)).exists()


def _write_best(folder: Path, best: tuple[str, float]) -> None:
    temporary = folder / f".writing-{BEST}"
    temporary.write_text(json.dumps({"checkpoint": best[0], "score": best[1]}) + "\n")
    _sync(temporary)
    temporary.replace(folder / BEST)
    _sync(folder)
