"""The speculators layout, which vLLM serves without being told a method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch as safetensors_torch
import torch
from torch import Tensor

from draftsmith.drafter.model import SLIDING, Drafter, DrafterConfig
from draftsmith.errors import ExportError
from draftsmith.evaluate.export import CARD, CONFIG, WEIGHTS, write_folder, write_json
from draftsmith.evaluate.layout import ARCHITECTURE, ExportInfo, check_weights, qwen3_values, split_weights

FORMAT_VERSION = "0.9.0"


def check_attention(config: DrafterConfig) -> bool:
    """`sliding_window_non_causal` of the layout: whether blocks are seen bidirectionally.

    vLLM applies the flag to *every* layer, so it must say true for full layers and false for sliding ones.

    Raises:
        ExportError: layers of both kinds, which one flag can't describe.
    """
    slides = {kind == SLIDING for kind in config.layer_types}
    if len(slides) > 1:
        raise ExportError(
            "a drafter with full and sliding layers would be served wrongly from the speculators layout, whose one "
            "causal flag vLLM applies to all layers: export it with --layout zlab"
        )
    return not slides.pop()


def speculators_values(config: DrafterConfig, info: ExportInfo, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the speculators layout.

    Raises:
        ExportError: an attention layout or scaled ends that it can't describe.
    """
    if info.input_embedding_scale != 1.0 or info.output_multiplier != 1.0 or info.soft_cap is not None:
        raise ExportError(
            f"{info.target} scales its embeddings or logits, which the speculators layout can't state: export with "
            "--layout zlab"
        )
    proposal = {
        "proposal_type": "greedy",
        # Place 0 is the known anchor and drafts nothing.
        "speculative_tokens": config.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    architectures = [info.target_architecture] if info.target_architecture else []
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "dflash",
        "speculators_version": FORMAT_VERSION,
        # Counted from the embedding here, from the first layer's output in `target_layer_ids`.
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "transformer_layer_config": qwen3_values(config, info, dtype),
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": check_attention(config),
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": info.target, "architectures": architectures},
        },
    }


def export_speculators(
    drafter: Drafter,
    weights: Mapping[str, Tensor] | None,
    info: ExportInfo,
    out: Path,
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> Path:
    """Write the drafter in the speculators layout; arguments as `export_zlab`.

    The full vocabulary is drafted, so no vocabulary maps are written.

    Raises:
        ExportError: a drafter that vLLM would serve otherwise than it trained from this layout.
    """
    values = speculators_values(drafter.config, info, dtype)
    named = split_weights(dict(drafter.named_parameters()) if weights is None else weights, dtype)
    check_weights({name: tuple(weight.shape) for name, weight in named.items()}, drafter.config, "the drafter")

    def write(folder: Path) -> None:
        write_json(folder / CONFIG, values)
        safetensors_torch.save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
        if card:
            (folder / CARD).write_text(card, encoding="utf-8")

    return write_folder(out, write)
