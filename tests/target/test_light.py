"""A light target is the whole target for a drafter, and where it can't be, the whole is loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from draftsmith.drafter.initialise import init_from_target
from draftsmith.drafter.model import Drafter, init_weights
from draftsmith.pipeline.resolve import Choices, resolve_drafter
from draftsmith.pipeline.settings import DrafterOptions
from draftsmith.target.light import Shards, UnreadableError, fill, load_light_target, load_parts, prove_ends
from draftsmith.target.model import Target, TargetConfig, load_target
from tests.families import FAMILIES, save_tiny

WHOLE = "is loaded, though its ends would do"


def two_layers(_facts: object) -> int:
    return 2


def no_layers(_facts: object) -> int:
    return 0


def config_of(folder: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> TargetConfig:
    return TargetConfig(target=str(folder), dtype=dtype)


def started(target: Target) -> dict[str, torch.Tensor]:
    """A drafter of two layers that starts from the target."""
    drafter = Drafter(resolve_drafter(DrafterOptions(layers=2, taps=(1, 4)), target.facts, Choices()))
    init_weights(drafter, 0)
    init_from_target(drafter, list(target.layers), target.final_norm, target.facts.layer_types)
    return drafter.state_dict()


def assert_same(light: Target, whole: Target) -> None:
    assert light.facts == whole.facts
    ours, theirs = light.ends(), whole.ends()
    assert torch.equal(ours.embedding_VH, theirs.embedding_VH)
    assert torch.equal(ours.head_VH, theirs.head_VH)
    assert (ours.head_VH is ours.embedding_VH) == (theirs.head_VH is theirs.embedding_VH)
    assert (ours.head_bias_V is None) == (theirs.head_bias_V is None)
    if ours.head_bias_V is not None and theirs.head_bias_V is not None:
        assert torch.equal(ours.head_bias_V, theirs.head_bias_V)
    scales = [(ends.logit_scale, ends.soft_cap, ends.embedding_scale) for ends in (ours, theirs)]
    assert scales[0] == scales[1]
    assert ours.embedding_VH.dtype == theirs.embedding_VH.dtype
    weights = started(light), started(whole)
    for name, weight in weights[1].items():
        assert torch.equal(weights[0][name], weight), name


BOTH = {"gemma2", "qwen3_5", "phi"}
"""Held against the whole in both dtypes; the others in fp32."""


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, "float32") for family in FAMILIES] + [(family, "bfloat16") for family in sorted(BOTH)],
)
def test_ends_and_start_are_the_whole_targets(
    family: str, dtype: Literal["float32", "bfloat16"], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(save_tiny(family, tmp_path), dtype)
    with caplog.at_level(logging.INFO, "draftsmith.target.light"):
        light = load_light_target(config, two_layers)
    assert WHOLE not in caplog.text
    assert_same(light, load_target(config, "cpu"))


def names_with_memory(target: Target) -> set[str]:
    return {name for name, parameter in target.model.named_parameters() if not parameter.is_meta}


def test_only_what_is_wanted_has_memory(tmp_path: Path) -> None:
    config = config_of(save_tiny("qwen3_5", tmp_path))
    light = load_light_target(config, no_layers)
    assert names_with_memory(light) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    light = load_light_target(config, lambda facts: 1 if facts.num_layers == 6 else 99)
    layers = {name.removeprefix("model.layers.").split(".")[0] for name in names_with_memory(light) if "layers" in name}
    assert layers == {"5"}, "the last full-attention layer; the one before is linear"


def test_weights_come_from_many_files_and_only_from_those_needed(tmp_path: Path) -> None:
    whole = load_file(save_tiny("qwen3", tmp_path) / "model.safetensors")
    layer = [name for name in whole if name.startswith("model.layers.0.")]
    parts = {"body.safetensors": layer, "rest.safetensors": [name for name in whole if name not in layer]}
    for file, names in parts.items():
        save_file({name: whole[name] for name in names}, tmp_path / file, metadata={"format": "pt"})
    (tmp_path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    target = load_target(config_of(tmp_path), "cpu")
    (tmp_path / "body.safetensors").unlink()
    assert_same(load_light_target(config_of(tmp_path), two_layers), target)
    (tmp_path / "rest.safetensors").unlink()
    with pytest.raises(UnreadableError, match=r"its file rest\.safetensors is missing"):
        load_parts(config_of(tmp_path), two_layers)


def test_the_ends_of_answers_come_from_the_generation_config(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(tmp_path)
    assert load_light_target(config_of(tmp_path), no_layers).facts.eos_token_ids[:2] == (7, 9)


def unreadable_files(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def twice_the_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"] * 2
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "spoil", "reason"),
    [
        ("qwen3", unreadable_files, "it has no safetensors files"),
        ("qwen2", twice_the_head, "its config ties embedding and head, but its files hold both"),
    ],
)
def test_what_can_not_be_read_in_part_is_loaded_whole(
    family: str, spoil: Callable[[Path], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(save_tiny(family, tmp_path))
    with caplog.at_level(logging.INFO, "draftsmith.target.light"):
        light = load_light_target(config_of(tmp_path), two_layers)
    assert f"{WHOLE}: {reason}" in caplog.text
    assert not any(parameter.is_meta for parameter in light.model.parameters())
    assert_same(light, load_target(config_of(tmp_path), "cpu"))


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def under_two_names(folder: Path) -> None:
    rewritten(folder, lambda weights: {f"{copy}.{n}": w.clone() for copy in "ab" for n, w in weights.items()})


def without_the_norm(folder: Path) -> None:
    rewritten(folder, lambda weights: {name: w for name, w in weights.items() if name != "model.norm.weight"})


def without_the_head(folder: Path) -> None:
    rewritten(folder, lambda weights: {name: w for name, w in weights.items() if name != "lm_head.weight"})


def one_row_less(folder: Path) -> None:
    key = "model.embed_tokens.weight"
    rewritten(folder, lambda weights: weights | {key: weights[key][:-1].clone()})


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (under_two_names, "hold its layers under 2 names"),
        (without_the_norm, "hold its layers under 0 names"),
        (without_the_head, "hold lm_head.weight 0 times"),
        (one_row_less, r"embed_tokens.weight is \[272, 32\], in its files \[271, 32\]"),
        (quantised, "quantised weights"),
    ],
)
def test_what_is_missing_or_ambiguous_is_never_guessed(
    spoil: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    spoil(save_tiny("qwen3", tmp_path))
    with pytest.raises(UnreadableError, match=reason):
        load_parts(config_of(tmp_path), two_layers)


def test_an_adapter_is_merged_into_the_whole(tmp_path: Path) -> None:
    config = TargetConfig(target=str(save_tiny("qwen3", tmp_path)), adapter="somewhere")
    with pytest.raises(UnreadableError, match="an adapter may change any weight"):
        load_parts(config, two_layers)


def test_weights_of_a_vision_tower_are_never_taken(tmp_path: Path) -> None:
    """A tower with the decoder's own names inside, and a draft head beside it as Qwen3.5 has one."""
    save_tiny("qwen3_5_vlm", tmp_path)
    whole = load_target(config_of(tmp_path), "cpu")

    def more(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        decoder = {n: w for n, w in weights.items() if n.startswith("model.language_model.")}
        tower = {n.replace("language_model", "vision_tower"): w + 1 for n, w in decoder.items()}
        head = {"mtp.norm.weight": decoder["model.language_model.norm.weight"] + 1}
        return weights | tower | head

    rewritten(tmp_path, more)
    assert_same(load_parts(config_of(tmp_path), two_layers), whole)


def test_a_model_without_a_head_is_not_filled(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    light = load_parts(config_of(tmp_path), no_layers)
    light.model.lm_head = None
    with pytest.raises(UnreadableError, match="its embedding or head in an unknown place"):
        fill(light.model, light.anatomy, [], Shards(str(tmp_path), None))


def test_ends_that_are_not_proved_are_not_taken(tmp_path: Path) -> None:
    """As by a model that does something to its last hidden states before the head reads them."""
    save_tiny("qwen3", tmp_path)
    light = load_parts(config_of(tmp_path), no_layers)
    light.model.lm_head.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    with pytest.raises(UnreadableError, match="its ends can't be proved without its layers"):
        prove_ends(light.model, light.anatomy)
    assert "forward" not in vars(light.layers[0])
