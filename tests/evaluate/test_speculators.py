"""The speculators layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from draftsmith.drafter.model import FULL, SLIDING
from draftsmith.errors import ExportError
from draftsmith.evaluate.export import read_json
from draftsmith.evaluate.layout import ExportInfo, expected_shapes
from draftsmith.evaluate.speculators import export_speculators
from tests.evaluate.overfit import drafter_config, random_drafter
from tests.families import THETA, tiny_target


def info() -> ExportInfo:
    target = tiny_target("qwen3")
    return ExportInfo.of(target.facts, target.ends(), architecture="Qwen3ForCausalLM")


def test_F02_and_F03_the_layout_states_what_is_drafted(tmp_path: Path) -> None:
    drafter = random_drafter(drafter_config(tiny_target("qwen3"), layer_types=(FULL, FULL)))
    folder = export_speculators(drafter, None, info(), tmp_path / "drafter", torch.float32, card="# card")
    values = read_json(folder / "config.json")
    assert values["speculators_model_type"] == "dflash"
    assert values["aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert values["block_size"] == 8
    assert values["draft_vocab_size"] == values["transformer_layer_config"]["vocab_size"] == drafter.config.vocab_size
    assert values["mask_token_id"] == drafter.config.mask_token_id
    assert values["sample_from_anchor"] is False
    assert values["transformer_layer_config"]["rope_theta"] == THETA
    speculative = values["speculators_config"]
    assert speculative["proposal_methods"][0]["speculative_tokens"] == 7
    assert speculative["verifier"] == {"name_or_path": "tiny-qwen3", "architectures": ["Qwen3ForCausalLM"]}
    named = safetensors.torch.load_file(folder / "model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in named.items()} == expected_shapes(drafter.config)
    assert (folder / "README.md").read_text() == "# card"


def test_C16_the_causal_flag_follows_the_attention_layout(tmp_path: Path) -> None:
    """vLLM makes every layer causal where the flag is false or absent."""
    for layer_types, flag in (((FULL, FULL), True), ((SLIDING, SLIDING), False)):
        drafter = random_drafter(drafter_config(tiny_target("qwen3"), layer_types=layer_types))
        folder = export_speculators(drafter, None, info(), tmp_path / "drafter")
        assert read_json(folder / "config.json")["sliding_window_non_causal"] is flag


def test_what_the_layout_cannot_say_is_refused(tmp_path: Path) -> None:
    mixed = random_drafter(drafter_config(tiny_target("qwen3")))
    with pytest.raises(ExportError, match="full and sliding layers"):
        export_speculators(mixed, None, info(), tmp_path / "drafter")
    full = random_drafter(drafter_config(tiny_target("qwen3"), layer_types=(FULL,)))
    with pytest.raises(ExportError, match="scales its embeddings or logits"):
        export_speculators(full, None, replace(info(), input_embedding_scale=5.0), tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()
