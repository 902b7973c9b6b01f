"""What a pipeline benchmark sees of the device: memory and utilisation at 10 Hz, and the level after every batch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from draftsmith.pipeline.utilisation import GpuSampler, Reading, Sample, open_sampler

STATS = ("allocation.all.allocated", "num_device_alloc", "num_device_free", "num_alloc_retries")
"""Allocator calls; cudaMalloc and cudaFree calls; times it had to give everything back and try again."""


class AllocatorProbe:
    """What this process's tensors hold: the driver sees only what the allocator keeps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Reading:
        return Reading(utilisation=math.nan, used_bytes=float(torch.cuda.memory_allocated(self._device)))


class Watch:
    """Two samplers over the same GPUs: the driver's view and the allocator's."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        gpus = sorted({device for device in devices if device.type == "cuda"}, key=str)
        self._driver = open_sampler(gpus, print)
        self._allocator = GpuSampler({str(device): AllocatorProbe(device) for device in gpus})
        self._started = time.perf_counter()

    def __enter__(self) -> Watch:
        self._started = time.perf_counter()
        self._driver.__enter__()
        self._allocator.__enter__()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._driver.__exit__(None, None, None)
        self._allocator.__exit__(None, None, None)

    def curves(self) -> dict[str, Any]:
        """By GPU: `seconds`, `utilisation` and `used_gb` of the driver, `allocated_seconds` and `allocated_gb`."""
        driver, allocator = self._driver.drain(), self._allocator.drain()
        made: dict[str, Any] = {}
        for name, samples in allocator.items():
            seen = driver.get(name, [])
            made[name] = {
                "seconds": self._times(seen),
                "utilisation": [known(reading.utilisation) for _, reading in seen],
                "used_gb": [round(reading.used_bytes / 1e9, 3) for _, reading in seen],
                "allocated_seconds": self._times(samples),
                "allocated_gb": [round(reading.used_bytes / 1e9, 3) for _, reading in samples],
            }
        return made

    def _times(self, samples: list[Sample]) -> list[float]:
        return [round(moment - self._started, 2) for moment, _ in samples]


def known(share: float) -> float | None:
    """JSON has no word for NaN."""
    return None if math.isnan(share) else round(share, 2)


@dataclass
class Marks:
    """Taken when the drafter has done with a batch."""

    devices: Sequence[torch.device]
    times: list[float] = field(default_factory=list)
    levels: dict[str, list[int]] = field(default_factory=dict)
    reserved: dict[str, list[int]] = field(default_factory=dict)
    calls: dict[str, list[int]] = field(default_factory=dict)

    def take(self) -> None:
        self.times.append(time.perf_counter())
        for device in self.devices:
            if device.type == "cuda":
                stats = torch.cuda.memory_stats(device)
                self.levels.setdefault(str(device), []).append(stats["allocated_bytes.all.current"])
                self.reserved.setdefault(str(device), []).append(stats["reserved_bytes.all.current"])
                for key in STATS:
                    self.calls.setdefault(f"{device} {key}", []).append(stats.get(key, 0))

    def summary(self, skip: int) -> dict[str, Any]:
        """Without the first `skip` batches: seconds a batch, range of the levels, calls a batch."""
        batches = len(self.times) - 1 - skip
        return {
            "seconds_per_batch": (self.times[-1] - self.times[skip]) / batches,
            "batches_measured": batches,
            "allocated": {name: [min(values[skip:]), max(values[skip:])] for name, values in self.levels.items()},
            "reserved": {name: [min(values[skip:]), max(values[skip:])] for name, values in self.reserved.items()},
            "calls_per_batch": {name: (values[-1] - values[skip]) / batches for name, values in self.calls.items()},
        }
