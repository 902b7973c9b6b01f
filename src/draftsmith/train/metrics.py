"""What a run tells about itself: metrics.jsonl (schema: docs/metrics.md), TensorBoard beside it, wandb if asked.

All host reads of a run's numbers happen here, at log points only: `read_step` costs one wait for the device.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, cast, final

import torch
from torch import Tensor

from draftsmith.drafter.loss import LossSums
from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.records import EMPTY
from draftsmith.train.step import TrainState

FILE = "metrics.jsonl"
Kind = Literal["train", "eval", "system"]
Value = float | int | str | bool | None | Sequence["Value"] | Mapping[str, "Value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """How often training reads its numbers, and who else hears of them."""

    log_every: int = 10
    """Steps between log lines; each costs one wait for the device."""
    wandb_project: str = ""
    """Also log to this Weights & Biases project (needs the extra: pip install 'draftsmith[wandb]')."""

    def __post_init__(self) -> None:
        if self.log_every < 1:
            raise ConfigError(f"--log-every {self.log_every} is not 1 or more; use a large number to log rarely")


def summarise_sums(totals: Tensor, block_size: int) -> dict[str, Any]:
    """The numbers of a LossSums vector, read on the host.

    Args:
        totals: `4 + 3 B` sums as `draftsmith.drafter.loss.LossSums` lays them out, of any float dtype.
        block_size: B.

    Returns:
        `loss`, `ce` (means), `numerator`, `denominator`, `labels`, `accuracy` (share of all labels guessed right), and
        per place 1 .. B-1 the lists `place_labels`, `place_accuracy`, `place_survival` (share guessed right with every
        earlier place right), and `uniform_tau` = 1 + the sum of the survivals: what a verify step would commit if
        blocks began at uniformly drawn tokens. Real blocks begin where the one before was rejected, at harder tokens,
        so it overstates tau; it is never called acceptance. None wherever there is nothing to divide by; a place
        without labels adds nothing to `uniform_tau`.
    """
    assert totals.numel() == LossSums.num_sums(block_size), (totals.shape, block_size)
    return _summary(cast(list[float], totals.tolist()), block_size)


def _summary(sums: list[float], block_size: int) -> dict[str, Any]:
    numerator, denominator, ce, labels = sums[:4]
    by_place = [sums[4 + part * block_size : 4 + (part + 1) * block_size][1:] for part in range(3)]
    place_labels, right, survived = by_place
    survival = [_ratio(*pair) for pair in zip(survived, place_labels, strict=True)]
    return {
        "loss": _ratio(numerator, denominator),
        "numerator": numerator,
        "denominator": denominator,
        "ce": _ratio(ce, labels),
        "labels": labels,
        "accuracy": _ratio(sum(right), sum(place_labels)),
        "place_labels": place_labels,
        "place_accuracy": [_ratio(*pair) for pair in zip(right, place_labels, strict=True)],
        "place_survival": survival,
        "uniform_tau": 1.0 + sum(share for share in survival if share is not None) if labels > 0 else None,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def read_step(state: TrainState, totals: Tensor) -> dict[str, Any]:
    """`summarise_sums` of what was collected since the last log point, with the optimizer's numbers.

    Adds `lr` and `grad_norm` (before clipping) of the last step, and `skipped` (steps left out for a non-finite
    gradient) and `empty` (steps without a label), both counted from the start of the run. One transfer, one wait.
    """
    optimizer = state.optimizer
    scalars = (optimizer.lr, optimizer.grad_norm, optimizer.skipped, optimizer.empty)
    together = torch.cat([totals.double(), torch.stack([scalar.double() for scalar in scalars])])
    numbers = cast(list[float], together.tolist())
    lr, grad_norm, skipped, empty = numbers[-4:]
    summary = _summary(numbers[:-4], state.loss.block_size)
    return summary | {"lr": lr, "grad_norm": grad_norm, "skipped": int(skipped), "empty": int(empty)}


class Sink(Protocol):
    """Another place that log lines go to, as flat numbers by slash-separated name."""

    def add(self, numbers: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@final
class MetricsWriter:
    """Appends lines to metrics.jsonl, whole and at once, and passes their numbers on. For one thread, on one rank.

    TensorBoard's events stand in RUN/tensorboard; events past the step of a resume are hidden there.
    """

    def __init__(self, run_dir: Path, *, position: int = 0, resumed_step: int = 0, sinks: Sequence[Sink] = ()) -> None:
        """Open the file and cut it to `position` bytes.

        Args:
            run_dir: the run.
            position: `metrics_bytes` of the checkpoint that the run continues from; 0 starts anew.
            resumed_step: its step.
            sinks: further places to write to; closed with the writer.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / FILE
        path.touch()
        with path.open("rb+") as file:
            kept = file.read(position)
            # After a power cut the file may be shorter than the checkpoint remembers: keep its whole lines.
            file.truncate(kept.rfind(b"\n") + 1)
        self._file = path.open("ab")
        self._sinks: tuple[Sink, ...] = (TensorBoardSink(run_dir / "tensorboard", resumed_step), *sinks)

    def sync(self) -> int:
        """Bytes written so far, for a checkpoint's `metrics_bytes`; they are on the disk when this returns."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def write(self, kind: Kind, step: int, values: Mapping[str, Value]) -> None:
        """One line: `kind`, `step` (updates done), `time` (seconds since 1970), then `values`.

        Numbers that aren't finite become null, since JSON has no word for them.
        """
        line = {"kind": kind, "step": step, "time": round(time.time(), 3)} | {
            key: _finite(value) for key, value in values.items()
        }
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()
        numbers = flat_numbers(line, kind)
        for sink in self._sinks:
            sink.add(numbers, step)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in cast(Sequence[Any], value)]
    return value


def flat_numbers(line: Mapping[str, Any], kind: str) -> dict[str, float]:
    """The numbers of a line by name: `train/loss`; list entries count from 1 (`train/place_survival/1`)."""
    found: dict[str, float] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, bool | int | float):
            found[name] = float(value)
        elif isinstance(value, dict):
            for key, inner in cast(dict[str, Any], value).items():
                walk(f"{name}/{key}", inner)
        elif isinstance(value, list):
            for index, inner in enumerate(cast(list[Any], value), start=1):
                walk(f"{name}/{index}", inner)

    for key, value in line.items():
        if key not in ("kind", "step", "time"):
            walk(f"{kind}/{key}", value)
    return found


@final
class TensorBoardSink:
    """Scalars for TensorBoard."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        # Imported when first needed: it takes a second, and most commands never log.
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


@final
class WandbSink:
    """Scalars for Weights & Biases."""

    def __init__(self, run: Any) -> None:
        """`run`: what `wandb.init` returns."""
        self._run = run

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def open_wandb(project: str, run_dir: Path, config: Mapping[str, Any] = EMPTY) -> WandbSink:
    """A wandb run named after the run folder, which a resume continues.

    Raises:
        ConfigError: wandb isn't installed.
    """
    try:
        wandb: Any = importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "--wandb-project needs the wandb extra: pip install 'draftsmith[wandb]', or leave the option out"
        ) from error
    name = run_dir.resolve().name
    return WandbSink(wandb.init(project=project, name=name, id=name, resume="allow", config=dict(config)))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics, oldest first.

    Args:
        path: a metrics.jsonl, or the run folder that holds it.

    Raises:
        CheckpointError: no such file, or a broken line that isn't the last (a killed writer may tear the last one,
            which is left out).
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file} doesn't exist: give the folder of a run that has logged at least once")
    lines = file.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise CheckpointError(f"{file}, line {number} is not JSON ({error}): delete that line") from error
    return records
