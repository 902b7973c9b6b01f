"""Which device does what, with the number of GPUs given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftsmith.errors import ConfigError
from draftsmith.pipeline.placement import Placement, place
from draftsmith.pipeline.settings import PipelineConfig


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count = int(request.param)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    return count


def names(placement: Placement) -> tuple[list[str], list[str], bool]:
    return [str(d) for d in placement.targets], [str(d) for d in placement.drafters], placement.joint


def cuda(*indices: int) -> list[str]:
    return [f"cuda:{index}" for index in indices]


@pytest.mark.parametrize(
    ("gpus", "options", "targets", "drafters", "joint"),
    [
        (0, {}, ["cpu"], ["cpu"], True),
        (0, {"targets": 5, "drafters": 2}, ["cpu"] * 5, ["cpu"] * 2, False),
        (0, {"drafters": 2}, ["cpu"], ["cpu"] * 2, False),
        (4, {"device": "cpu"}, ["cpu"], ["cpu"], True),
        (1, {}, cuda(0), cuda(0), True),
        (1, {"targets": 1, "drafters": 1}, cuda(0), cuda(0), True),
        (2, {}, cuda(0), cuda(1), False),
        (7, {}, cuda(0, 1, 2, 3, 4), cuda(5, 6), False),
        (8, {"targets": 5, "drafters": 2}, cuda(0, 1, 2, 3, 4), cuda(5, 6), False),
        (4, {"targets": 3}, cuda(0, 1, 2), cuda(3), False),
        (4, {"drafters": 3}, cuda(0), cuda(1, 2, 3), False),
        (2, {"colocate": True}, cuda(0, 1), cuda(0, 1), True),
    ],
    indirect=["gpus"],
)
def test_places(gpus: int, options: dict[str, Any], targets: list[str], drafters: list[str], joint: bool) -> None:
    placement = place(PipelineConfig(**options))
    assert names(placement) == (targets, drafters, joint)
    assert placement.on_gpu == (gpus > 0 and options.get("device") != "cpu")
    assert placement.why


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (0, {"device": "cuda"}, "no GPU is visible: check the driver, or leave --device out"),
        (2, {"targets": 5, "drafters": 2}, "7 workers need 7 GPUs, 2 are visible: lower --targets or --drafters"),
        (2, {"targets": 2}, "leave no room for both roles"),
        (2, {"drafters": 2}, "leave no room for both roles"),
        (1, {"targets": 2}, "leave no room for both roles"),
    ],
    indirect=["gpus"],
)
def test_refuses(gpus: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(PipelineConfig(**options))


@pytest.mark.parametrize(
    ("gpus", "options", "drafters"),
    [(0, {}, ["cpu"]), (3, {}, cuda(0, 1, 2)), (3, {"drafters": 2}, cuda(0, 1))],
    indirect=["gpus"],
)
def test_features_from_disk_need_no_gpu_for_a_target(gpus: int, options: dict[str, Any], drafters: list[str]) -> None:
    placement = place(PipelineConfig(**options), reads_features=True)
    assert [str(d) for d in placement.targets] == ["cpu"]
    assert [str(d) for d in placement.drafters] == drafters


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_features_from_disk_for_more_drafters_than_gpus(gpus: int) -> None:
    with pytest.raises(ConfigError, match="3 workers need 3 GPUs"):
        place(PipelineConfig(drafters=3), reads_features=True)


@pytest.mark.parametrize("gpus", [3], indirect=True)
def test_describe(gpus: int) -> None:
    assert place(PipelineConfig(targets=2)).describe() == "2 target(s) on cuda:0, cuda:1; 1 drafter(s) on cuda:2"
    assert place(PipelineConfig(colocate=True)).describe() == "both roles on cuda:0, cuda:1, cuda:2"
