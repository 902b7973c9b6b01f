"""RunConfigs from recipes and runs: every key known, every value of its type, flags over files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from draftsmith.config import build_config, merge, read_recipe, read_run
from draftsmith.errors import CheckpointError, ConfigError

BASE: dict[str, Any] = {"out": "run", "target": {"target": "smollm2"}, "data": {"data": "chats.jsonl"}}


def build(**tables: Any) -> Any:
    return build_config(merge(BASE, tables), "recipe.toml")


def test_what_is_left_open_takes_each_parts_own_default() -> None:
    config = build(drafter={"taps": [1, 8], "layers": "auto", "block_size": 8}, optim={"lr": 1})
    assert config.drafter.taps == (1, 8)
    assert config.drafter.layers == "auto"
    assert config.drafter.block_size == 8
    assert config.optim.lr == 1.0
    assert isinstance(config.optim.lr, float)
    assert config.measure == build().measure


def test_a_config_comes_back_from_json_as_it_was() -> None:
    kwargs = {"template_kwargs": {"enable_thinking": False}}
    config = build(prepare={"tokenize": kwargs}, drafter={"taps": [1, 8]}, measure={"prompts": ["gsm8k"]})
    assert build_config(json.loads(json.dumps(asdict(config))), "a run") == config
    assert config.prepare.tokenize.template_kwargs == {"enable_thinking": False}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"drafter": {"laers": 3}}, "recipe.toml drafter has an unknown key 'laers'; did you mean layers"),
    "nothing like it": ({"zzz": 1}, "unknown key 'zzz'; known: out, target"),
    "no table": ({"drafter": 3}, "recipe.toml drafter is a table of settings, not 3"),
    "no list": ({"drafter": {"taps": 3}}, "taps is a list, not 3"),
    "choice": ({"drafter": {"init": "nil"}}, "init is one of auto, target, random, not 'nil'"),
    "union": ({"drafter": {"layers": "many"}}, "layers doesn't take 'many': one of int, 'auto'"),
    "type": ({"batch": {"max_documents": "8"}}, "max_documents is a int, not '8'"),
    "bool for a number": ({"batch": {"max_documents": True}}, "max_documents is a int, not True"),
    "no mapping": ({"prepare": {"tokenize": {"template_kwargs": 1}}}, "template_kwargs is a table, not 1"),
    "check of the class": ({"drafter": {"layers": 0}}, "--layers 0 is not 1 or more"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named_with_their_place(name: str) -> None:
    tables, says = WRONG[name]
    with pytest.raises(ConfigError) as error:
        build(**tables)
    assert says in str(error.value)


def test_what_is_required_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"lacks 'out': set it there, or give --out"):
        build_config({"target": {"target": "t"}, "data": {"data": "x"}}, "r")
    with pytest.raises(ConfigError, match=r"target lacks 'target'"):
        build_config({"out": "o", "data": {"data": "x"}}, "r")


def test_merging_goes_key_by_key() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}}) == {
        "a": {"b": 1, "c": 4},
        "d": {"e": 5},
    }


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check --recipe"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_recipe(tmp_path / "bad.toml")
    with pytest.raises(CheckpointError, match="holds no run"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"config": {"out": "here"}}))
    assert read_run(tmp_path) == {"out": "here"}
