"""The DFlash drafter: architecture only (arXiv 2602.06036).

    features [T, F*H] -> fc -> hidden_norm -> context [T, H]
    block embeddings [Q, H] -> layers (queries: block; keys, values: context, then block) -> norm -> [Q, H]

Embedding and head are the target's, frozen, and live outside. Keys and values of one layer share a weight, as do gate
and up of the MLP: one matrix product instead of two; `export.py` splits them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftsmith.drafter.recompute import recomputed
from draftsmith.drafter.rope import RopeConfig, RopeTable, rotate
from draftsmith.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
Mask = Tensor | BlockMask


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """A resolved drafter: every size known, nothing left to choose. Names follow Qwen3's config where it has one."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    sliding_window: int
    """W, the positions a sliding layer sees, its own included; 0 where no layer slides."""
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    """Tapped target layers: ids of decoder layers, whose output is read."""
    num_target_layers: int
    vocab_size: int
    rope: RopeConfig

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ConfigError(f"--block-size {self.block_size} drafts nothing; needed: 2 or more")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} heads don't share {self.num_kv_heads} key heads evenly: "
                "give --num-kv-heads a divisor of --num-heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"--head-dim {self.head_dim} is odd, but positions rotate pairs: give an even one")
        if not self.layer_types or set(self.layer_types) - {FULL, SLIDING}:
            raise ConfigError(f"layer types {self.layer_types} are not one or more of {FULL}, {SLIDING}")
        if SLIDING in self.layer_types and self.sliding_window < self.block_size:
            raise ConfigError(
                f"--sliding-window {self.sliding_window} is smaller than a block of {self.block_size}; raise it"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"--mask-token-id {self.mask_token_id} has no embedding row (vocabulary {self.vocab_size})"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def window(self, layer_type: str) -> int | None:
        """The sliding window of a layer type, None where it sees everything."""
        return self.sliding_window if layer_type == SLIDING else None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32 up to the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attention of block rows over context and block keys.

    Args:
        q: [rows, heads, head_dim].
        k, v: [keys, kv_heads, head_dim].
        mask: bool [rows, keys] for SDPA, or a BlockMask over rows with the head group folded in, for flex attention.

    Returns:
        [rows, heads * head_dim].
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if isinstance(mask, Tensor):
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(rows, num_heads * head_dim)
    # Folding the group of query heads into the rows beats flex attention's own grouping (5.7 ms against 7.8).
    group = num_heads // num_kv_heads
    folded = (
        q.view(rows, num_kv_heads, group, head_dim).transpose(0, 1).reshape(1, num_kv_heads, rows * group, head_dim)
    )
    out = flex_attention(folded, k, v, block_mask=mask)
    assert isinstance(out, Tensor)
    return out.view(num_kv_heads, rows, group, head_dim).transpose(0, 1).reshape(rows, num_heads * head_dim)


class Attention(nn.Module):
    """Queries from the block, keys and values from context and block, per-head norms on queries and keys."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, width = config.hidden_size, config.head_dim
        self.head_dim = width
        self.q_proj = nn.Linear(H, config.num_heads * width, bias=False)
        self.kv_proj = nn.Linear(H, 2 * config.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_heads * width, H, bias=False)
        self.q_norm = RMSNorm(width, config.rms_norm_eps)
        self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: RopeTable) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [tokens, kv_heads, head_dim] of context or block rows."""
        k, v = self.kv_proj(x).view(x.shape[0], 2, -1, self.head_dim).unbind(1)
        return rotate(self.k_norm(k), rope), v

    def forward(self, x: Tensor, context_kv: tuple[Tensor, Tensor], rope: RopeTable, mask: Mask) -> Tensor:
        q = rotate(self.q_norm(self.q_proj(x).view(x.shape[0], -1, self.head_dim)), rope)
        k, v = self.keys_values(x, rope)
        return self.o_proj(attend(q, torch.cat([context_kv[0], k]), torch.cat([context_kv[1], v]), mask))


class MLP(nn.Module):
    """SwiGLU with gate and up in one product."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context_kv: tuple[Tensor, Tensor], rope: RopeTable, mask: Mask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context_kv, rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trainable part. `forward` serves training; decoding composes `context` and `layers` with its own caches."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H = config.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.taps) * H, H, bias=False)
        self.hidden_norm = RMSNorm(H, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in config.layer_types)
        self.norm = RMSNorm(H, config.rms_norm_eps)

    def context(self, features_TFH: Tensor) -> Tensor:
        """Tapped hidden states [T, F*H] to what every layer's keys and values are made of [T, H]."""
        return self.hidden_norm(self.fc(features_TFH))

    def forward(
        self,
        block_QH: Tensor,
        features_TFH: Tensor,
        rope_context: RopeTable,
        rope_block: RopeTable,
        masks: dict[str, Mask],
        checkpoint_layers: bool = False,
    ) -> Tensor:
        """Hidden states [Q, H] for the target's head.

        Args:
            block_QH: embeddings of the block tokens.
            features_TFH: tapped hidden states of the packed context.
            rope_context, rope_block: tables at absolute positions within each document.
            masks: per layer type, who sees whom.
            checkpoint_layers: recompute each layer in backward instead of keeping its activations.
        """
        context_TH = self.context(features_TFH)
        x = block_QH
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            inputs = (layer, x, context_TH, rope_context, rope_block, masks[kind])
            x = recomputed(run_layer, *inputs) if checkpoint_layers else run_layer(*inputs)
        return self.norm(x)


def run_layer(
    layer: nn.Module, x: Tensor, context_TH: Tensor, rope_context: RopeTable, rope_block: RopeTable, mask: Mask
) -> Tensor:
    """One layer with the context's keys and values made on the spot."""
    assert isinstance(layer, Layer)
    return layer(x, layer.self_attn.keys_values(context_TH, rope_context), rope_block, mask)


def init_weights(drafter: Drafter, seed: int) -> None:
    """Random start: matrices normal with deviation 0.02, norms one; from a CPU generator, so alike on every device."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, 0.02, generator=generator)
                parameter.copy_(values)
            else:
                parameter.fill_(1.0)
