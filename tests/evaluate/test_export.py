"""Exported folders: exact layout, strict loading, independent code agrees, faults by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dflash.model
import pytest
import safetensors.torch
import torch
from transformers import AutoConfig

from draftsmith.drafter.model import FULL, SLIDING
from draftsmith.drafter.rope import RopeConfig, inverse_frequencies
from draftsmith.errors import ExportError
from draftsmith.evaluate.export import (
    check_against_target,
    drafter_folder,
    export_zlab,
    load_zlab,
    read_json,
    verify_export,
    write_folder,
)
from draftsmith.evaluate.layout import ExportInfo, expected_shapes
from draftsmith.evaluate.probe import CONTEXT, Probe, probe_output
from tests.evaluate.overfit import drafter_config, random_drafter
from tests.families import THETA, tiny_target

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}


def info_of(family: str = "qwen3") -> ExportInfo:
    target = tiny_target(family)
    return ExportInfo.of(target.facts, target.ends())


def exported(folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    drafter = random_drafter(drafter_config(tiny_target("qwen3"), **changes))
    return export_zlab(drafter, None, info_of(), folder / "drafter", dtype)


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def dflash_output(folder: Path, probe: Probe) -> torch.Tensor:
    """The `dflash` package's model of the folder, on the probe."""
    model = dflash.model.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    size = probe.block_BH.shape[0]
    with torch.no_grad():
        return model(
            position_ids=torch.arange(CONTEXT + size)[None],
            noise_embedding=probe.block_BH[None],
            target_hidden=probe.features_TFH[None],
        )[0]


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, SLIDING), (FULL, SLIDING, FULL)])
@pytest.mark.parametrize("scaling", [{}, YARN], ids=["plain", "yarn"])
def test_the_dflash_package_computes_the_same(
    tmp_path: Path, layer_types: tuple[str, ...], scaling: dict[str, Any]
) -> None:
    rope = RopeConfig(head_dim=16, theta=THETA, scaling=scaling, max_positions=256)
    config = drafter_config(tiny_target("qwen3"), layer_types=layer_types, rope=rope)
    drafter = random_drafter(config)
    folder = export_zlab(drafter, None, info_of(), tmp_path / "drafter", torch.float32)
    theirs = dflash_output(folder, Probe.of(config))
    ours = probe_output(drafter)
    assert ours.abs().mean() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_heads_of_other_sizes_than_the_targets_are_exported(tmp_path: Path) -> None:
    facts = tiny_target("qwen3").facts
    rope = RopeConfig(head_dim=8, theta=THETA, scaling=YARN, max_positions=256)
    sizes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "intermediate_size": 40, "rope": rope}
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) != (6, 3, 8)
    config = drafter_config(tiny_target("qwen3"), **sizes)
    drafter = random_drafter(config)
    folder = export_zlab(drafter, None, info_of(), tmp_path / "drafter", torch.float32)
    values = read_json(folder / "config.json")
    assert [values[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [6, 3, 8]
    assert values["intermediate_size"] == 40
    assert load_zlab(str(folder))[0] == config
    torch.testing.assert_close(probe_output(drafter), dflash_output(folder, Probe.of(config)), rtol=1e-5, atol=1e-5)


def test_the_config_states_everything_at_every_place(tmp_path: Path) -> None:
    values = read_json(exported(tmp_path, dtype=torch.bfloat16) / "config.json")
    facts = tiny_target("qwen3").facts
    expected = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 8,
        "num_target_layers": 6,
        "layer_types": [FULL, SLIDING],
        "sliding_window": 12,
        "use_sliding_window": True,
        "rope_theta": THETA,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": facts.bos_token_id,
        "eos_token_id": facts.eos_token_ids[0],
        "pad_token_id": facts.pad_token_id,
        "vocab_size": facts.vocab_size,
        "dflash_config": {
            "mask_token_id": facts.reserved_token_ids[0],
            "target_layer_ids": [1, 2, 4],
            "block_size": 8,
        },
    }
    assert {key: values[key] for key in expected} == expected


def test_scaled_embeddings_and_logits_are_stated(tmp_path: Path) -> None:
    target = tiny_target("gemma2")
    drafter = random_drafter(drafter_config(target))
    folder = export_zlab(drafter, None, ExportInfo.of(target.facts, target.ends()), tmp_path / "d")
    dflash_config = read_json(folder / "config.json")["dflash_config"]
    assert dflash_config["input_embedding_scale"] == target.ends().embedding_scale != 1.0
    assert dflash_config["final_logit_softcapping"] == 3.0
    granite = tiny_target("granite")
    folder = export_zlab(drafter, None, ExportInfo.of(granite.facts, granite.ends()), tmp_path / "d")
    assert read_json(folder / "config.json")["dflash_config"]["output_multiplier"] == 0.25


def test_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    drafter = random_drafter(drafter_config(tiny_target("qwen3")))
    folder = export_zlab(drafter, None, info_of(), tmp_path / "drafter", torch.float32)
    config, loaded = load_zlab(folder)
    assert config == drafter.config
    for name, weight in drafter.named_parameters():
        assert torch.equal(weight, loaded.get_parameter(name)), name
    named = safetensors.torch.load_file(folder / "model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in named.items()} == expected_shapes(config)
    width = config.num_kv_heads * config.head_dim
    fused = drafter.get_parameter("layers.0.self_attn.kv_proj.weight")
    assert torch.equal(named["layers.0.self_attn.k_proj.weight"], fused[:width])
    assert torch.equal(named["layers.0.self_attn.v_proj.weight"], fused[width:])


def test_given_weights_win_over_the_drafters_own(tmp_path: Path) -> None:
    drafter = random_drafter(drafter_config(tiny_target("qwen3")))
    masters = {name: weight.detach() + 1 for name, weight in drafter.named_parameters()}
    _, loaded = load_zlab(export_zlab(drafter, masters, info_of(), tmp_path / "drafter", torch.float32))
    assert torch.equal(loaded.norm.weight, drafter.norm.weight + 1)


def test_an_export_replaces_an_earlier_one_whole(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    (folder / "stale.safetensors").write_bytes(b"old")
    assert exported(tmp_path) == folder
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "draftsmith.json", "model.safetensors"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["drafter"]


def test_a_failed_export_leaves_the_old_one(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    before = (folder / "config.json").read_bytes()

    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(folder, fail)
    assert (folder / "config.json").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["drafter"]


def test_an_export_never_replaces_something_else(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match="something other than a drafter"):
        exported(tmp_path)
    assert (tmp_path / "drafter" / "thesis.txt").exists()


def test_B16_and_B17_theta_and_scaling_reach_every_loader(tmp_path: Path) -> None:
    rope = RopeConfig(head_dim=16, theta=777_777.0, scaling=YARN, max_positions=256)
    folder = exported(tmp_path, rope=rope)
    assert load_zlab(folder)[0].rope == rope
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 777_777.0

    def only_flat(values: dict[str, Any]) -> None:
        del values["rope_parameters"]

    def only_nested(values: dict[str, Any]) -> None:
        del values["rope_theta"], values["rope_scaling"]

    ours = inverse_frequencies(rope, "cpu")
    for change in (only_flat, only_nested):
        edited = exported(tmp_path, rope=rope)
        edit(edited, change)
        theirs = inverse_frequencies(load_zlab(edited)[0].rope, "cpu")
        assert torch.equal(ours[0], theirs[0])
        assert ours[1] == theirs[1]
        assert AutoConfig.from_pretrained(edited).rope_parameters["rope_theta"] == 777_777.0
    plain = exported(tmp_path)
    assert load_zlab(plain)[0].rope.scaling == {}


def drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        for key in path[:-1]:
            values = values[key]
        del values[path[-1]]

    return change


def put(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(drop("dflash_config", "target_layer_ids"), "lacks target_layer_ids", id="F04"),
        pytest.param(drop("dflash_config", "mask_token_id"), "lacks mask_token_id", id="mask"),
        pytest.param(put(16, "block_size"), "states block_size twice", id="F05"),
        pytest.param(put(True, "sample_from_anchor"), "sample_from_anchor True", id="F03"),
        pytest.param(put(4, "dflash_config", "conv_kernel_size"), "conv_kernel_size", id="F08-F18"),
        pytest.param(put(["DFlash2DraftModel"], "architectures"), "architectures", id="architecture"),
        pytest.param(put(True, "is_causal"), "is_causal true", id="F12-causal"),
        pytest.param(put(False, "dflash_config", "causal"), "causal false", id="F12-noncausal"),
        pytest.param(put(1e4, "rope_theta"), "rope_theta 10000.0 beside", id="B16"),
        pytest.param(put({"rope_type": "linear", "factor": 2.0}, "rope_scaling"), "rope_scaling", id="B17"),
        pytest.param(put(0.25, "rope_parameters", "partial_rotary_factor"), "partial_rotary", id="partial"),
        pytest.param(drop("num_target_layers"), "lacks 'num_target_layers'", id="num-target-layers"),
        pytest.param(drop("sliding_window"), "without sliding_window", id="window"),
        pytest.param(put([FULL], "layer_types"), "2 layers but 1 layer_types", id="layer-types"),
        pytest.param(put(1, "dflash_config", "block_size"), "states block_size twice", id="block-size-1"),
        pytest.param(put(9999, "dflash_config", "mask_token_id"), "no embedding row", id="mask-range"),
        pytest.param(put(3, "num_hidden_layers"), "layer_types", id="layers"),
        pytest.param(put(96, "intermediate_size"), "instead of", id="shape"),
    ],
)
def test_loading_refuses_what_others_would_guess(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    folder = exported(tmp_path)
    edit(folder, change)
    with pytest.raises(ExportError, match=message):
        load_zlab(folder)


def test_rope_theta_may_not_be_missing_altogether(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    edit(folder, drop("rope_theta"))
    edit(folder, drop("rope_parameters"))
    with pytest.raises(ExportError, match="lacks rope_theta"):
        load_zlab(folder)


def test_F05_either_place_alone_is_enough(tmp_path: Path) -> None:
    for path in (("block_size",), ("dflash_config", "block_size")):
        folder = exported(tmp_path)
        edit(folder, drop(*path))
        assert load_zlab(folder)[0].block_size == 8


def test_F12_missing_and_unexpected_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    file = folder / "model.safetensors"
    named = safetensors.torch.load_file(file)
    fewer = {name: weight for name, weight in named.items() if name != "layers.1.self_attn.q_norm.weight"}
    safetensors.torch.save_file(fewer, file)
    with pytest.raises(ExportError, match=r"lacks layers\.1\.self_attn\.q_norm\.weight"):
        load_zlab(folder)
    safetensors.torch.save_file(named | {"layers.0.self_attn.sinks": torch.zeros(4)}, file)
    with pytest.raises(ExportError, match=r"layers\.0\.self_attn\.sinks"):
        load_zlab(folder)


def test_F13_damaged_folders_say_what_is_wrong(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    safetensors.torch.save_file({"norm.weight": torch.ones(32)}, folder / "another.safetensors")
    with pytest.raises(ExportError, match="two files"):
        load_zlab(folder)
    (folder / "another.safetensors").write_bytes(b"xx")
    with pytest.raises(ExportError, match="damaged"):
        load_zlab(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ExportError, match=r"holds no model\.safetensors"):
        load_zlab(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ExportError, match="not a JSON object"):
        load_zlab(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ExportError, match="not JSON"):
        load_zlab(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ExportError, match="can't be read"):
        load_zlab(folder)
    with pytest.raises(ExportError, match="doesn't exist"):
        drafter_folder(tmp_path / "nowhere")
    with pytest.raises(ExportError, match="can't be downloaded"):
        drafter_folder("nobody/no-such-drafter")


def test_F02_verify_export_holds_the_file_against_training(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    config = load_zlab(folder)[0]
    facts = tiny_target("qwen3").facts
    verify_export(folder, config, facts)
    edit(folder, put(7, "block_size"))
    edit(folder, put(7, "dflash_config", "block_size"))
    with pytest.raises(ExportError, match="block_size 7, trained with 8"):
        verify_export(folder, config, facts)


def test_verify_export_rebuilds_the_rope_tables(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    config = load_zlab(folder)[0]
    edit(folder, put(1e4, "rope_theta"))
    edit(folder, put(1e4, "rope_parameters", "rope_theta"))
    with pytest.raises(ExportError, match="RoPE"):
        verify_export(folder, config, tiny_target("qwen3").facts)


def test_verify_export_compares_every_value(tmp_path: Path) -> None:
    folder = exported(tmp_path, dtype=torch.bfloat16)
    config, drafter = load_zlab(folder)
    facts = tiny_target("qwen3").facts
    trained = {name: weight.detach() * 1.0001 for name, weight in drafter.named_parameters()}  # rounds to the same bf16
    verify_export(folder, config, facts, trained)
    trained["fc.weight"][3, 4] += 1.0
    with pytest.raises(ExportError, match=r"other values of fc\.weight than were trained: export it again"):
        verify_export(folder, config, facts, trained)
    trained["norm.weight"][0] = float("nan")
    with pytest.raises(ExportError, match=r"not finite in norm\.weight: training diverged; export an earlier"):
        verify_export(folder, config, facts, trained)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"taps": (1, 2, 5)}, "taps layers", id="B07-B09-last-layer"),
        pytest.param({"taps": (1, 4, 2)}, "taps layers", id="unsorted"),
        pytest.param({"num_target_layers": 8}, "8 layers", id="B08"),
        pytest.param({"vocab_size": 512, "mask_token_id": 300}, "300", id="C19"),
        pytest.param({"mask_token_id": 258}, "end or pad", id="C18-eos"),
        pytest.param({"mask_token_id": 256}, "end or pad", id="C18-pad"),
        pytest.param({"hidden_size": 64}, "hidden size 64", id="hidden"),
    ],
)
def test_a_drafter_for_another_target_is_refused(changes: dict[str, Any], message: str) -> None:
    target = tiny_target("qwen3")
    with pytest.raises(ExportError, match=message):
        check_against_target(drafter_config(target, **changes), target.facts, "config.json")
