from __future__ import annotations

import pytest
from transformers import Qwen3MoeConfig

from draftsmith.target.model import TargetConfig
from draftsmith.target.weigh import weigh_target


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
