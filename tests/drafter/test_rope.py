"""Rotary positions against transformers' own modules and the rotation by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from draftsmith.drafter.rope import RopeConfig, RopeTable, inverse_frequencies, rope_kind, rope_table, rotate
from draftsmith.errors import ConfigError

SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}


def config_of(scaling: dict[str, Any], head_dim: int = 16, theta: float = 54_321.0) -> RopeConfig:
    return RopeConfig(head_dim=head_dim, theta=theta, scaling=scaling, max_positions=512)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_B16_B17_equals_the_embedding_that_engines_build(scaling: str) -> None:
    config = config_of(SCALINGS[scaling])
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=16,
            num_attention_heads=1,
            head_dim=16,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", **config.scaling, "rope_theta": config.theta},
        )
    )
    positions = torch.tensor([0, 1, 7, 300, 3000])
    cos, sin = theirs(torch.zeros(1, 5, 16), positions[None])
    inv_freq, factor = inverse_frequencies(config, "cpu")
    table = rope_table(positions, inv_freq, factor, torch.float32)
    torch.testing.assert_close(table.cos, cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(table.sin, sin[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scalings_that_depend_on_the_length_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}'.*--rope plain"):
        inverse_frequencies(config_of({"rope_type": kind, "factor": 2.0}), "cpu")


def test_no_scaling_is_the_default_kind() -> None:
    assert rope_kind({}) == "default"


def test_frequencies_stay_fp32_and_tables_are_rounded_once() -> None:
    """Frequencies rounded to bf16 shift phases by radians at distance 3,000; cosines rounded to it stay within 2^-8."""
    inv_freq, factor = inverse_frequencies(config_of({}, head_dim=64, theta=1e4), "cpu")
    assert inv_freq.dtype == torch.float32
    table = rope_table(torch.tensor([3000]), inv_freq, factor, torch.bfloat16)
    exact = 3000 * (1e4 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64))
    assert table.cos.dtype == torch.bfloat16
    assert float((table.cos[0, :32].double() - exact.cos()).abs().max()) < 2**-8
    assert float((table.sin[0, :32].double() - exact.sin()).abs().max()) < 2**-8


def test_rotation_by_hand() -> None:
    """A head of width 2 at position 1 turns by one radian; the halves are the pair (rotate-half convention)."""
    inv_freq, factor = inverse_frequencies(config_of({}, head_dim=2), "cpu")
    table = rope_table(torch.tensor([1]), inv_freq, factor, torch.float32)
    turned = rotate(torch.tensor([[[1.0, 0.0]]]), table)
    assert turned[0, 0].tolist() == pytest.approx([math.cos(1), math.sin(1)])


def test_rotation_equals_transformers() -> None:
    x = torch.randn(5, 3, 16)
    inv_freq, factor = inverse_frequencies(config_of({}), "cpu")
    table = rope_table(torch.arange(5), inv_freq, factor, torch.float32)
    heads_first = x.transpose(0, 1)[None]
    theirs, _ = apply_rotary_pos_emb(heads_first, heads_first, table.cos[None], table.sin[None])
    torch.testing.assert_close(rotate(x, table), theirs[0].transpose(0, 1))


def test_scores_depend_on_distances_only() -> None:
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    inv_freq, factor = inverse_frequencies(config_of({}), "cpu")

    def score(at_q: int, at_k: int) -> float:
        tables: list[RopeTable] = [rope_table(torch.tensor([p]), inv_freq, factor, torch.float32) for p in (at_q, at_k)]
        return float((rotate(q, tables[0]) * rotate(k, tables[1])).sum())

    assert score(17, 5) == pytest.approx(score(112, 100), abs=1e-4)
    assert abs(score(17, 5) - score(17, 6)) > 1e-2
