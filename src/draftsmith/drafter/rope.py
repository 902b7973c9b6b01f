"""Rotary positions: inverse frequencies in fp32 from the resolved config, tables made in the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import ConfigError

STATIC_KINDS = ("default", "linear", "llama3", "yarn")
"""Scalings whose frequencies don't depend on the length of the sequence; others can't be baked into one table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of the drafter's own heads, always over the full head width."""

    head_dim: int
    theta: float
    scaling: Mapping[str, Any]
    """Hugging Face `rope_parameters` less theta; empty where plain."""
    max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """Cosines and sines [tokens, head_dim] in the compute dtype, the two halves alike (rotate-half convention)."""

    cos: Tensor
    sin: Tensor


def rope_kind(scaling: Mapping[str, Any]) -> str:
    """The scaling's `rope_type`, "default" where plain.

    Raises:
        ConfigError: a kind whose frequencies depend on the sequence length.
    """
    kind = str(scaling.get("rope_type", "default"))
    if kind not in STATIC_KINDS:
        raise ConfigError(
            f"rope scaling {kind!r} changes with the sequence length and can't be served by a fixed drafter config; "
            f"needed: one of {', '.join(STATIC_KINDS)}. Train with --rope plain to give the drafter unscaled positions"
        )
    return kind


def inverse_frequencies(config: RopeConfig, device: torch.device | str) -> tuple[Tensor, float]:
    """fp32 [head_dim / 2] inverse frequencies and the attention factor, by transformers' own functions.

    They stay fp32 for good: rounded to bf16 they shift phases by up to 3.5 rad at distance 3,000.
    """
    kind = rope_kind(config.scaling)
    if kind == "default":
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        return 1.0 / config.theta**exponent, 1.0
    from transformers import Qwen3Config  # seconds of imports that a plan does without
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    heads = Qwen3Config(
        hidden_size=config.head_dim,
        num_attention_heads=1,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters={**config.scaling, "rope_theta": config.theta},
    )
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](heads, torch.device(device))
    return inv_freq.to(torch.float32), float(factor)


def rope_table(positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype) -> RopeTable:
    """Tables for integer `positions`; phases are computed in fp32 and rounded once."""
    phase = positions.to(torch.float32)[:, None] * inv_freq
    phase = torch.cat([phase, phase], dim=-1)
    return RopeTable(cos=(phase.cos() * factor).to(dtype), sin=(phase.sin() * factor).to(dtype))


def rotate(x: Tensor, table: RopeTable) -> Tensor:
    """Rotate heads [tokens, heads, head_dim] by their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * table.cos[:, None] + torch.cat([-second, first], dim=-1) * table.sin[:, None]
