"""The DFlash drafter: architecture only (arXiv 2602.06036).

    features [T, F*H] -> fc -> hidden_norm -> context [T, H]
    block embeddings [Q, H] -> layers (queries: block; keys, values: context, then block) -> norm -> [Q, H] or [G, H]

In training a block is its anchor's token, which is known, and B - 1 times the mask token. So the first layer projects
A + 1 different rows instead of Q = A B, and past the last layer's attention only the G = A (B - 1) guessing rows go on:
3.5% fewer operations at the reference shape for the same numbers.

Embedding and head are the target's, frozen, and live outside. Keys and values of one layer share a weight, as do gate
and up of the MLP: one matrix product instead of two; `export.py` splits them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftsmith.drafter.linear import Linear
from draftsmith.drafter.recompute import recomputed
from draftsmith.drafter.rope import RopeConfig, RopeTable, rotate
from draftsmith.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
CONTEXT = ("fc.weight", "hidden_norm.weight")
"""Parameters that make the context of a token's features."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortcut:
    """What a layer may leave out, as block sizes; 0 where it may not.

    `alike`: places 1 to B - 1 of all blocks hold one row, so it is projected once. `guessing`: only they go on.
    """

    alike: int = 0
    guessing: int = 0


NO_SHORTCUT = Shortcut()


def distinct(rows: Tensor, block_size: int) -> Tensor:
    """The different rows of blocks [Q, H] alike from place 1 on: the A first ones, then the other [A + 1, H]."""
    return torch.cat([rows[::block_size], rows[1:2]])


def spread(rows: Tensor, block_size: int) -> Tensor:
    """The inverse of `distinct`: [A + 1, ...] to [Q, ...]. Its gradient is a sum, in a fixed order."""
    first, other = rows[:-1, None], rows[-1:, None]
    num_blocks = first.shape[0]
    return torch.cat([first, other.expand(num_blocks, block_size - 1, *rows.shape[1:])], dim=1).flatten(0, 1)


def guesses(rows: Tensor, block_size: int) -> Tensor:
    """The rows [Q, ...] of blocks without each block's first, the anchor: [A (B - 1), ...]."""
    return rows.view(-1, block_size, *rows.shape[1:])[:, 1:].flatten(0, 1)


def _joined(context: Tensor, block: Tensor) -> Tensor:
    """Context rows, then block rows [keys, kv_heads, head_dim], each head's rows side by side in memory."""
    return torch.cat([context.transpose(0, 1), block.transpose(0, 1)], dim=1).transpose(0, 1)


class Attention(nn.Module):
    """Queries from the block, keys and values from context and block, per-head norms on queries and keys."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, width = config.hidden_size, config.head_dim
        self.head_dim = width
        self.q_proj = Linear(H, config.num_heads * width)
        self.kv_proj = Linear(H, 2 * config.num_kv_heads * width)
        self.o_proj = Linear(config.num_heads * width, H)
        self.q_norm = RMSNorm(width, config.rms_norm_eps)
        self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: RopeTable, alike: int = 0) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [tokens, kv_heads, head_dim] of context or block rows."""
        k, v = self.kv_proj(x).view(x.shape[0], 2, -1, self.head_dim).unbind(1)
        k = self.k_norm(k)
        if alike:
            k, v = spread(k, alike), spread(v, alike)
        return rotate(k, rope), v

    def forward(
        self, x: Tensor, context_kv: tuple[Tensor, Tensor], rope: RopeTable, mask: Mask, alike: int = 0
    ) -> Tensor:
        """What each row gathered [rows, heads * head_dim], before `o_proj`; `x` holds distinct rows where `alike`."""
        q = self.q_norm(self.q_proj(x).view(x.shape[0], -1, self.head_dim))
        if alike:
            q = spread(q, alike)
        q = rotate(q, rope)
        k, v = self.keys_values(x, rope, alike)
        return attend(q, _joined(context_kv[0], k), _joined(context_kv[1], v), mask)


class MLP(nn.Module):
    """SwiGLU with gate and up in one weight."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj.halves(x)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        context_kv: tuple[Tensor, Tensor],
        rope: RopeTable,
        mask: Mask,
        shortcut: Shortcut = NO_SHORTCUT,
    ) -> Tensor:
        """Rows [Q, H] to [Q, H], or to the guessing ones [G, H]."""
        alike, guessing = shortcut.alike, shortcut.guessing
        normed = self.input_layernorm(distinct(x, alike) if alike else x)
        gathered = self.self_attn(normed, context_kv, rope, mask, alike)
        if guessing:
            x, gathered = guesses(x, guessing), guesses(gathered, guessing)
        x = x + self.self_attn.o_proj(gathered)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trainable part. `forward` serves training; decoding composes `context` and `layers` with its own caches."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H = config.hidden_size
        self.config = config
        self.fc = Linear(len(config.taps) * H, H)
        self.hidden_norm = RMSNorm(H, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in config.layer_types)
        self.norm = RMSNorm(H, config.rms_norm_eps)
        self.context_is_given = False
        """Whether `forward` gets the context [T, H] itself in the features' place: where `CONTEXT` is frozen."""

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
        masked_blocks: bool = False,
    ) -> Tensor:
        """Hidden states [Q, H] for the target's head.

        Args:
            block_QH: embeddings of the block tokens.
            features_TFH: tapped hidden states of the packed context; the context [T, H] where it is given.
            rope_context, rope_block: tables at absolute positions within each document.
            masks: per layer type, who sees whom.
            checkpoint_layers: recompute each layer in backward instead of keeping its activations.
            masked_blocks: places 1 to B - 1 of every block hold the mask token's row; only they come out [G, H].
        """
        context_TH = features_TFH if self.context_is_given else self.context(features_TFH)
        x, size = block_QH, self.config.block_size if masked_blocks else 0
        for number, (layer, kind) in enumerate(zip(self.layers, self.config.layer_types, strict=True), 1):
            shortcut = Shortcut(alike=size * (number == 1), guessing=size * (number == self.config.num_layers))
            inputs = (layer, x, context_TH, rope_context, rope_block, masks[kind], shortcut)
            x = recomputed(run_layer, *inputs) if checkpoint_layers else run_layer(*inputs)
        return self.norm(x)


def run_layer(
    layer: nn.Module,
    x: Tensor,
    context_TH: Tensor,
    rope_context: RopeTable,
    rope_block: RopeTable,
    mask: Mask,
    shortcut: Shortcut,
) -> Tensor:
    """One layer with the context's keys and values made on the spot."""
    assert isinstance(layer, Layer)
    return layer(x, layer.self_attn.keys_values(context_TH, rope_context), rope_block, mask, shortcut)


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
