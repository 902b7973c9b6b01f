from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from draftsmith.plan.saved import to_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    ratio: float = 0.1
    kwargs: Mapping[str, bool | int | str] = field(default_factory=dict[str, bool | int | str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    inner: Inner = field(default_factory=Inner)
    flag: bool = False
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    out: str
    part: Part
    quiet: Part = field(default_factory=lambda: Part(name=""))


NONE: frozenset[str] = frozenset()


def test_what_differs_from_defaults_is_written_by_table() -> None:
    inner = Inner(ratio=1e-5, kwargs={"on": False, "a key": "b", "n": 3})
    whole = Whole(out="run", part=Part(name="p", inner=inner, flag=True, ids=(1, 2)))
    assert tomllib.loads(to_toml(whole, NONE, frozenset({"quiet.name"}))) == {
        "out": "run",
        "part": {
            "name": "p",
            "flag": True,
            "ids": [1, 2],
            "inner": {"ratio": 1e-5, "kwargs": {"on": False, "a key": "b", "n": 3}},
        },
    }


def test_some_keys_are_written_always_and_some_never() -> None:
    whole = Whole(out="run", part=Part(name="p", flag=True))
    found = tomllib.loads(to_toml(whole, frozenset({"part.inner.ratio"}), frozenset({"part.name", "quiet.name"})))
    assert found == {"out": "run", "part": {"flag": True, "inner": {"ratio": 0.1}}}


@pytest.mark.parametrize("text", ['C:\\models\\"mine"', "tab\tline\nbell\x07", "\x7f", "\N{SNOWMAN} \N{GRINNING FACE}"])
def test_any_text_reads_back(text: str) -> None:
    whole = Whole(out=text, part=Part(name="p", inner=Inner(kwargs={text: text})))
    found = tomllib.loads(to_toml(whole, NONE, NONE))
    assert found["out"] == text
    assert found["part"]["inner"]["kwargs"] == {text: text}
