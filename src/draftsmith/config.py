"""Assembles a RunConfig: a TOML recipe or a run's own record first, then the command line over it.

A recipe's tables are the fields of RunConfig ([target], [data], [drafter], ...); its keys are the fields of each part's
own config class, where the defaults stand. Unknown keys are errors.
"""

from __future__ import annotations

import json
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.pipeline.run import CONFIG, RunConfig


def read_recipe(path: Path) -> dict[str, Any]:
    """The tables of a recipe.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"recipe {path} can't be read ({error.strerror}): check --recipe") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {path} is not TOML ({error}): mend that line") from error


def read_run(run: Path) -> dict[str, Any]:
    """The configuration that a run was started with, as tables.

    Raises:
        CheckpointError: no run there.
    """
    path = run / CONFIG
    try:
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{run} holds no run ({CONFIG} can't be read): check the path") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}): start a new run, or restore the file") from error
    return cast(dict[str, Any], saved["config"])


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over`'s tables laid over `base`'s, key by key."""
    merged = dict(base)
    for key, value in over.items():
        there = merged.get(key)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            merged[key] = merge(cast(Mapping[str, Any], there), cast(Mapping[str, Any], value))
        else:
            merged[key] = value
    return merged


def build_config(tables: Mapping[str, Any], where: str) -> RunConfig:
    """A RunConfig from tables.

    Args:
        tables: as a recipe has them.
        where: for errors, where they came from.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a missing one, or a value of another type.
    """
    return cast(RunConfig, _build(RunConfig, tables, where))


def _build(kind: Any, table: Mapping[str, Any], where: str) -> Any:
    """An instance of a config dataclass; nested dataclasses from nested tables."""
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"{where} has an unknown key {key!r}{hint}")
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name in table:
            values[name] = _value(hints[name], table[name], f"{where} {name}")
        elif is_dataclass(hints[name]) and field.default is MISSING and field.default_factory is MISSING:
            values[name] = _build(hints[name], {}, f"{where} {name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{where} lacks {name!r}: set it there, or give --{name.replace('_', '-')}")
    return kind(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    """`value` as its annotation wants it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is a table of settings, not {value!r}")
        return _build(hint, cast(Mapping[str, Any], value), where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} is a list, not {value!r}")
        items = cast(list[Any], value)
        return tuple(_value(arguments[0], item, where) for item in items)
    if origin in (Union, types.UnionType):
        return _first_fitting(arguments, value, where)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where} is one of {', '.join(map(str, arguments))}, not {value!r}")
        return value
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is a table, not {value!r}")
        return dict(cast(Mapping[str, Any], value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} is a {hint.__name__}, not {value!r}")
    return value


def _first_fitting(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    for choice in choices:
        try:
            return _value(choice, value, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where} doesn't take {value!r}: one of {', '.join(map(_name, choices))}")


def _name(hint: Any) -> str:
    return ", ".join(map(repr, get_args(hint))) if get_origin(hint) is Literal else str(hint.__name__)
