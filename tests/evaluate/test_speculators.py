"""The speculators layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from draftsmith.drafter.model import FULL, SLIDING, Drafter
from draftsmith.drafter.rope import RopeConfig
from draftsmith.errors import ExportError
from draftsmith.evaluate.export import load_zlab, read_json
from draftsmith.evaluate.layout import ExportInfo, expected_shapes
from draftsmith.evaluate.speculators import config_from_speculators, export_speculators, verify_speculators
from tests.evaluate.overfit import drafter_config, random_drafter
from tests.families import THETA, tiny_target

YARN = RopeConfig(
    head_dim=16,
    theta=THETA,
    scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    max_positions=256,
)


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


def written(folder: Path, **changes: Any) -> Drafter:
    """A drafter of three full layers, exported."""
    layer_types = changes.pop("layer_types", (FULL,) * 3)
    changes["sliding_window"] = 12 if SLIDING in layer_types else 0
    drafter = random_drafter(drafter_config(tiny_target("qwen3"), layer_types=layer_types, **changes))
    export_speculators(drafter, None, info(), folder)
    return drafter


def look(folder: Path, drafter: Drafter) -> None:
    verify_speculators(folder, drafter.config, tiny_target("qwen3").facts, dict(drafter.named_parameters()))


@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_types": (SLIDING,)}, {"num_heads": 6, "num_kv_heads": 3}, {"rope": YARN}],
    ids=["full", "sliding", "own heads", "yarn"],
)
def test_a_folder_reads_back_as_what_was_trained(tmp_path: Path, changes: dict[str, Any]) -> None:
    drafter = written(tmp_path / "drafter", **changes)
    look(tmp_path / "drafter", drafter)
    values = read_json(tmp_path / "drafter" / "config.json")
    assert config_from_speculators(values, drafter.config.num_target_layers, "it") == drafter.config


def put(value: object, *keys: str | int) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        place: Any = values
        for key in keys[:-1]:
            place = place[key]
        if value is None:
            del place[keys[-1]]
        else:
            place[keys[-1]] = value

    return change


LAYERS = "transformer_layer_config"
METHODS = ("speculators_config", "proposal_methods")
EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "layer ids as in the other layout": (
        put([1, 2, 4], "aux_hidden_state_layer_ids"),
        "states taps (0, 1, 3), trained",
    ),
    "another block": (put(7, "block_size"), "speculative_tokens 7, where this drafter needs 6"),
    "F02 as many drafts as the block": (put(8, *METHODS, 0, "speculative_tokens"), "speculative_tokens 8, where"),
    "C16 causal blocks": (put(False, "sliding_window_non_causal"), "states sliding_window_non_causal False, where"),
    "F03 drafts from the anchor on": (put(True, "sample_from_anchor"), "sample_from_anchor True"),
    "F03 layout not stated": (put(None, "sample_from_anchor"), "lacks 'sample_from_anchor': without it vLLM guesses"),
    "no proposal": (put([], *METHODS), "without it vLLM guesses"),
    "mask token": (put(3, "mask_token_id"), "states mask_token_id 3, trained with"),
    "F09 pruned vocabulary": (put(64, "draft_vocab_size"), "states draft_vocab_size 64, where"),
    "B16 theta": (lambda values: theta(values), "gives other RoPE frequencies than trained with"),
    "a layer fewer": (lambda values: fewer(values), "holds layers.2."),
    "heads": (put(2, LAYERS, "num_attention_heads"), "doesn't describe its weights"),
    "another architecture": (put("eagle3", "speculators_model_type"), "states speculators_model_type eagle3, where"),
}


def theta(values: dict[str, Any]) -> None:
    values[LAYERS]["rope_theta"] = values[LAYERS]["rope_parameters"]["rope_theta"] = 1e4


def fewer(values: dict[str, Any]) -> None:
    values[LAYERS] |= {"num_hidden_layers": 2, "layer_types": [FULL, FULL]}


@pytest.mark.parametrize("name", EDITS)
def test_a_config_that_serves_otherwise_than_trained_is_refused(tmp_path: Path, name: str) -> None:
    drafter = written(tmp_path / "drafter")
    path = tmp_path / "drafter" / "config.json"
    change, says = EDITS[name]
    values = read_json(path)
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ExportError, match=re.escape(says)):
        look(tmp_path / "drafter", drafter)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda named: named.pop("norm.weight"), "lacks norm.weight"),
        (lambda named: named.update(d2t=torch.zeros(3)), "holds d2t"),
        (lambda named: named.update({"norm.weight": torch.ones(3)}), "norm.weight [3] instead of [32]"),
        (
            lambda named: named["layers.1.mlp.up_proj.weight"][5, 7].neg_(),
            "other values of layers.1.mlp.up_proj.weight",
        ),
    ],
    ids=["missing", "extra", "shape", "one value"],
)
def test_weights_that_came_out_otherwise_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], says: str
) -> None:
    drafter = written(tmp_path / "drafter")
    path = tmp_path / "drafter" / "model.safetensors"
    named = safetensors.torch.load_file(path)
    change(named)
    safetensors.torch.save_file(named, path)
    with pytest.raises(ExportError, match=re.escape(says)):
        look(tmp_path / "drafter", drafter)


def test_the_other_loader_says_which_layout_it_was_given(tmp_path: Path) -> None:
    written(tmp_path / "drafter")
    with pytest.raises(ExportError, match=r"is in the speculators layout, which vLLM reads.*--layout zlab"):
        load_zlab(tmp_path / "drafter")
