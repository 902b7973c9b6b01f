"""What the scripts complete, asked of the shells themselves, and that they know every option the parsers know."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from draftsmith.cli import VERBS, run
from draftsmith.cli.completion import BEFORE_PARSING, COMMANDS, Option, all_verbs, field_docs, options_of, script

SHELLS = ("bash", "zsh", "fish")
OWN = {"--debug", "--help"}


def answers(shell: str, folder: Path, line: str) -> set[str]:
    """What `shell` offers for a command line whose last word is being typed."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = folder / f"draftsmith.{shell}"
    path.write_text(script(shell), encoding="utf-8")
    ask = {"bash": in_bash, "zsh": in_zsh, "fish": in_fish}[shell]
    return ask(path, line)


def in_bash(path: Path, line: str) -> set[str]:
    # As readline cuts a line into words: at blanks, and around "=".
    words = [word for part in line.split(" ") for word in re.split("(=)", part) if word or "=" not in part]
    code = (
        f"source {path}; complete -p draftsmith >&2; COMP_WORDS=({' '.join(repr(word) for word in words)}); "
        f"COMP_CWORD={len(words) - 1}; _draftsmith; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, cwd=path.parent)
    assert done.stderr.split() == ["complete", "-F", "_draftsmith", "draftsmith"]
    return set(done.stdout.split())


def in_fish(path: Path, line: str) -> set[str]:
    code = f"source {path}; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code],
        capture_output=True, text=True, check=True, cwd=path.parent, env=os.environ | {"HOME": str(path.parent)},
    )  # fmt: skip
    return {offer.partition("\t")[0] for offer in done.stdout.splitlines()}


ZSH = """
autoload -U compinit; compinit -u -d {folder}/dump; source {script}
PROMPT='ready> '; LISTMAX=1000; bindkey '^I' list-choices
"""


def in_zsh(path: Path, line: str) -> set[str]:
    """zsh completes only where it edits lines, so this is a session on a terminal: type, ask for a list, read it."""
    setup = path.parent / "setup.zsh"
    setup.write_text(ZSH.format(folder=path.parent, script=path))
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(path.parent)
        os.execvpe("zsh", ["zsh", "-f", "-i"], os.environ | {"TERM": "dumb"})
    try:
        read_until(terminal, "[%#] ")
        os.write(terminal, f"stty cols 400 rows 500; source {setup}\n".encode())  # so that no list is cut
        read_until(terminal, "ready> ")
        os.write(terminal, f"{line}\t".encode())
        shown = read_until(terminal, "\nready> ")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)
    rows = shown.replace("\r", "").split("\n")[1:-1]  # between the line as typed and as it is shown again
    return {word for row in rows for word in row.partition("  -- ")[0].split()}


def read_until(terminal: int, pattern: str, limit: float = 30.0) -> str:
    """What a terminal shows until `pattern`."""
    text, end = "", time.monotonic() + limit
    while time.monotonic() < end:
        ready, _, _ = select.select([terminal], [], [], 0.5)
        if ready:
            text += os.read(terminal, 65536).decode(errors="replace")
        if re.search(pattern, text):
            return text
    raise AssertionError(f"no {pattern!r} within {limit:.0f} s: {text[-500:]!r}")


CASES: dict[str, tuple[str, set[str], set[str]]] = {
    "a verb": ("draftsmith ex", {"export"}, {"train", "evaluate"}),
    "an option": ("draftsmith train --mask", {"--mask-token-id"}, {"--lr", "--server"}),
    "the opposite of a switch": ("draftsmith train --no-col", {"--no-colocate"}, {"--colocate"}),
    "an option read before parsing": ("draftsmith train --rec", {"--recipe"}, set()),
    "an option of this verb only": ("draftsmith verify --ser", {"--server"}, set()),
    "a value": ("draftsmith train --dtype ", {"auto", "float32", "bfloat16"}, {"--lr", "data.jsonl"}),
    "the start of a value": ("draftsmith train --loss k", {"kl"}, {"ce"}),
    "auto beside a number": ("draftsmith train --layers ", {"auto"}, {"data.jsonl"}),
    "a known name or a path": ("draftsmith chat --target ", {"smollm2", "configs/qwen3-8b", "data.jsonl"}, {"--say"}),
    "a path": ("draftsmith train --data da", {"data.jsonl"}, {"--data"}),
    "a second value": ("draftsmith evaluate --prompts quickstart ", {"gsm8k", "data.jsonl"}, {"--batch"}),
    "a positional behind a value": ("draftsmith evaluate --seed 1 ", {"smollm2-drafter", "data.jsonl"}, {"gsm8k"}),
    "a positional": ("draftsmith completion ", {"bash", "zsh", "fish"}, {"data.jsonl"}),
    "value after an equals sign": ("draftsmith train --dtype=fl", {"float32"}, {"auto"}),
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", CASES)
def test_a_shell_offers(shell: str, name: str, tmp_path: Path) -> None:
    line, offered, absent = CASES[name]
    (tmp_path / "data.jsonl").touch()
    found = answers(shell, tmp_path, line)
    if shell == "fish":  # it repeats the flag before what follows the equals sign
        found |= {offer.rpartition("=")[2] for offer in found}
    assert offered - found == set(), found
    assert found & absent == set()


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_that_help_explains_is_completed(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([verb, "--help"])
    text = capsys.readouterr().out
    explained = set(re.findall(r"^[ │] (?:-h, )?(--[a-z][a-z0-9-]*)", text, re.MULTILINE)) | set(
        re.findall(r", (--no-[a-z-]+)", text)
    )
    early = {option.name for option in BEFORE_PARSING.get(verb, ())}
    (known,) = (one for one in all_verbs() if one.name == verb)
    assert {option.name for option in known.options} - early == explained | OWN
    assert all(name in text for name in early)


def test_every_verb_has_its_config_class_and_every_option_an_explanation() -> None:
    assert list(COMMANDS) == list(VERBS)
    for verb in all_verbs():
        assert all(option.about for option in verb.options), verb.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    kind: Literal["", "one", "two"] = "one"
    """Which one; it matters. Not this."""
    names: tuple[str, ...] = ()
    """It's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    what: Annotated[str, tyro.conf.Positional]
    """What."""
    inner: Inner = field(default_factory=Inner)
    hidden: Annotated[int, tyro.conf.Suppress] = 0
    """Not an option."""
    is_on: bool = False
    """Turn it on."""
    count: int | Literal["auto"] = "auto"
    """How many."""


def test_options_follow_from_types() -> None:
    assert list(options_of(Outer)) == [
        Option(about="What", takes="files"),
        Option(name="--kind", about="Which one; it matters", takes="words", values=("one", "two")),
        Option(name="--names", about="It's names", takes="files", is_many=True),
        Option(name="--is-on", about="Turn it on"),
        Option(name="--no-is-on", about="the opposite of --is-on"),
        Option(name="--count", about="How many", takes="words", values=("auto",)),
    ]
    assert field_docs(Inner) == {"kind": "Which one; it matters", "names": "It's names"}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text == script(shell)
    assert text.startswith("#")
    assert "{{" not in text


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err
