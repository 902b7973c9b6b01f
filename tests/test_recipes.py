"""Every recipe builds a configuration, and the targets they name can be planned without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.config import build_config, read_recipe
from draftsmith.target.bundled import HUB_CONFIGS
from draftsmith.target.smollm2 import NAME

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
EXPECTED = {
    "quickstart",
    "quickstart-scratch",
    "smollm2-gpu",
    "qwen3-8b-1gpu",
    "qwen3-8b-8gpu",
    "qwen3.6-27b-5t2d",
    "qwen3.6-27b-2node",
    "adapt-stock-drafter",
}


def test_all_promised_recipes_are_there() -> None:
    assert {path.name.removesuffix(".toml") for path in RECIPES} >= EXPECTED


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_builds_a_config(path: Path) -> None:
    config = build_config(read_recipe(path), str(path))
    assert config.out.startswith("runs/")
    assert config.target.target in {NAME, *HUB_CONFIGS}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_says_what_it_is_for(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert any("draftsmith train" in line for line in lines) or path.name == "quickstart.toml"


def test_the_27b_recipe_holds_the_stated_shape() -> None:
    path = next(path for path in RECIPES if path.name == "qwen3.6-27b-5t2d.toml")
    config = build_config(read_recipe(path), str(path))
    assert config.batch.token_budget == 49_152
    assert (config.drafter.block_size, config.loss.gamma) == (16, 7.0)
    assert config.drafter.taps == (1, 16, 31, 46, 61)
    assert (config.drafter.mask_token_id, config.drafter.sliding_window, config.drafter.full_layers) == (
        248070,
        2048,
        1,
    )
    heads = (config.drafter.num_heads, config.drafter.num_kv_heads, config.drafter.head_dim)
    assert heads == (32, 8, 128)
    assert config.batch.labels_per_token == 2.5
    assert (config.pipeline.targets, config.pipeline.drafters) == (5, 2)
