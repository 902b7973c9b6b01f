"""From a configuration to everything resolved: what is pinned down, and features on disk that don't fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.errors import ConfigError, TargetError
from draftsmith.pipeline.run import capture_only, prepare_stage
from draftsmith.pipeline.stage import RunConfig, load_inputs
from draftsmith.pipeline.store import INDEX
from tests.pipeline.runs import quiet, stage_in, write_inputs


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def features(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture_only(replace(config, out=str(tmp_path_factory.mktemp("store") / "features")), quiet())


def test_a_stage_follows_its_configuration(config: RunConfig, tmp_path: Path) -> None:
    stage = stage_in(config, tmp_path / "run")
    assert stage.shape.num_tokens == 512
    assert (stage.batching.num_anchors, stage.batching.draws_per_batch, stage.batching.total_steps) == (16, 3, 8)
    assert stage.state.total_steps == 8
    assert not stage.state.compiled
    order = stage.order()
    assert order is not None
    assert stage.inputs.data is not None
    assert stage.epoch_index(order, stage.inputs.data).num_batches == order.num_batches(0)


def test_a_checkpoint_pins_what_a_resume_compares(config: RunConfig, tmp_path: Path) -> None:
    pinned = stage_in(config, tmp_path / "run").record.config
    assert {"target", "mask-token", "architecture", "objective", "gpus", "data", "batching"} <= set(pinned)
    assert pinned["objective"]["gamma"] is not None
    json.dumps(pinned)


def test_held_out_conversations_are_not_trained_on(config: RunConfig, tmp_path: Path) -> None:
    data = stage_in(config, tmp_path / "run").inputs.data
    assert data is not None
    assert (len(data.train), len(data.held_out)) == (36, 4)


def test_features_on_disk_decide_the_batches(config: RunConfig, features: Path, tmp_path: Path) -> None:
    stage = stage_in(replace(config, data=replace(config.data, data="", features=str(features))), tmp_path / "run")
    assert stage.order() is None
    assert stage.inputs.data is None
    assert stage.inputs.store is not None
    assert stage.shape == stage.inputs.store[1].shape


def test_features_of_other_taps_are_refused(config: RunConfig, features: Path, tmp_path: Path) -> None:
    data = replace(config.data, data="", features=str(features))
    other = replace(config, data=data, drafter=replace(config.drafter, taps=(1, 3)), out=str(tmp_path))
    inputs = load_inputs(other, None, quiet())
    with pytest.raises(ConfigError, match=r"holds features of .*, taps \[1, 4\].*needs .*\[1, 3\].*capture again"):
        prepare_stage(other, tmp_path, inputs, quiet())


def test_features_leave_nothing_to_colocate(config: RunConfig) -> None:
    both = replace(config.pipeline, targets="auto", drafters="auto", colocate=True)
    with pytest.raises(ConfigError, match="so there is nothing to colocate: drop --colocate"):
        replace(config, data=replace(config.data, features="f"), pipeline=both)


def test_without_anything_to_measure_on_features_need_no_whole_target(config: RunConfig, features: Path) -> None:
    only = replace(config, data=replace(config.data, data="", features=str(features)))
    for measure, is_whole in ((config.measure, False), (replace(config.measure, prompts=("p.jsonl",)), True)):
        target = load_inputs(replace(only, measure=measure), None, quiet()).target
        assert any(parameter.is_meta for parameter in target.model.parameters()) != is_whole


def test_nothing_to_capture(config: RunConfig, features: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to capture: give --data CHATS"):
        capture_only(replace(config, data=replace(config.data, data="", features=str(features))), quiet())
    assert (features / INDEX).exists()


def test_8_bit_targets_are_refused_on_a_cpu_before_anything_loads(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="--target-compute fp8 needs a GPU"):
        stage_in(replace(config, target=replace(config.target, target_compute="fp8")), tmp_path / "run")
