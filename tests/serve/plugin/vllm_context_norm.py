"""A plugin of vLLM's that mends one function of its CPU build, found by this test.

vLLM norms the context keys of all drafter layers in one call, `ops.rms_norm(out, keys, weights)` with a row of weights
per layer. The CPU operator of 0.32.0 reads only the first row, so every layer's keys get the first layer's weights, and
acceptance falls without an error for any drafter of two layers or more. Here each layer is normed with its own row.
"""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.model_executor.models import qwen3_dflash

    qwen3_dflash.DFlashQwen3Model._normalize_context_k = normalize_context_k


def normalize_context_k(self: Any, all_k: torch.Tensor) -> torch.Tensor:
    """RMSNorm of [layers, tokens, heads, head_dim], each layer with its own weights."""
    from vllm import _custom_ops as ops

    normed = torch.empty_like(all_k)
    for layer in range(all_k.shape[0]):
        ops.rms_norm(normed[layer], all_k[layer], self._k_norm_weights[layer], self._rms_norm_eps)
    return normed
