"""A drafter by whatever names it: a run's folder, one of its checkpoints, a drafter's folder, a hub id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from draftsmith.drafter.model import Drafter, DrafterConfig
from draftsmith.drafter.rope import RopeConfig
from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.evaluate.export import load_zlab
from draftsmith.train.checkpoint import META, Checkpoint, best_checkpoint, load_checkpoint

Which = Literal["newest", "best"]
DRAFTER, CHECKPOINTS = "drafter", "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDrafter:
    """A drafter in fp32 on the CPU, under the name that tables show."""

    name: str
    drafter: Drafter


def run_of(source: str) -> Path | None:
    """The run's folder, where `source` is one, or a checkpoint or the drafter in one."""
    path = Path(source).expanduser()
    for folder in (path, path.parent, path.parent.parent):
        if (folder / CHECKPOINTS).is_dir() and path.is_dir():
            return folder
    return None


def open_drafter(source: str, block_size: int = 0) -> NamedDrafter:
    """The drafter that `source` names: of a run what it exported, or its best or newest checkpoint before that.

    Args:
        source: as above.
        block_size: draft smaller blocks than trained; 0 takes the trained size.

    Raises:
        ExportError, CheckpointError: nothing such there, or it is damaged.
        ConfigError: a block larger than trained.
    """
    path = Path(source).expanduser()
    run = run_of(source)
    if (path / META).is_file():
        drafter = drafter_of(load_checkpoint(path))
    elif run == path and not (path / DRAFTER).is_dir():
        drafter = drafter_of(checkpoint_of(path, "newest" if best_checkpoint(path) is None else "best"))
    else:
        drafter = load_zlab(path / DRAFTER if run == path else source)[1]
    name = run.name if run is not None and path.name in (DRAFTER, run.name) else path.name
    return NamedDrafter(name=name, drafter=with_block(drafter, block_size))


def checkpoint_of(run: Path, which: Which) -> Checkpoint:
    """A checkpoint of a run, or the one given.

    Raises:
        CheckpointError: none there, or none was measured where the best is asked for.
    """
    if which == "newest":
        return load_checkpoint(run)
    best = best_checkpoint(run)
    if best is None:
        raise CheckpointError(f"no checkpoint of {run} was measured: take the newest, or train with --eval-every")
    return load_checkpoint(best)


def drafter_of(checkpoint: Checkpoint) -> Drafter:
    """The drafter of a checkpoint: its resolved architecture with its fp32 masters."""
    drafter = Drafter(architecture_of(checkpoint.record.config))
    drafter.load_state_dict(dict(checkpoint.masters))
    return drafter


def architecture_of(resolved: Mapping[str, Any]) -> DrafterConfig:
    """The DrafterConfig in a checkpoint's resolved configuration."""
    values: dict[str, Any] = dict(resolved["architecture"])
    values["rope"] = RopeConfig(**values["rope"])
    for name in ("layer_types", "taps"):
        values[name] = tuple(values[name])
    return DrafterConfig(**values)


def with_block(drafter: Drafter, block_size: int) -> Drafter:
    """The same weights drafting blocks of `block_size` (0: as trained): what it learnt of the first places holds.

    Raises:
        ConfigError: larger than trained.
    """
    trained = drafter.config.block_size
    if block_size == 0 or block_size == trained:
        return drafter
    if block_size > trained:
        raise ConfigError(f"--block-size {block_size} is larger than the {trained} that this drafter was trained with")
    smaller = Drafter(replace(drafter.config, block_size=block_size))
    smaller.load_state_dict(drafter.state_dict())
    return smaller
