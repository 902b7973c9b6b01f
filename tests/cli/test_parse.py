"""The seam to tyro."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from draftsmith.cli.parse import one_line, parse, peek, without
from draftsmith.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Two options."""

    count: int = 1
    """How many."""
    name: str
    """What it is called."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise DataError(f"--count {self.count} is below 1")


def test_a_config_class_speaks_for_itself() -> None:
    with pytest.raises(DataError, match=r"^--count 0 is below 1$"):
        parse(Options, "verb", ["--count", "0", "--name", "a"], "About.")


def test_what_tyro_finds_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^Missing from draftsmith verb: --name STR .*verb --help explains"):
        parse(Options, "verb", [], "About.")
    assert parse(Options, "verb", ["--name", "a"], "About.") == Options(name="a")


BOXED = """╭─ Unrecognized options ──────╮
│ Unrecognized options: --nam │
│ ─────────────────────────── │
│ Perhaps you meant:          │
│     --name STR              │
╰─────────────────────────────╯
"""
PLAIN = """ Unrecognized options
 ----------------------------
  Unrecognized options: --nam
  ---------------------------
  Perhaps you meant:
      --name STR
"""


@pytest.mark.parametrize("box", [BOXED, PLAIN])
def test_frames_of_either_kind_are_taken_off(box: str) -> None:
    assert one_line(box) == "Unrecognized options: --nam; did you mean --name?"


def test_flags_are_found_and_taken_out_in_both_forms() -> None:
    given = ["--a", "1", "--b=2", "--c"]
    assert (peek(given, "--a"), peek(given, "--b"), peek(given, "--c")) == ("1", "2", None)
    assert without(given, "--a") == ["--b=2", "--c"]
    assert without(given, "--b") == ["--a", "1", "--c"]
