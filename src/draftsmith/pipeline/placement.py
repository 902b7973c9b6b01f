"""Which device does what."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftsmith.errors import ConfigError
from draftsmith.pipeline.settings import PipelineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices of the target and drafter workers; `joint` workers do both in turns, on the same device each."""

    targets: tuple[torch.device, ...]
    drafters: tuple[torch.device, ...]
    joint: bool
    why: str
    remarks: tuple[str, ...] = ()
    """What a person should know of this split before it runs."""

    @property
    def on_gpu(self) -> bool:
        return self.drafters[0].type == "cuda"

    def describe(self) -> str:
        """As people read it: `5 targets (cuda:0-4), 2 drafters (cuda:5-6)`."""
        if self.joint:
            return f"both roles on {', '.join(map(str, self.drafters))}"
        targets, drafters = ", ".join(map(str, self.targets)), ", ".join(map(str, self.drafters))
        return f"{len(self.targets)} target(s) on {targets}; {len(self.drafters)} drafter(s) on {drafters}"


def place(config: PipelineConfig, *, reads_features: bool = False) -> Placement:
    """Assign devices: targets first, drafters last. Roles that are still open get two of seven; a training run has
    chosen them by rates before.

    Args:
        config: what was asked for.
        reads_features: whether features come from disk, so that no GPU is needed for a target.

    Raises:
        ConfigError: more workers than GPUs, or GPUs asked for where there are none.
    """
    num_gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and num_gpus == 0:
        raise ConfigError("--device cuda, but no GPU is visible: check the driver, or leave --device out")
    if num_gpus == 0:
        return _place_on_cpu(config)
    gpus = [torch.device("cuda", index) for index in range(num_gpus)]
    if config.colocate:
        return Placement(targets=tuple(gpus), drafters=tuple(gpus), joint=True, why="--colocate")
    if reads_features:
        count = num_gpus if config.drafters == "auto" else config.drafters
        _check_fits(count, num_gpus)
        cpu = torch.device("cpu")
        return Placement(targets=(cpu,), drafters=tuple(gpus[:count]), joint=False, why="features come from disk")
    if num_gpus == 1 and config.targets in ("auto", 1) and config.drafters in ("auto", 1):
        return Placement(targets=(gpus[0],), drafters=(gpus[0],), joint=True, why="one GPU")
    drafters = config.drafters
    if drafters == "auto":
        drafters = num_gpus - config.targets if config.targets != "auto" else max(1, round(num_gpus * 2 / 7))
    targets = num_gpus - drafters if config.targets == "auto" else config.targets
    _check_fits(targets + drafters, num_gpus)
    if targets < 1 or drafters < 1:
        raise ConfigError(f"{num_gpus} GPUs leave no room for both roles: lower --targets or --drafters, or --colocate")
    return Placement(
        targets=tuple(gpus[:targets]),
        drafters=tuple(gpus[targets : targets + drafters]),
        joint=False,
        why="given" if config.targets != "auto" and config.drafters != "auto" else "two of seven train",
    )


def _check_fits(workers: int, num_gpus: int) -> None:
    if workers > num_gpus:
        raise ConfigError(
            f"{workers} workers need {workers} GPUs, {num_gpus} are visible: lower --targets or --drafters"
        )


def _place_on_cpu(config: PipelineConfig) -> Placement:
    cpu = torch.device("cpu")
    if config.targets == "auto" and config.drafters == "auto":
        return Placement(targets=(cpu,), drafters=(cpu,), joint=True, why="no GPU")
    targets = 1 if config.targets == "auto" else config.targets
    drafters = 1 if config.drafters == "auto" else config.drafters
    return Placement(targets=(cpu,) * targets, drafters=(cpu,) * drafters, joint=False, why="given, on the CPU")
