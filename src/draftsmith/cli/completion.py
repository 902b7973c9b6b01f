"""`draftsmith completion`: a script with which a shell completes verbs, options and their values.

The script holds everything, so that pressing TAB starts no Python. Options are read from the config classes that the
verbs parse.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import shlex
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import jinja2
import tyro

from draftsmith import __version__
from draftsmith.cli import VERBS
from draftsmith.cli.chat import ChatCommand
from draftsmith.cli.data import InspectCommand, PrepareCommand, RegenerateCommand
from draftsmith.cli.drafter import EvaluateCommand, ExportCommand, VerifyCommand
from draftsmith.cli.parse import parse
from draftsmith.cli.plan import PlanCommand
from draftsmith.cli.report import ReportCommand
from draftsmith.evaluate.export import PACKAGED
from draftsmith.evaluate.prompts import BUILT_IN, NAMED_SETS
from draftsmith.pipeline.run import RunConfig
from draftsmith.plan.calibration import CARDS
from draftsmith.target.bundled import HUB_CONFIGS, config_names
from draftsmith.target.smollm2 import NAME

ABOUT = """Print a script that completes verbs, options and values in a shell. Where it goes:

bash: ~/.local/share/bash-completion/completions/draftsmith (with the package bash-completion), or source it.
zsh: a file _draftsmith in a folder of $fpath, before compinit. fish: ~/.config/fish/completions/draftsmith.fish"""
Takes = Literal["nothing", "words", "files"]
LONGEST_ABOUT = 72
KNOWN: Mapping[str, Sequence[str]] = {
    "target": (NAME, *config_names(), *HUB_CONFIGS),
    "drafter": (PACKAGED,),
    "drafters": (PACKAGED,),
    "init_from": (PACKAGED,),
    "prompts": (BUILT_IN, *NAMED_SETS),
    "hardware": tuple(card.name for card in CARDS),
}
"""Values by field that its type doesn't show; others are allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A flag, or what stands without one: what may follow it."""

    name: str = ""
    about: str = ""
    takes: Takes = "nothing"
    """`words`: one of `values` or something that can't be guessed, `files`: paths beside `values`."""
    values: tuple[str, ...] = ()
    is_many: bool = False
    """Any number of values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbOptions:
    """A verb with everything that may follow it."""

    name: str
    about: str
    options: tuple[Option, ...]
    positional: Option


HELP = Option(name="--help", about="explain every option")
DEBUG = Option(name="--debug", about="show a traceback with an error")
RECIPE = Option(name="--recipe", about="take settings from a recipe", takes="files")
STARTS = (
    RECIPE,
    Option(name="--plan", about="take what draftsmith plan saved", takes="files"),
    Option(name="--resume", about="continue this run", takes="files"),
)
REHEARSE = Option(name="--dry-run", about="three real steps, a checkpoint, an export, an evaluation, in minutes")
BEFORE_PARSING: Mapping[str, Sequence[Option]] = {
    "train": (*STARTS, REHEARSE),
    "capture": STARTS,
    "plan": (RECIPE,),
}
"""Flags that a verb reads before its config class is parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCommand:
    """For which shell."""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """The shell."""


COMMANDS: Mapping[str, type] = {
    "train": RunConfig,
    "plan": PlanCommand,
    "report": ReportCommand,
    "prepare": PrepareCommand,
    "inspect": InspectCommand,
    "regenerate": RegenerateCommand,
    "capture": RunConfig,
    "evaluate": EvaluateCommand,
    "chat": ChatCommand,
    "export": ExportCommand,
    "verify": VerifyCommand,
    "completion": CompletionCommand,
}
"""What each verb parses."""


def completion(arguments: Sequence[str]) -> int:
    """Print the script."""
    print(script(parse(CompletionCommand, "completion", arguments, ABOUT).shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion script of `shell`: bash, zsh or fish."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["quoted"] = shlex.quote
    environment.filters["fish"] = fish_quoted
    text = (files("draftsmith") / "assets" / "completion" / f"{shell}.sh").read_text(encoding="utf-8")
    return environment.from_string(text).render(version=__version__, verbs=all_verbs())


def fish_quoted(text: str) -> str:
    """As one word of fish, whose single quotes know two escapes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def all_verbs() -> list[VerbOptions]:
    """Every verb of the command, in the order of its help."""
    found: list[VerbOptions] = []
    for name, verb in VERBS.items():
        own = list(options_of(COMMANDS[name]))
        found.append(
            VerbOptions(
                name=name,
                about=verb.about,
                options=(*(one for one in own if one.name), *BEFORE_PARSING.get(name, ()), DEBUG, HELP),
                positional=next((one for one in own if not one.name), Option()),
            )
        )
    return found


def options_of(kind: Any) -> Iterator[Option]:
    """What a config class parses, nested ones included; a positional has no name."""
    hints = get_type_hints(kind, include_extras=True)
    docs = field_docs(kind)
    for field in fields(kind):
        hint, markers = hints[field.name], ()
        if get_origin(hint) is Annotated:
            hint, *markers = get_args(hint)
        if tyro.conf.Suppress in markers:
            continue
        if is_dataclass(hint):
            yield from options_of(hint)
            continue
        name = f"--{field.name.replace('_', '-')}"
        about = docs.get(field.name, "")
        if hint is bool:
            yield Option(name=name, about=about)
            yield Option(name=f"--no-{name[2:]}", about=f"the opposite of {name}")
            continue
        is_many = get_origin(hint) is tuple or _is_mapping(hint)
        inner = get_args(hint)[0] if get_origin(hint) is tuple else hint
        yield Option(
            name="" if tyro.conf.Positional in markers else name,
            about=about,
            takes="files" if _takes_text(inner) else "words",
            values=(*_literals(inner), *KNOWN.get(field.name, ())),
            is_many=is_many,
        )


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _takes_text(hint: Any) -> bool:
    """Whether any text is a value, a path for instance."""
    return hint is str or (get_origin(hint) in (Union, types.UnionType) and str in get_args(hint))


def _literals(hint: Any) -> tuple[str, ...]:
    """The values that a type spells out, in its order; an empty one can't be completed."""
    if get_origin(hint) is Literal:
        return tuple(str(value) for value in get_args(hint) if value != "")
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(value for each in get_args(hint) for value in _literals(each))
    return ()


def field_docs(kind: Any) -> dict[str, str]:
    """The first sentence of each field's docstring, as it stands in the source below the field."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    body = cast(ast.ClassDef, tree).body
    found: dict[str, str] = {}
    for before, after in itertools.pairwise(body):
        if not isinstance(before, ast.AnnAssign) or not isinstance(before.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            sentence = " ".join(str(after.value.value).split()).partition(". ")[0].removesuffix(".")
            found[before.target.id] = textwrap.shorten(sentence, LONGEST_ABOUT, placeholder=" ...")
    return found
