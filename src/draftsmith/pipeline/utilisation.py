"""How busy each GPU is, as its driver tells: sampled ten times a second in the background, read at log points.

The driver (NVML) reports the share of its last fraction of a second in which any kernel ran, and the memory that all
processes hold. Asking costs microseconds, allocates nothing on the GPU and never waits for its streams.
"""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, cast, final

import torch

HERTZ = 10.0
KEPT = 36_000
"""Samples kept between two reads: an hour's; a mean over a longer gap is of its last hour."""
JOIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU at one moment."""

    utilisation: float
    """Share of the driver's last interval in which a kernel ran, 0 to 1; NaN where the driver doesn't know."""
    used_bytes: float
    """Memory held by all processes."""


Sample = tuple[float, Reading]
"""(time.perf_counter(), reading)"""


class Probe(Protocol):
    """Reads one GPU."""

    def read(self) -> Reading: ...


@final
class GpuSampler:
    """A thread that reads every probe ten times a second while it is entered."""

    def __init__(self, probes: Mapping[str, Probe], hertz: float = HERTZ) -> None:
        self._probes, self._pause = dict(probes), 1.0 / hertz
        self._samples: dict[str, deque[Sample]] = {name: deque(maxlen=KEPT) for name in probes}
        self._last: dict[str, Reading] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GpuSampler:
        self._ended.clear()
        if self._probes:
            self._thread = threading.Thread(target=self._run, name="utilisation", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
            self._thread = None

    def sample(self) -> None:
        """Read every probe once, now. A GPU that its driver lost is left out: whoever works on it says so."""
        for name, probe in self._probes.items():
            try:
                reading = probe.read()
            except RuntimeError:
                continue
            with self._lock:
                self._samples[name].append((time.perf_counter(), reading))
                self._last[name] = reading

    def _run(self) -> None:
        self.sample()
        while not self._ended.wait(self._pause):
            self.sample()

    def drain(self) -> dict[str, list[Sample]]:
        """All samples since the last drain, oldest first, by GPU."""
        with self._lock:
            drained = {name: list(samples) for name, samples in self._samples.items()}
            for samples in self._samples.values():
                samples.clear()
        return drained

    def take(self) -> dict[str, dict[str, float]]:
        """`utilisation` (mean since the last take; NaN without a sample) and `used_bytes` (last seen), by GPU."""
        taken: dict[str, dict[str, float]] = {}
        for name, samples in self.drain().items():
            last = self._last.get(name)
            taken[name] = {
                "utilisation": mean_utilisation(samples),
                "used_bytes": math.nan if last is None else last.used_bytes,
            }
        return taken


def mean_utilisation(samples: Sequence[Sample]) -> float:
    """Mean over the samples whose utilisation is known; NaN where there is none."""
    known = [reading.utilisation for _, reading in samples if not math.isnan(reading.utilisation)]
    return sum(known) / len(known) if known else math.nan


@final
class NvmlProbe:
    """One GPU through NVML. Its errors are RuntimeErrors, so that nobody else needs the package."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def read(self) -> Reading:
        """Utilisation and memory now.

        Raises:
            RuntimeError: the driver lost the GPU.
        """
        nvml = self._nvml
        try:
            used = float(nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        except nvml.NVMLError as error:
            raise RuntimeError(f"NVML: {error}") from error
        try:
            share = nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except nvml.NVMLError:  # slices of a GPU (MIG) have memory, but no utilisation of their own
            share = math.nan
        return Reading(utilisation=share, used_bytes=used)


def open_sampler(devices: Sequence[torch.device], say: Callable[[str], None]) -> GpuSampler:
    """A sampler of the GPUs among `devices`, not yet started; where NVML is missing it has no probe, and says why.

    GPUs are found by their UUID, since NVML's numbers ignore CUDA_VISIBLE_DEVICES.
    """
    gpus = sorted({device for device in devices if device.type == "cuda"}, key=str)
    if not gpus:
        return GpuSampler({})
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        say("GPU utilisation isn't logged without the package nvidia-ml-py: pip install 'draftsmith[gpu]'")
        return GpuSampler({})
    try:
        nvml.nvmlInit()
        probes = {str(device): NvmlProbe(nvml, nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(device))) for device in gpus}
        for probe in probes.values():
            probe.read()
    except (nvml.NVMLError, RuntimeError) as error:
        say(f"GPU utilisation isn't logged: the driver doesn't answer ({error})")
        return GpuSampler({})
    return GpuSampler(probes)


def gpu_uuid(device: torch.device) -> str:
    """The GPU's UUID as NVML writes it."""
    return f"GPU-{cast(Any, torch.cuda).get_device_properties(device).uuid}"
