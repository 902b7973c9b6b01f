"""GPU samples: ten a second in the background, means since the last read, and a word where nothing can be read."""

from __future__ import annotations

import math
import sys
import threading
import time
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.pipeline import utilisation
from draftsmith.pipeline.utilisation import GpuSampler, Reading, mean_utilisation, open_sampler

GPUS = [torch.device("cuda", 1), torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]


class Script:
    """A probe that plays readings; an exception among them is raised."""

    def __init__(self, *readings: Reading | RuntimeError) -> None:
        self.readings = list(readings)

    def read(self) -> Reading:
        reading = self.readings.pop(0)
        if isinstance(reading, RuntimeError):
            raise reading
        return reading


class Steady:
    """A GPU that is half busy for ever."""

    def read(self) -> Reading:
        return Reading(0.5, 3e9)


def test_a_mean_is_of_the_samples_since_the_last_read() -> None:
    sampler = GpuSampler({"cuda:0": Script(Reading(0.2, 1.0), Reading(0.6, 2.0), Reading(1.0, 3.0))})
    sampler.sample()
    sampler.sample()
    assert sampler.take() == {"cuda:0": {"utilisation": pytest.approx(0.4), "used_bytes": 2.0}}
    sampler.sample()
    assert sampler.take() == {"cuda:0": {"utilisation": 1.0, "used_bytes": 3.0}}
    nothing_new = sampler.take()["cuda:0"]
    assert math.isnan(nothing_new["utilisation"])
    assert nothing_new["used_bytes"] == 3.0


def test_before_the_first_sample_there_is_no_number() -> None:
    assert all(math.isnan(value) for value in GpuSampler({"cuda:0": Steady()}).take()["cuda:0"].values())


def test_a_lost_gpu_and_an_unknown_utilisation_leave_the_others_alone() -> None:
    lost = Script(Reading(0.5, 1.0), RuntimeError("gone"))
    sliced = Script(Reading(math.nan, 5.0), Reading(math.nan, 6.0))
    sampler = GpuSampler({"cuda:0": lost, "cuda:1": sliced})
    sampler.sample()
    sampler.sample()
    taken = sampler.take()
    assert taken["cuda:0"] == {"utilisation": 0.5, "used_bytes": 1.0}
    assert math.isnan(taken["cuda:1"]["utilisation"])
    assert taken["cuda:1"]["used_bytes"] == 6.0
    assert math.isnan(mean_utilisation([]))


def test_the_thread_samples_at_its_rate_and_ends() -> None:
    before = threading.active_count()
    with GpuSampler({"cuda:0": Steady()}, hertz=50.0) as sampler:
        time.sleep(1.0)
        samples = sampler.drain()["cuda:0"]
    assert threading.active_count() == before
    assert 10 <= len(samples) <= 52
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(samples)]
    assert min(gaps) >= 0.02
    assert samples[0][1] == Reading(0.5, 3e9)
    after = len(sampler.drain()["cuda:0"])
    time.sleep(0.1)
    assert len(sampler.drain()["cuda:0"]) == 0, after


def test_without_a_gpu_it_is_silent_and_starts_no_thread() -> None:
    said: list[str] = []
    before = threading.active_count()
    with open_sampler([torch.device("cpu")], said.append) as sampler:
        assert threading.active_count() == before
        assert sampler.take() == {}
    assert said == []


def fake_nvml(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """The package's face with its own exception; the driver's answers are given."""

    class NVMLError(Exception):
        pass

    def refuse(*_: Any) -> Any:
        raise NVMLError("Driver Not Loaded")

    module = ModuleType("pynvml")
    names = (
        "nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates",
    )  # fmt: skip
    vars(module).update(dict.fromkeys(names, refuse) | functions | {"NVMLError": NVMLError})
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(utilisation, "gpu_uuid", lambda device: f"GPU-{device.index}")


def test_gpus_are_read_by_uuid_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"GPU-0": 25, "GPU-1": 75}
    fake_nvml(
        monkeypatch,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=1000 + rates[handle]),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=rates[handle]),
    )
    said: list[str] = []
    sampler = open_sampler(GPUS, said.append)
    sampler.sample()
    assert sampler.take() == {
        "cuda:0": {"utilisation": 0.25, "used_bytes": 1025.0},
        "cuda:1": {"utilisation": 0.75, "used_bytes": 1075.0},
    }
    assert said == []


def test_a_slice_of_a_gpu_has_memory_but_no_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(
        monkeypatch,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda _handle: SimpleNamespace(used=7),
    )
    sampler = open_sampler([torch.device("cuda", 0)], lambda _text: None)
    sampler.sample()
    taken = sampler.take()["cuda:0"]
    assert math.isnan(taken["utilisation"])
    assert taken["used_bytes"] == 7.0


def test_a_silent_driver_is_said_and_gone_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch)
    said: list[str] = []
    assert open_sampler(GPUS, said.append).take() == {}
    assert len(said) == 1
    assert "Driver Not Loaded" in said[0]


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    said: list[str] = []
    assert open_sampler(GPUS, said.append).take() == {}
    assert said == ["GPU utilisation isn't logged without the package nvidia-ml-py: pip install 'draftsmith[gpu]'"]
