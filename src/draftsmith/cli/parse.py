"""The seam to tyro: flags from config dataclasses, flat, each with its docstring as help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import tyro

T = TypeVar("T")


def parse(kind: type[T], verb: str, arguments: Sequence[str], about: str, default: T | None = None) -> T:
    """An instance of the dataclass `kind` from a command line; prints help or an error and exits where asked to.

    Args:
        kind: the dataclass; nested ones give flat flags.
        verb: for the usage line.
        arguments: what follows the verb.
        about: first paragraph of the help.
        default: values that stand where no flag is given.
    """
    options: dict[str, Any] = {} if default is None else {"default": default}
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    parsed: Any = cast(Any, tyro.cli)(
        kind, prog=f"draftsmith {verb}", args=list(arguments), description=about, config=markers, **options
    )
    return cast(T, parsed)


def peek(arguments: Sequence[str], flag: str) -> str | None:
    """The value of `--flag value` or `--flag=value` before the real parse; None where it isn't given."""
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return None


def without(arguments: Sequence[str], flag: str) -> list[str]:
    """`arguments` less `--flag value` or `--flag=value`."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == flag:
            skip = True
        elif not argument.startswith(f"{flag}="):
            kept.append(argument)
    return kept
