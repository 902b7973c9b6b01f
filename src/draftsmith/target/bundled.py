"""Model configs that ship with the package: sizes without weights, for plans and random-weight benchmarks.

They name a target `configs/qwen3-8b`; `HUB_CONFIGS` says which hub ids they describe, so that a plan needs no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from draftsmith.errors import TargetError

PREFIX = "configs/"
HUB_CONFIGS: Mapping[str, str] = {"Qwen/Qwen3-8B": "configs/qwen3-8b", "Qwen/Qwen3.6-27B": "configs/qwen3.6-27b"}
"""The bundled config of a hub id."""


def config_names() -> tuple[str, ...]:
    """The bundled configs, as `--target` takes them."""
    return tuple(f"{PREFIX}{folder.name}" for folder in sorted(_root().iterdir()) if folder.is_dir())


def config_folder(name: str) -> Path:
    """The folder of a bundled config (`configs/qwen3-8b`): a config.json, no weights and no tokenizer.

    Raises:
        TargetError: none of that name.
    """
    if name not in config_names():
        raise TargetError(f"there is no bundled config {name}: known are {', '.join(config_names())}")
    return _root() / name.removeprefix(PREFIX)


def _root() -> Path:
    return Path(str(files("draftsmith") / "assets" / "configs"))
