"""`--hardware 7x96GB` -> cards, counts, hosts and the link between them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import psutil
import torch

from draftsmith.errors import ConfigError
from draftsmith.plan.calibration import CARDS, PCIE_GBPS, Card

WRITTEN = re.compile(r"(?:(?P<count>\d+)\s*x\s*)?(?P<what>[a-z0-9.\-]+?)(?:@(?P<rate>\d+(?:\.\d+)?))?", re.IGNORECASE)
MEMORY = re.compile(r"(?P<gb>\d+(?:\.\d+)?)gb", re.IGNORECASE)
MATRIX = 8192
CPU_MATRIX, CPU_COPY = 512, 1 << 26
MEMORY_TOLERANCE = 0.1
"""Between the memory that a driver states and the list's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Equal hosts of equal cards."""

    card: Card
    per_host: int
    hosts: int = 1
    link_gbps: float = 400.0
    """Gigabits a second from each host to the others."""

    def __post_init__(self) -> None:
        if self.per_host < 1 or self.hosts < 1:
            raise ConfigError(
                f"{self.hosts} hosts of {self.per_host} GPUs: both must be 1 or more (--hosts, --hardware)"
            )
        if not self.link_gbps > 0:  # nan too
            raise ConfigError(f"--link-gbps {self.link_gbps:g} is not above 0")

    @property
    def num_gpus(self) -> int:
        return self.per_host * self.hosts

    @property
    def link_bytes(self) -> float:
        """Bytes a second over a host's link."""
        return self.link_gbps * 1e9 / 8

    def describe(self) -> str:
        per = f"{self.per_host} x {self.card.name} ({self.card.memory / 1e9:.0f} GB, {self.card.tflops:.0f} TFLOP/s)"
        return per if self.hosts == 1 else f"{self.hosts} hosts of {per}, {self.link_gbps:g} Gbit/s"


def parse_hardware(text: str, hosts: int = 1, link_gbps: float = 400.0) -> Hardware:
    """`8xh100`, `h200`, `7x96GB` (rate of the known card nearest in memory), `7x96GB@250` (TFLOP/s), `2xh100@600`.

    Raises:
        ConfigError: neither a known card nor an amount of memory.
    """
    found = WRITTEN.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--hardware {text!r} isn't like 8xh100, 7x96GB or 7x96GB@250: {_known()}")
    card = _card_of(found["what"], text)
    if found["rate"]:
        rate = float(found["rate"])
        if rate <= 0:
            raise ConfigError(f"--hardware {text!r}: a rate of {rate:g} TFLOP/s is not above 0")
        card = replace(card, tflops=rate, source="given")
    return Hardware(card=card, per_host=int(found["count"] or 1), hosts=hosts, link_gbps=link_gbps)


def _known() -> str:
    return f"known cards are {', '.join(card.name for card in CARDS)}, or give memory as 96GB"


def _card_of(what: str, text: str) -> Card:
    memory = MEMORY.fullmatch(what)
    if memory is None:
        known = {card.name: card for card in CARDS}
        if what.lower() not in known:
            raise ConfigError(f"--hardware {text!r}: no card named {what!r}: {_known()}")
        return known[what.lower()]
    size = round(float(memory["gb"]) * 1e9)
    if size == 0:
        raise ConfigError(f"--hardware {text!r}: a card of 0 GB holds nothing: give its memory, as in 7x96GB")
    like = min(CARDS, key=lambda card: abs(card.memory - size))
    source = f"assumed like {like.name}; say {what}@{like.tflops:.0f} with your own"
    # Whether cards that are known by memory alone reach each other isn't known: features go through the host.
    return replace(like, name=what.upper(), memory=size, peer_gbps=PCIE_GBPS, source=source)


