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
from draftsmith.evaluate.export import (
    CARD,
    CONFIG,
    WEIGHTS,
    check_against_target,
    check_against_training,
    check_values,
    read_json,
    read_weights,
    write_folder,
    write_json,
)
from draftsmith.evaluate.layout import (
    ARCHITECTURE,
    ExportInfo,
    check_weights,
    config_from_values,
    qwen3_values,
    split_weights,
)
from draftsmith.records import TargetFacts

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


def verify_speculators(
    path: Path, config: DrafterConfig, facts: TargetFacts, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Read an exported folder back and hold it against what was trained; arguments as `verify_export`.

    Raises:
        ExportError: naming the first thing that would serve otherwise than it trained.
    """
    where = path / CONFIG
    values = read_json(where)
    written = config_from_speculators(values, config.num_target_layers, str(where))
    named = read_weights(path)
    check_weights({name: tuple(weight.shape) for name, weight in named.items()}, written, str(path))
    check_against_training(written, config, where)
    check_against_target(written, facts, str(where))
    if weights is not None:
        check_values(path, weights)


def config_from_speculators(values: Mapping[str, Any], num_target_layers: int, where: str) -> DrafterConfig:
    """The DrafterConfig that a config.json of the speculators layout states.

    Args:
        values: the file.
        num_target_layers: which it can't state.
        where: for errors.

    Raises:
        ExportError: a key missing, one that vLLM would read as another drafter, or as `config_from_values`.
    """
    try:
        layers: dict[str, Any] = dict(values["transformer_layer_config"])
        proposal: dict[str, Any] = values["speculators_config"]["proposal_methods"][0]
        layers |= {
            "target_layer_ids": [int(layer) - 1 for layer in values["aux_hidden_state_layer_ids"]],
            "block_size": values["block_size"],
            "mask_token_id": values["mask_token_id"],
            "num_target_layers": num_target_layers,
        }
        written = config_from_values(layers, where)
        stated = {
            "speculators_model_type": (values["speculators_model_type"], "dflash"),
            "draft_vocab_size": (values["draft_vocab_size"], written.vocab_size),
            "target_hidden_size": (values["target_hidden_size"], written.hidden_size),
            "sample_from_anchor": (values["sample_from_anchor"], False),
            "sliding_window_non_causal": (values["sliding_window_non_causal"], check_attention(written)),
            "speculative_tokens": (proposal["speculative_tokens"], written.block_size - 1),
        }
    except (KeyError, IndexError) as error:
        raise ExportError(f"{where} lacks {error}: without it vLLM guesses, so export it again") from error
    for name, (found, needed) in stated.items():
        if found != needed:
            raise ExportError(f"{where} states {name} {found}, where this drafter needs {needed}: export it again")
    return written
