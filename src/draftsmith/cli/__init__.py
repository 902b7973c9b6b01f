"""argv -> a configuration -> one call. Every verb's `--help` is complete; errors are one line and exit with 2."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from io import TextIOWrapper
from typing import cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftsmith import __version__
from draftsmith.errors import DraftsmithError

USAGE_EXIT = 2
UNREAD_EXIT = 141
"""What a shell reports of a program that SIGPIPE ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A subcommand: where its function lives (imported only when called) and what it is for."""

    module: str
    function: str
    about: str

    def load(self) -> Callable[[Sequence[str]], int]:
        # Modules and their contents stay: looking for garbage among them, here and at the exit, takes a second.
        gc.disable()
        try:
            module = importlib.import_module(f"draftsmith.cli.{self.module}")
        finally:
            gc.freeze()
            gc.enable()
        return cast(Callable[[Sequence[str]], int], vars(module)[self.function])


VERBS: dict[str, Verb] = {
    "train": Verb(module="train", function="train", about="train a drafter for a target on your conversations"),
    "plan": Verb(module="plan", function="plan", about="memory, rates and the best split before anything runs"),
    "report": Verb(module="report", function="report", about="one HTML page about runs: curves, evaluation, memory"),
    "prepare": Verb(module="data", function="prepare", about="turn conversations into token ids and loss masks"),
    "inspect": Verb(module="data", function="inspect", about="see rows with supervised tokens coloured, and lengths"),
    "regenerate": Verb(module="data", function="regenerate", about="replace answers by the target's own"),
    "capture": Verb(module="train", function="capture", about="write a target's features to disk, to train from later"),
    "evaluate": Verb(module="drafter", function="evaluate", about="measure drafters by the draft-verify loop"),
    "chat": Verb(module="chat", function="chat", about="try a drafter in the terminal, accepted tokens coloured"),
    "export": Verb(module="drafter", function="export", about="write a run's drafter in the layout engines load"),
    "verify": Verb(module="drafter", function="verify", about="does an exported drafter serve as it trained?"),
    "completion": Verb(module="completion", function="completion", about="complete all this in bash, zsh or fish"),
}


def main() -> None:
    """Entry of the `draftsmith` command."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a log file or a pipe gets each line as it is said
    try:
        status = run(sys.argv[1:])
    except BrokenPipeError:  # `draftsmith ... | head`: nobody reads on, which is no fault of a path
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        status = UNREAD_EXIT
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit status."""
    debug = "--debug" in arguments
    rest = [argument for argument in arguments if argument != "--debug"]
    console = Console()
    if not rest or rest[0] in ("-h", "--help"):
        _print_help(console)
        return 0
    if rest[0] == "--version":
        console.print(f"draftsmith {__version__}", highlight=False)
        return 0
    verb = VERBS.get(rest[0])
    errors = Console(stderr=True)
    if verb is None:
        near = get_close_matches(rest[0], VERBS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        message = escape(f"unknown verb {rest[0]!r}: {hint}known are {', '.join(VERBS)}")
        errors.print(f"[red]error:[/red] {message}", highlight=False, soft_wrap=True)
        return USAGE_EXIT
    try:
        return verb.load()(rest[1:])
    except DraftsmithError as error:
        if debug:
            raise
        message = str(error)
    except OSError as error:
        if debug or isinstance(error, BrokenPipeError):
            raise
        message = f"{error}: check the path, its permissions and the free space"
    errors.print(f"[red]error:[/red] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
    return USAGE_EXIT


def _print_help(console: Console) -> None:
    console.print("Usage: draftsmith VERB [OPTIONS]   (draftsmith VERB --help explains one)\n", highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, verb in VERBS.items():
        table.add_row(name, verb.about)
    console.print(table)
    console.print("\n--version prints the version; --debug shows a traceback with an error", highlight=False)
