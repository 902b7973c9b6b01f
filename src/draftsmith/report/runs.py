"""What a run's folder tells: its log, settings, data account, evaluations, versions. What is missing stays empty."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from draftsmith.errors import CheckpointError
from draftsmith.train.metrics import read_metrics

CONFIG, EVALUATION, ACCOUNT, META = "config.json", "evaluation.json", "account.json", "meta.json"
ON_POLICY = "on_policy.json"
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as read from its folder."""

    name: str
    folder: Path
    train: Sequence[Line]
    evals: Sequence[Line]
    systems: Sequence[Line]
    config: Mapping[str, Any]
    """As started, by part; {} where the folder has none."""
    resolved: Mapping[str, Any]
    """What was chosen for it."""
    evaluation: Mapping[str, Any]
    """`before` and `after`, as evaluation wrote them."""
    account: Mapping[str, Any]
    """Of its data; {} where it trained from features or data prepared elsewhere."""
    on_policy: Mapping[str, Any]
    """Whether its answers are the target's own; {} where nobody looked."""
    versions: Mapping[str, str]

    @property
    def started(self) -> float:
        """Time of the first line, seconds since 1970."""
        return float(self.train[0]["time"])

    def steps(self) -> list[float]:
        return [float(line["step"]) for line in self.train]

    def minutes(self, lines: Sequence[Line]) -> list[float]:
        """Since the first line."""
        return [(float(line["time"]) - self.started) / 60 for line in lines]

    @property
    def num_gpus(self) -> int:
        """GPUs that took part; 0 on a CPU."""
        return max((len(line.get("gpus", {})) for line in self.systems), default=0)

    def gpu_minutes(self) -> list[float]:
        """Minutes times GPUs (times one on a CPU), up to each train line."""
        return [max(1, self.num_gpus) * minutes for minutes in self.minutes(self.train)]

    def labels(self) -> list[float]:
        """Labels seen up to each train line."""
        return list(accumulate(float(line["labels"]) for line in self.train))

    def values(self, key: str) -> list[float]:
        """A number of every train line, NaN where it is missing."""
        return [number(line.get(key)) for line in self.train]

    def labels_at(self, step: float) -> float:
        """Labels seen when `step` was done."""
        seen = [count for at, count in zip(self.steps(), self.labels(), strict=True) if at <= step]
        return seen[-1] if seen else 0.0

    def true_taus(self) -> list[tuple[float, Mapping[str, float]]]:
        """(step, interval of tau) of every measurement by the draft-verify loop, the ends' included."""
        found = [(float(line["step"]), cast(Mapping[str, float], line["tau"])) for line in self.evals]
        last = self.steps()[-1]
        for when, step in (("before", 0.0), ("after", last)):
            if when in self.evaluation and step not in [at for at, _ in found]:
                found.append((step, self.evaluation[when]["summary"]["tau"]))
        return sorted(found, key=lambda each: each[0])


def number(value: Any) -> float:
    """A number for a picture: NaN leaves a gap."""
    return float(value) if isinstance(value, int | float) else float("nan")


def read_run(folder: Path, name: str) -> Run:
    """Read what is there.

    Raises:
        CheckpointError: no log, or one without a single train line.
    """
    lines = read_metrics(folder)
    train = [line for line in lines if line["kind"] == "train"]
    if not train:
        raise CheckpointError(f"{folder} has logged no step yet: report it once it has, or lower --log-every")
    record = _json(folder / CONFIG)
    metas = sorted((folder / "checkpoints").glob(f"step-*/{META}"))
    data = _json(folder / "data" / ACCOUNT) or _json(Path(str(_in(record, "config", "data").get("data"))) / ACCOUNT)
    return Run(
        name=name,
        folder=folder,
        train=train,
        evals=[line for line in lines if line["kind"] == "eval" and line.get("tau")],
        systems=[line for line in lines if line["kind"] == "system"],
        config=_in(record, "config"),
        resolved=_in(record, "resolved"),
        evaluation=_json(folder / EVALUATION),
        account=_in(data, "account"),
        on_policy=_json(folder / ON_POLICY) or _in(data, "on_policy"),
        versions=_in(_json(metas[-1]), "versions") if metas else {},
    )


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Runs with names that tell them apart: the last part of the path, or as much of it as needed.

    Raises:
        CheckpointError: as `read_run`.
    """
    names = [folder.resolve().name for folder in folders]
    short = len(set(names)) == len(names)
    return [read_run(folder, name if short else str(folder)) for folder, name in zip(folders, names, strict=True)]


def _in(record: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    found: Any = record
    for key in keys:
        found = found.get(key) or {}
    return cast(Mapping[str, Any], found)


def _json(path: Path) -> dict[str, Any]:
    """The first JSON object of a file, {} where there is none (a checkpoint's meta has its digest behind it)."""
    if not path.is_file():
        return {}
    try:
        body, _ = json.JSONDecoder().raw_decode(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}): restore it, or delete it to report without it") from error
    return cast(dict[str, Any], body)
