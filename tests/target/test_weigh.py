from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from draftsmith.errors import TargetError
from draftsmith.target.bundled import HUB_CONFIGS, config_names
from draftsmith.target.model import TargetConfig
from draftsmith.target.smollm2 import NAME
from draftsmith.target.weigh import SIZES, lay_out, size_values, weigh_target

KNOWN: dict[str, Any] = json.loads(files("draftsmith").joinpath("assets", SIZES).read_text())


def test_the_targets_of_the_package_are_weighed_beforehand() -> None:
    assert set(KNOWN) == {NAME, *config_names()}
    assert set(HUB_CONFIGS.values()) <= set(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_what_was_weighed_beforehand_is_what_the_model_weighs(name: str) -> None:
    config = TargetConfig(target=name)
    measured = lay_out(config)
    assert weigh_target(config) == measured, f"{SIZES} should say of {name}: {json.dumps(size_values(measured))}"


def test_a_missing_smollm2_is_said_though_its_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(TargetError, match="the target 'smollm2' isn't installed"):
        weigh_target(TargetConfig(target=NAME))


def test_qwen3_8b_has_its_published_size() -> None:
    size = weigh_target(TargetConfig(target="Qwen/Qwen3-8B"))
    # a layer: q, o 2 x 4096 x 4096; k, v 2 x 4096 x 1024; MLP 3 x 4096 x 12288; norms 2 x 4096 + 2 x 128
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert size.layers == (layer,) * 36
    assert size.ends == 2 * 151936 * 4096
    assert size.total == 36 * layer + 2 * 151936 * 4096 + 4096
    assert size.source == "configs/qwen3-8b"
    assert size.facts.name == "Qwen/Qwen3-8B"


def test_the_27b_hybrid_has_its_published_size() -> None:
    assert weigh_target(TargetConfig(target="Qwen/Qwen3.6-27B")).total == pytest.approx(26.9e9, rel=0.01)


def test_a_tied_head_counts_once_and_experts_by_what_a_token_passes(tmp_path) -> None:
    Qwen3MoeConfig(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=64, num_experts=8, num_experts_per_tok=2,
        tie_word_embeddings=True, architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    size = weigh_target(TargetConfig(target=str(tmp_path)))
    assert size.ends == 64 * 32
    experts = 8 * 3 * 32 * 16
    whole = (size.total - size.ends - 32) // 2
    assert size.layers == (whole - experts + experts // 4,) * 2
