"""A run's configuration as a recipe, in TOML: what differs from the defaults, and what is to be seen anyway."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, cast


def to_toml(config: Any, always: AbstractSet[str], never: AbstractSet[str]) -> str:
    """The recipe that `config`, a dataclass of dataclasses, is built from.

    Args:
        config: the configuration.
        always: keys (`batch.epochs`) that are written where they have their default too.
        never: keys that are left out.
    """
    return "\n\n".join("\n".join(lines) for lines in _tables(config, "", always, never)) + "\n"


def _tables(config: Any, path: str, always: AbstractSet[str], never: AbstractSet[str]) -> Iterator[list[str]]:
    """A list of lines for every table that has any, from the top down."""
    prefix = f"{path}." if path else ""
    values = [(field, f"{prefix}{field.name}", getattr(config, field.name)) for field in fields(config)]
    lines = [
        f"{field.name} = {_value(value)}"
        for field, key, value in values
        if not is_dataclass(value) and key not in never and (key in always or value != _default(field))
    ]
    if lines:
        yield [f"[{path}]", *lines] if path else lines
    for _, key, value in values:
        if is_dataclass(value):
            yield from _tables(value, key, always, never)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for one character that TOML wants escaped as well.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value).items()
        return "{ " + ", ".join(f"{_value(name)} = {_value(one)}" for name, one in pairs) + " }"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_value, cast(tuple[Any, ...], value))) + "]"
    return repr(value)
