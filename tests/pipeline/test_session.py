"""A session: stop and resume give the uninterrupted run, and signals ask first and end at once the second time."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.pipeline.session import LocalCrew, Signals, capture_epoch, train_stage
from draftsmith.pipeline.stage import RunConfig
from draftsmith.pipeline.stop import Stop
from tests.pipeline.runs import losses, quiet, stage_in, write_inputs


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def unmeasured(_step: int, _weights: dict[str, torch.Tensor]) -> tuple[float, Mapping[str, Any]]:
    return 0.0, {}


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(config: RunConfig, tmp_path: Path) -> None:
    whole = stage_in(config, tmp_path / "whole")
    train_stage(whole, unmeasured, LocalCrew(whole))
    first = stage_in(config, tmp_path / "parts")

    def stop(_step: int, _weights: dict[str, torch.Tensor]) -> tuple[float, Mapping[str, Any]]:
        first.stop.request()
        return 0.0, {}

    train_stage(first, stop, LocalCrew(first))
    assert [step for step, _ in losses(tmp_path / "parts")] == [1, 2, 3, 4]
    (tmp_path / "parts" / "config.json").write_text("{}")
    second = stage_in(config, tmp_path / "parts", resume=True)
    team, _ = train_stage(second, unmeasured, LocalCrew(second))
    assert team.drafters[0].step == 8
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_B14_B20_features_from_disk_train_to_the_same_losses_as_live_ones(config: RunConfig, tmp_path: Path) -> None:
    """Within one epoch; the cache is captured into the run's folder first."""
    online = replace(config, batch=replace(config.batch, max_steps=7))
    cached = replace(online, data=replace(config.data, cache_features=True))
    for name, choice in (("online", online), ("cached", cached)):
        stage = stage_in(choice, tmp_path / name)
        order = stage.order()
        assert order is not None
        assert order.num_batches(0) * 3 >= 7 * 2, "the run must not leave the first epoch"
        train_stage(stage, unmeasured, LocalCrew(stage))
    assert (tmp_path / "cached" / "features" / "features.json").exists()
    assert losses(tmp_path / "cached") == losses(tmp_path / "online")


def test_capture_writes_every_batch_of_the_epoch(config: RunConfig, tmp_path: Path) -> None:
    stage = stage_in(config, tmp_path / "run")
    order = stage.order()
    assert order is not None
    folder, index = capture_epoch(stage, tmp_path / "features", order)
    assert index.num_batches == order.num_batches(0) == len(list(folder.glob("*.safetensors")))


def test_a_signal_asks_for_a_stop_and_a_second_one_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    stop, before = Stop(), signal.getsignal(signal.SIGTERM)
    with Signals(stop, quiet()):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert ended == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [128 + signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before