def this_machine(link_gbps: float = 400.0, seconds: float = 2.0) -> Hardware:
    """The visible GPUs with the matrix rate that the first sustains for `seconds` (takes that long).

    Raises:
        ConfigError: no GPU to measure.
    """
    if not torch.cuda.is_available():
        raise ConfigError("--measure needs a GPU and none is visible: name the cards with --hardware")
    properties = cast(Any, torch.cuda.get_device_properties(0))
    count = torch.cuda.device_count()
    peers = count > 1 and torch.cuda.can_device_access_peer(0, 1)
    card = Card(
        name=str(properties.name).lower(),
        memory=int(properties.total_memory),
        tflops=measure_rate(seconds),
        bandwidth=measure_bandwidth(),
        peer_gbps=300.0 if peers else PCIE_GBPS,
        fp8=(properties.major, properties.minor) >= (8, 9),
        source="measured now",
    )
    return Hardware(card=card, per_host=count, link_gbps=link_gbps)


def visible_hardware(per_host: int, hosts: int, device: torch.device, seconds: float = 2.0) -> Hardware:
    """This run's machines, taken to be alike: the plan's own rates where the card is known, measured on `device` where
    not (takes `seconds`).

    Args:
        per_host: workers of a host, one per GPU (or per CPU process).
        hosts: hosts.
        device: a GPU or the CPU of this process.
        seconds: how long to measure for.
    """
    if device.type != "cuda":
        return Hardware(card=_measured_cpu(per_host, seconds), per_host=per_host, hosts=hosts)
    properties = cast(Any, torch.cuda.get_device_properties(device))
    card = known_card(str(properties.name), int(properties.total_memory))
    if card is None:
        with torch.cuda.device(device):
            card = this_machine(seconds=seconds).card
            torch.cuda.empty_cache()  # gigabytes of matrices that the run would miss
    return Hardware(card=card, per_host=per_host, hosts=hosts)


def known_card(name: str, memory: int) -> Card | None:
    """The card of the plan's list that a driver calls `name`, with the memory that it states; None for others.

    A name may cover cards of several sizes (A100) or a slower one (laptops): the memory has to agree as well.
    """
    words = re.findall(r"[a-z]+|\d+", name.lower())
    spelled = "".join(words)
    for card in CARDS:
        model = "".join(re.findall(r"[a-z]+|\d+", card.name.removesuffix("-40gb")))
        is_named = any(spelled[start:].startswith(model) for start in _word_starts(words))
        if is_named and abs(card.memory - memory) < MEMORY_TOLERANCE * card.memory:
            return replace(card, memory=memory)
    return None


def _word_starts(words: list[str]) -> list[int]:
    starts = [0]
    for word in words:
        starts.append(starts[-1] + len(word))
    return starts


def _measured_cpu(num_workers: int, seconds: float) -> Card:
    """What one of `num_workers` processes gets of this host, with the threads that this one has."""
    a = torch.randn(CPU_MATRIX, CPU_MATRIX)
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, a, out=out)

    source = torch.zeros(CPU_COPY, dtype=torch.uint8)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return Card(
        name="cpu",
        memory=psutil.virtual_memory().total // num_workers,
        tflops=2 * CPU_MATRIX**3 / _host_seconds(product, seconds / 4) / 1e12,
        bandwidth=2 * CPU_COPY / _host_seconds(copy, seconds / 4) / 1e12,
        peer_gbps=PCIE_GBPS,
        fp8=False,
        source="measured now",
    )


def _host_seconds(run: Callable[[], None], seconds: float) -> float:
    """Of one call, the fastest of those that fit into `seconds`: what else the host does only makes calls slower."""
    run()
    fastest, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def measure_rate(seconds: float) -> float:
    """TFLOP/s of bf16 products of 8192-cubes back to back on the current GPU."""
    a = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    b, out = torch.randn_like(a), torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    _seconds(product, 3)
    once = _seconds(product, 10)
    return 2 * MATRIX**3 / _seconds(product, max(10, round(seconds / once))) / 1e12


def measure_bandwidth() -> float:
    """Terabytes a second of a copy of 1 GB, read and written."""
    a = torch.zeros(1 << 30, device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)

    def copy() -> None:
        b.copy_(a)

    _seconds(copy, 3)
    return 2 * a.numel() / _seconds(copy, 10) / 1e12


def _seconds(run: Callable[[], None], repeats: int) -> float:
    """Of one call, by device events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats
