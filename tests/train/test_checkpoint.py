"""Checkpoints: bit-exact, found, checked, refused; and runs killed at any moment."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.train.checkpoint import (
    MASTERS,
    META,
    OPTIMIZER,
    CheckpointConfig,
    RunRecord,
    best_checkpoint,
    discard_after,
    load_checkpoint,
    restore,
)
from draftsmith.train.checkpoint_writer import CheckpointWriter
from draftsmith.train.step import TrainState
from tests.train.killed import RECORD
from tests.train.saved import CONFIG, at, saved
from tests.train.tiny import Tiny, no_totals, tiny_batch, train, with_layers


def everything(state: TrainState) -> dict[str, torch.Tensor]:
    own = {"master": state.parameters.master_N, "shadow": state.parameters.shadow_N, "grad": state.parameters.grad_N}
    return own | state.optimizer.tensors()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_D02_the_state_after_a_resume_is_the_state_before(tmp_path: Path, dtype: torch.dtype) -> None:
    """dtypes, moments, counters, shadow and addresses: and the next steps are those of the uninterrupted run."""
    batch = tiny_batch()
    first = Tiny(dtype=dtype).build()
    train(first, batch, 5)
    totals = no_totals(first) + 0.1
    with CheckpointWriter(tmp_path, CONFIG, first, RunRecord(config={"a": [1, 2]}, data_fingerprint="f")) as writer:
        writer.save(at(5))
    before = {name: tensor.clone() for name, tensor in everything(first).items()}
    second = Tiny(dtype=dtype).build()
    addresses = {name: tensor.data_ptr() for name, tensor in everything(second).items()}
    second.parameters.grad_N.fill_(7.0)
    second.sums.fill_(7.0)
    checkpoint = load_checkpoint(tmp_path)
    restore(second, checkpoint)
    after = everything(second)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
        assert after[name].data_ptr() == addresses[name]
    assert checkpoint.position == at(5)
    assert checkpoint.record.config == {"a": [1, 2]}
    assert checkpoint.record.data_fingerprint == "f"
    assert set(checkpoint.versions) == {"draftsmith", "torch", "transformers", "python"}
    assert train(first, batch, 3) == train(second, batch, 3)
    assert torch.equal(first.parameters.master_N, second.parameters.master_N)
    assert float(totals[0]) == pytest.approx(0.1)


def test_F16_moments_and_adam_step_are_saved_not_only_weights(tmp_path: Path) -> None:
    state = Tiny().build()
    train(state, tiny_batch(), 3)
    saved(tmp_path, state, [3])
    checkpoint = load_checkpoint(tmp_path)
    assert float(checkpoint.optimizer["adamw.0.step"]) == 3.0
    assert checkpoint.optimizer["adamw.0.exp_avg_sq"].dtype == torch.float32
    assert checkpoint.optimizer["adamw.0.exp_avg_sq"].abs().sum() > 0
    assert checkpoint.masters["layers.0.self_attn.q_proj.weight"].shape == (48, 48)


def test_B22_a_checkpoint_holds_the_drafter_alone(tmp_path: Path) -> None:
    state = Tiny().build()
    saved(tmp_path, state, [1])
    own = {name for name, _ in state.drafter.named_parameters()}
    assert set(load_checkpoint(tmp_path).masters) == own


def test_extra_tensors_travel_with_the_state(tmp_path: Path) -> None:
    state = Tiny().build()
    totals = no_totals(state)
    with CheckpointWriter(tmp_path, CONFIG, state, RECORD, {"totals": totals}) as writer:
        totals += 1 / 3
        writer.save(at(1))
        totals.zero_()
    restore(state, load_checkpoint(tmp_path), {"totals": totals})
    assert torch.equal(totals, torch.full_like(totals, 1 / 3))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", [MASTERS, OPTIMIZER, META])
@pytest.mark.parametrize("spoil", [cut, flip, Path.unlink])
def test_a_damaged_checkpoint_is_skipped_with_a_word(
    tmp_path: Path, name: str, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, Tiny().build(), [1, 2])
    newest = tmp_path / "checkpoints" / "step-00000002"
    spoil(newest / name)
    if name == META and spoil is cut:
        cut(newest / name)  # the first only took the line's end
    with caplog.at_level(logging.WARNING):
        assert load_checkpoint(tmp_path).position.step == 1
    assert "step-00000002" in caplog.text
    assert "trying the one before" in caplog.text
    with pytest.raises(CheckpointError, match=r"step-00000002 (is damaged|can't be read)"):
        load_checkpoint(newest)
    assert best_checkpoint(tmp_path) is None


def test_one_changed_digit_in_the_step_number_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path, Tiny().build(), [1])
    meta = tmp_path / "checkpoints" / "step-00000001" / META
    meta.write_text(meta.read_text().replace('"step": 1', '"step": 7'))
    with pytest.raises(CheckpointError, match=r"is damaged: meta.json doesn't match its checksum"):
        load_checkpoint(tmp_path / "checkpoints" / "step-00000001")


def test_a_run_without_a_readable_checkpoint_says_why_for_each(tmp_path: Path) -> None:
    saved(tmp_path, Tiny().build(), [1, 2])
    for step in (1, 2):
        flip(tmp_path / "checkpoints" / f"step-0000000{step}" / MASTERS)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*step-00000002 .*step-00000001 is damaged"):
        load_checkpoint(tmp_path)


def test_missing_folders_and_empty_runs_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a folder: give a run folder"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: .* another --out"):
        load_checkpoint(tmp_path)


def test_another_format_names_the_version_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, Tiny().build(), [1])
    monkeypatch.setattr("draftsmith.train.checkpoint.FORMAT", 0)
    with pytest.raises(CheckpointError, match=r"has format 1, this draftsmith reads 0: use draftsmith \d"):
        load_checkpoint(tmp_path / "checkpoints" / "step-00000001")


def test_resuming_from_an_earlier_step_discards_what_came_after(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, CheckpointConfig(keep=5), Tiny().build(), RECORD) as writer:
        for step in (1, 2, 3):
            writer.save(at(step), float(step))
    assert discard_after(tmp_path, 1) == ["step-00000003", "step-00000002"]
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert best.name == "step-00000001"
    assert discard_after(tmp_path / "new", 0) == []


def test_another_drafter_or_precision_does_not_fit(tmp_path: Path) -> None:
    state = Tiny().build()
    saved(tmp_path, state, [1])
    checkpoint = load_checkpoint(tmp_path)
    other = Tiny(config=with_layers("full_attention")).build()
    before = other.parameters.master_N.clone()
    with pytest.raises(CheckpointError, match=r"doesn't fit: it lacks nothing, holds also \['layers.1"):
        restore(other, checkpoint)
    assert torch.equal(other.parameters.master_N, before)
    rounded = {name: tensor.bfloat16() for name, tensor in checkpoint.masters.items()}
    with pytest.raises(CheckpointError, match=r"is torch.bfloat16 .* there and torch.float32"):
        restore(state, replace(checkpoint, masters=rounded))
    with pytest.raises(CheckpointError, match=r"lacks \['totals'\]"):
        restore(state, checkpoint, {"totals": no_totals(state)})


def test_config_refuses_what_would_never_save_or_keep() -> None:
    with pytest.raises(ConfigError, match="--save-every 0 is not 1 or more"):
        CheckpointConfig(save_every=0)
    with pytest.raises(ConfigError, match="--keep 0 would delete the only checkpoint"):
        CheckpointConfig(keep=0)
