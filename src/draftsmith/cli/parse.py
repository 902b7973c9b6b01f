"""The seam to tyro: flags from config dataclasses, flat, each with its docstring as help."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any, TypeVar, cast

import tyro

from draftsmith.errors import ConfigError, UsageError

T = TypeVar("T")
FRAME = "│╭╮╰╯ "
RULES = "───", "---"
"""Ends of a frame's title and of rules, where the terminal has box characters and where not."""


def parse(kind: type[T], verb: str, arguments: Sequence[str], about: str, default: T | None = None) -> T:
    """An instance of the dataclass `kind` from a command line; prints help or an error and exits where asked to.

    Args:
        kind: the dataclass; nested ones give flat flags.
        verb: for the usage line.
        arguments: what follows the verb.
        about: first paragraph of the help.
        default: values that stand where no flag is given.

    Raises:
        UsageError: what a config class found wrong, or a ConfigError with what tyro did.
    """
    options: dict[str, Any] = {} if default is None else {"default": default}
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parsed: Any = cast(Any, tyro.cli)(
                kind, prog=f"draftsmith {verb}", args=list(arguments), description=about, config=markers, **options
            )
    except SystemExit as end:
        if not end.code:
            raise
        found = _cause(end)
        if found is not None:
            raise found from None
        raise ConfigError(f"{one_line(said.getvalue())} (draftsmith {verb} --help explains every option)") from None
    return cast(T, parsed)


def _cause(end: BaseException) -> UsageError | None:
    """The error of a config class for which tyro ended the parse."""
    error: BaseException | None = end
    while error is not None and not isinstance(error, UsageError):
        error = error.__context__
    return error


def one_line(box: str) -> str:
    """What a framed message of tyro says, up to its first rule, less the frame; with the option that was meant."""
    lines = [line.strip(FRAME) for line in box.splitlines()]
    rules = [index for index, line in enumerate(lines) if line.endswith(RULES)] + [len(lines)] * 2
    kept = [line for line in lines[rules[0] + 1 : rules[1]] if line]
    text = " ".join(kept).partition(" Got errors:")[0].removesuffix(".")
    meant = re.search(r"Perhaps you meant:.*?(--[\w-]+)", box, re.DOTALL)
    return f"{text}; did you mean {meant[1]}?" if meant else text


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
