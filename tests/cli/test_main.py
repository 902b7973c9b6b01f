"""Verbs, their help, and what a person sees of a mistake: one line that names what to do, and exit status 2."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.cli import UNREAD_EXIT, VERBS, run
from draftsmith.errors import DataError
from tests.cli.conftest import Files


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command fails with."""
    capsys.readouterr()
    assert run(arguments) == 2
    shown = capsys.readouterr().err
    lines = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, shown
    assert "Traceback" not in shown
    assert shown.rstrip().endswith(lines[0])
    return lines[0]


@pytest.mark.parametrize("verb", VERBS)
def test_help_explains_every_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run([verb, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: draftsmith {verb}" in text
    blocks = re.split(r"\n  --(?=[a-z])", text.replace("│", " "))[1:]
    assert blocks or "[OPTIONS]" not in text
    for block in blocks:
        words = block.split("(default")[0].split("(required")[0].split("(repeatable")[0]
        assert len(words.split()) > 4, f"--{block[:60]} of {verb} has no help"


def test_the_list_of_verbs_and_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == run(["--help"]) == run(["--version"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean train?" in refused(["trian"], capsys)


TRAIN = ["train", "--target", "smollm2", "--data", "x", "--out", "r"]
WRONG: dict[str, tuple[list[str], str]] = {
    "unknown flag": ([*TRAIN, "--laers", "3"], "Unrecognized options: --laers, 3; did you mean --layers?"),
    "flag without its value": (["train", "--target", "smollm2", "--data", "x", "--out"], "'--out'. Expected 1 value"),
    "required flag": (["train", "--target", "smollm2", "--data", "x"], "Missing from draftsmith train: --out"),
    "value of another type": ([*TRAIN, "--layers", "q"], "--layers: no type matching INT|{auto}"),
    "config class": ([*TRAIN, "--layers", "0"], "error: --layers 0 is not 1 or more"),
    "nested config class": ([*TRAIN, "--max-length", "1"], "--max-length 1 can't hold a label"),
    "contradiction": ([*TRAIN, "--colocate", "--targets", "2"], "--colocate runs both roles on every GPU: drop"),
    "recipe and resume": (["train", "--recipe", "a", "--resume", "b"], "--recipe and --resume contradict each other"),
    "no recipe": (["train", "--recipe", "nowhere.toml"], "recipe nowhere.toml can't be read"),
    "no run to resume": (["train", "--resume", "/no/run"], "/no/run holds no run"),
    "nothing to train on": (["train", "--target", "smollm2", "--out", "r"], "give --data CHATS, or --features"),
    "target folder": (["train", "--target", "/no/[/x]", "--data", "x", "--out", "/dev/null/r"], "Not a directory"),
    "evaluate nothing": (["evaluate", "--target", "smollm2"], "draftsmith evaluate RUN_OR_DRAFTER"),
    "evaluate without a target": (["evaluate", "/no/drafter"], "no target given"),
    "evaluate block": (["evaluate", "d", "--target", "t", "--block-size", "1"], "--block-size 1 drafts nothing"),
    "no drafter": (["evaluate", "/no/drafter", "--target", "smollm2"], "drafter folder /no/drafter doesn't exist"),
    "export of no run": (["export", "/no/run", "--out", "x"], "/no/run holds no run with checkpoints"),
    "verify nothing": (["verify", "--target", "smollm2"], "draftsmith verify DRAFTER"),
    "verify prompts": (["verify", "d", "--target", "t", "--num-prompts", "-1"], "--num-prompts -1"),
    "verify no set": (["verify", "d", "--target", "t", "--prompts"], "name a JSONL file or a set with --prompts"),
    "prepare nothing": (["prepare", "--target", "smollm2", "--out", "x"], "error: "),
    "regenerate nothing": (["regenerate", "--target", "smollm2", "--out", "x"], "error: "),
    "report nothing": (["report"], "no run to report"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_that_names_what_to_do(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, says = WRONG[name]
    assert says in refused(arguments, capsys)


def test_debug_shows_the_traceback(files: Files) -> None:
    with pytest.raises(DataError, match="/no/chats"):
        run([*files.train("--data", "/no/chats.jsonl", out="debugged"), "--debug"])


def no_template(files: Files) -> str:
    folder = files.folder / "bare"
    if not folder.exists():
        folder.mkdir()
        for file in Path(files.target).iterdir():
            if file.name != "chat_template.jinja":
                (folder / file.name).symlink_to(file)
    return str(folder)


def written(files: Files, name: str, text: str) -> str:
    path = files.folder / name
    path.write_text(text)
    return str(path)


BROKEN = '{"messages": [{"role": "user"'
NO_ANSWER = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
BAD: dict[str, tuple[Callable[[Files], list[str]], str]] = {
    "missing file": (lambda files: ["--data", "/no/chats.jsonl"], "/no/chats.jsonl"),
    "empty file": (lambda files: ["--data", written(files, "empty.jsonl", "")], "empty.jsonl is empty: give a file"),
    "only a broken line": (lambda files: ["--data", written(files, "broken.jsonl", BROKEN)], "1 rows, "),
    "only a row without an answer": (lambda files: ["--data", written(files, "q.jsonl", NO_ANSWER)], "assistant turn"),
    "no chat template": (lambda files: ["--target", no_template(files)], "has no chat template"),
    "taps that don't exist": (lambda files: ["--taps", "1", "99"], "99"),
    "a missing target": (lambda files: ["--target", "/no/[/x]"], "target folder /no/[/x] doesn't exist"),
    "a missing prompt file": (lambda files: ["--prompts", "/no/p.jsonl"], "prompts /no/p.jsonl can't be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_that_names_what_to_do(
    name: str, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    more, says = BAD[name]
    assert says in refused(files.train(*more(files), out=f"bad {name}"), capsys)


def test_bad_rows_are_counted_and_explained(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    good = Path(files.chats).read_text()
    chats = written(files, "mixed.jsonl", f"{good}{BROKEN}\n{NO_ANSWER}\n")
    out = files.folder / "mixed"
    assert run(["prepare", chats, "--target", files.target, "--out", str(out), "--off-policy-rows", "0"]) == 0
    account = json.loads((out / "account.json").read_text())["account"]
    assert account["rows_in"] == 42
    assert sum(account["skipped"].values()) == 2
    assert len(account["skipped"]) == 2


def test_a_recipe_with_an_unknown_key_names_the_nearest(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = written(files, "recipe.toml", "[drafter]\nlaers = 3\n")
    line = refused([*files.train(out="unknown-key"), "--recipe", recipe], capsys)
    assert "unknown key 'laers'; did you mean layers?" in line


def test_a_folder_that_holds_a_run_is_left_alone(trained: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert "already holds a run: give another --out, or continue it with --resume" in refused(trained.train(), capsys)


def test_a_pipe_gets_each_line_as_it_is_said() -> None:
    code = "import sys, draftsmith.cli as cli; cli.run = lambda _: print('said') or sys.stdin.read() and 0; cli.main()"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=buffered
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert select.select([process.stdout], [], [], 30)[0], "nothing came while the command went on"
        assert process.stdout.readline() == b"said\n"
        process.stdin.close()


def test_a_reader_who_leaves_is_no_error() -> None:
    code = "from draftsmith.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == UNREAD_EXIT
