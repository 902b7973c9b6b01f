"""Every draftsmith command in README, guides and recipes is one that the command line takes."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from draftsmith.cli import VERBS
from draftsmith.cli.drafter import EvaluateCommand, VerifyCommand
from draftsmith.cli.parse import parse
from draftsmith.cli.plan import configure_plan
from draftsmith.cli.train import configure
from draftsmith.target.model import TargetConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = {
    "your-first-drafter", "five-targets-two-drafters", "small-cards-and-features-on-disk", "data-and-thinking",
    "serving", "multi-node", "is-a-stock-drafter-enough", "reading-the-report", "planning", "troubleshooting",
    "design-notes",
}  # fmt: skip
FENCE = re.compile(r"^```(?:bash|sh|console)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
START = re.compile(r"(?:^|\s)(?:\.venv/bin/|-m )?draftsmith (?P<rest>[a-z].*?)(?: > \S+)?$")


TARGET = TargetConfig(target="smollm2")
COMMANDS: dict[str, tuple[type, object]] = {
    "evaluate": (EvaluateCommand, EvaluateCommand(target=TARGET)),
    "verify": (VerifyCommand, VerifyCommand(target=TARGET)),
}
"""Verbs that take their target from the run; the others parse `<Verb>Command` of their module."""


def _own_recipe(arguments: list[str]) -> list[str]:
    """A recipe of the reader's own stands for any."""
    return [
        str(ROOT / "recipes" / "qwen3-8b-1gpu.toml") if argument.endswith(".toml") and "/" not in argument else argument
        for argument in arguments
    ]


def commands(text: str) -> list[str]:
    """What follows `draftsmith` on the command lines of a text, continued lines joined."""
    joined = re.sub(r"\\\n(?:#\s*)?\s*", "", text)
    found = (START.search(line.split("  #")[0].rstrip()) for line in joined.splitlines())
    return [match["rest"] for match in found if match]


def documented() -> list[tuple[str, str]]:
    pages = [
        (str(page.relative_to(ROOT)), command)
        for page in PAGES
        for block in FENCE.findall(page.read_text(encoding="utf-8"))
        for command in commands(block)
    ]
    recipes = [
        (str(path.relative_to(ROOT)), command)
        for path in sorted((ROOT / "recipes").glob("*.toml"))
        for command in commands(
            "\n".join(line[1:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#   "))
        )
    ]
    return pages + recipes


DOCUMENTED = documented()


def test_all_guides_are_there_and_have_commands() -> None:
    assert {path.stem for path in (ROOT / "docs" / "guides").glob("*.md")} >= GUIDES
    assert len(DOCUMENTED) > 25


@pytest.mark.parametrize(("where", "command"), DOCUMENTED, ids=[f"{where}: {text}" for where, text in DOCUMENTED])
def test_a_documented_command_parses(where: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # recipes are named from the project's folder
    verb, *arguments = shlex.split(command)
    assert verb in VERBS, f"{where}: {verb}"
    if verb in ("train", "capture"):
        arguments = [argument for argument in arguments if argument != "--dry-run"]
        if "--resume" in arguments or "--plan" in arguments:
            return  # of folders that only a run makes; what they do is tested with one
        configure(_own_recipe(arguments), verb, "")
    elif verb == "plan":
        configure_plan(arguments)
    elif verb in COMMANDS:
        kind, default = COMMANDS[verb]
        parse(kind, verb, arguments, "", default)
    else:
        module = importlib.import_module(f"draftsmith.cli.{VERBS[verb].module}")
        parse(vars(module)[f"{verb.title()}Command"], verb, arguments, "", None)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+\.(?:md|toml))", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"
