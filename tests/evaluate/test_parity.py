"""Independent code agrees with a sound export, and every injected fault is caught with its cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from draftsmith.errors import ExportError
from draftsmith.evaluate import parity
from draftsmith.evaluate.decode import DecodeLimits, decode
from draftsmith.evaluate.export import export_zlab, load_zlab
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.evaluate.parity import Verdict, check_decoding, check_logits, check_output, independent_code, verify
from tests.evaluate.overfit import PROMPTS, drafter_config, overfit, random_drafter
from tests.families import tiny_target


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = overfit("llama")
    info = ExportInfo.of(case.target.facts, case.target.ends(), template_kwargs={"enable_thinking": True})
    return export_zlab(case.drafter, None, info, tmp_path_factory.mktemp("sound") / "drafter", torch.float32)


def look(folder: Path, **changes: Any) -> Verdict:
    settings: dict[str, Any] = {"template_kwargs": {"enable_thinking": True}, "max_new_tokens": 24} | changes
    return verify(folder, tiny_target("llama"), PROMPTS[:3], **settings)


def test_a_sound_export_passes_every_look(sound: Path) -> None:
    verdict = look(sound)
    assert verdict.passed, str(verdict)
    assert [check.name for check in verdict.checks] == ["config", "output", "logits", "decoding"]
    assert str(verdict).endswith("serves as it trained.")
    assert "the same" in verdict.checks[-1].detail


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "granite", "qwen3_5", "mistral"])
def test_other_families_pass_too(family: str, tmp_path: Path) -> None:
    target = tiny_target(family)
    drafter = random_drafter(drafter_config(target))
    folder = export_zlab(drafter, None, ExportInfo.of(target.facts, target.ends()), tmp_path / "drafter")
    verdict = verify(folder, target, PROMPTS[:2], 12)
    assert verdict.passed, str(verdict)


Values = dict[str, Any]


def set_theta(values: Values) -> None:
    values["rope_theta"] = values["rope_parameters"]["rope_theta"] = 10_000.0
    values["rope_scaling"] = None
    values["rope_parameters"]["rope_type"] = "default"


def set_taps(values: Values) -> None:
    values["dflash_config"]["target_layer_ids"] = [tap - 1 for tap in values["dflash_config"]["target_layer_ids"]]


def set_mask(values: Values) -> None:
    values["dflash_config"]["mask_token_id"] += 1


def set_block(values: Values) -> None:
    values["block_size"] = values["dflash_config"]["block_size"] = 7


def set_causal(values: Values) -> None:
    values["is_causal"] = True


def set_layers(values: Values) -> None:
    values["layer_types"] = values["layer_types"][::-1]


def set_partial(values: Values) -> None:
    values["rope_parameters"]["partial_rotary_factor"] = 0.25


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param(set_theta, "RoPE", id="B16-theta"),
        pytest.param(set_partial, "RoPE", id="partial-rotary"),
        pytest.param(set_taps, "layer offset", id="B06-layer-offset"),
        pytest.param(set_mask, "mask token", id="F06-mask-id"),
        pytest.param(set_block, "block size", id="F02-block-size"),
        pytest.param(set_causal, "causal flag", id="F12-causal"),
        pytest.param(set_layers, "attention layout", id="C16-layer-types"),
    ],
)
def test_a_changed_config_is_caught(sound: Path, tmp_path: Path, fault: Callable[[Values], None], cause: str) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "drafter"))
    values = json.loads((folder / "config.json").read_text())
    fault(values)
    (folder / "config.json").write_text(json.dumps(values))
    verdict = look(folder)
    assert not verdict.passed
    assert f"Likely cause: {cause}" in str(verdict)


def reweighted(sound: Path, folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    shutil.copytree(sound, folder)
    named = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(
        {name: change(name, weight) for name, weight in named.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize(("shift", "words"), [(-1.0, "w - 1"), (1.0, "1 \\+ w")])
def test_the_other_norm_convention_is_caught_by_name(sound: Path, tmp_path: Path, shift: float, words: str) -> None:
    folder = reweighted(sound, tmp_path / "d", lambda name, w: w + shift if "norm" in name else w)
    with pytest.raises(AssertionError, match=f"norm convention: norm weights are stored as {words}"):
        assert look(folder).passed, str(look(folder))


def test_a_damaged_weight_is_caught(sound: Path, tmp_path: Path) -> None:
    name = "layers.1.mlp.down_proj.weight"
    folder = reweighted(sound, tmp_path / "d", lambda key, w: w.roll(1, 0) if key == name else w)
    assert "Likely cause: weights" in str(look(folder))


def test_F12_a_missing_weight_is_caught(sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "d"))
    named = safetensors.torch.load_file(folder / "model.safetensors")
    del named["layers.0.self_attn.q_norm.weight"]
    safetensors.torch.save_file(named, folder / "model.safetensors")
    assert "Likely cause: missing weight" in str(look(folder))


def test_G01_another_template_or_thinking_mode_is_caught(sound: Path, tmp_path: Path) -> None:
    verdict = look(sound, template_kwargs={"enable_thinking": False})
    assert "Likely cause: template arguments" in str(verdict)
    folder = Path(shutil.copytree(sound, tmp_path / "d"))
    record = json.loads((folder / "draftsmith.json").read_text())
    record["template"]["hash"] = "0" * 64
    (folder / "draftsmith.json").write_text(json.dumps(record))
    assert "Likely cause: chat template" in str(look(folder))


def test_a_drafter_without_record_is_held_against_the_target(sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "d"))
    (folder / "draftsmith.json").unlink()
    assert look(folder).passed
    values = json.loads((folder / "config.json").read_text())
    set_theta(values)
    (folder / "config.json").write_text(json.dumps(values))
    assert "Likely cause: RoPE" in str(look(folder))


def test_independent_code_that_computes_otherwise_is_seen_by_each_look(sound: Path) -> None:
    """The looks on their own, with faults that no file shows: in the layers read, the flag, the mask."""
    case = overfit("llama")
    config, ours = load_zlab(sound)
    record = json.loads((sound / "draftsmith.json").read_text())
    package = independent_code()

    def fresh() -> Any:
        return package.DFlashDraftModel.from_pretrained(sound, dtype=torch.float32).eval()

    with torch.no_grad():
        shifted = fresh()
        shifted.target_layer_ids = [tap + 1 for tap in config.taps]
        check = check_logits(shifted, ours, case.target, PROMPTS[:2])
        assert not check.passed
        assert "layer offset" in check.cause
        causal = fresh()
        for layer in causal.layers:
            layer.self_attn.is_causal = not layer.self_attn.is_causal
        assert "causal flag" in check_output(causal, config, record).cause
        masked = fresh()
        masked.mask_token_id = 5
        assert not check_logits(masked, ours, case.target, PROMPTS[:2]).passed
        assert not check_decoding(package, masked, ours, case.target, (PROMPTS[:2], 24)).passed
        hot = fresh()
        hot.rotary_emb.inv_freq.mul_(1.5)
        assert not check_output(hot, config, record).passed


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "PACKAGE", "no_such_package")
    with pytest.raises(ExportError, match="pip install --no-deps dflash"):
        independent_code()


def test_the_verdict_names_steps_when_loops_differ(sound: Path) -> None:
    case = overfit("llama")
    package = independent_code()
    theirs = package.DFlashDraftModel.from_pretrained(sound, dtype=torch.float32).eval()
    other = random_drafter(case.drafter.config)
    with torch.no_grad():
        check = check_decoding(package, theirs, other, case.target, (PROMPTS[:2], 24))
    assert "other steps" in check.detail
    ours = decode(case.target, other, case.target.ends(), PROMPTS[0], DecodeLimits(max_new_tokens=24))
    assert f"in {len(ours.steps)} steps here" in check.detail
