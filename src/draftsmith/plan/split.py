"""How N GPUs share the work: every split's rate, who idles, and what crosses the network."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.plan.calibration import Card
from draftsmith.plan.hardware import Hardware
from draftsmith.plan.memory import RoleMemory, drafter_memory, joint_memory, target_memory
from draftsmith.plan.workload import FP32, Job, drafter_parameters, drafter_rate, target_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to use the GPUs. `joint` has both roles on every GPU: `targets` and `drafters` then both count all."""

    targets: int
    drafters: int
    joint: bool
    rate: float
    """Tokens a second of the whole, counted once however often a batch is drawn from."""
    target_rate: float
    """What all targets together could do if they never waited."""
    drafter_rate: float
    """Likewise, all drafters."""
    memory: tuple[RoleMemory, ...]
    fits: bool

    @property
    def from_disk(self) -> bool:
        return self.targets == 0

    @property
    def idle_targets(self) -> float:
        return 0.0 if self.joint or self.from_disk else 1.0 - self.rate / self.target_rate

    @property
    def idle_drafters(self) -> float:
        return 0.0 if self.joint else 1.0 - self.rate / self.drafter_rate

    def short(self) -> str:
        """For a narrow table."""
        if self.from_disk:
            return f"{self.drafters}D"
        return f"{self.targets} joint" if self.joint else f"{self.targets}T {self.drafters}D"

    def describe(self) -> str:
        if self.from_disk:
            return f"{self.drafters} drafter, features from disk"
        if self.joint:
            return "both roles in turns" if self.targets == 1 else "both roles on every GPU"
        return f"{self.targets} target + {self.drafters} drafter"


def reduce_seconds(job: Job, hardware: Hardware, num_drafters: int) -> float:
    """Averaging one flat fp32 gradient buffer over the drafters (a ring: 2 (n-1)/n of it leaves and enters each)."""
    if num_drafters < 2:
        return 0.0
    volume = 2 * (num_drafters - 1) / num_drafters * FP32 * drafter_parameters(job.drafter)
    slowest = hardware.card.peer_gbps * 1e9
    if num_drafters > hardware.per_host:
        slowest = min(slowest, hardware.link_bytes)
    return volume / slowest


def evaluate_split(job: Job, hardware: Hardware, targets: int, drafters: int) -> Split:
    """A split into roles."""
    card = hardware.card
    produced = targets * target_rate(job, card)
    consumed = drafters * drafter_rate(job, card, reduce_seconds(job, hardware, drafters))
    memory = (target_memory(job), drafter_memory(job, ring_here=card.has_peers or hardware.hosts > 1))
    crossing = network(job, hardware, targets, drafters)
    rate = min(produced, consumed, crossing.limit)
    return Split(
        targets=targets,
        drafters=drafters,
        joint=False,
        rate=rate,
        target_rate=produced,
        drafter_rate=consumed,
        memory=memory,
        fits=all(role.fits(card) for role in memory),
    )


def evaluate_joint(job: Job, hardware: Hardware) -> Split:
    """Both roles on every GPU, in turns."""
    card, count = hardware.card, hardware.num_gpus
    produced = count * target_rate(job, card)
    consumed = count * drafter_rate(job, card, reduce_seconds(job, hardware, count))
    memory = (joint_memory(job),)
    return Split(
        targets=count,
        drafters=count,
        joint=True,
        rate=1.0 / (1.0 / produced + 1.0 / consumed),
        target_rate=produced,
        drafter_rate=consumed,
        memory=memory,
        fits=memory[0].fits(card),
    )


def evaluate_disk(job: Job, hardware: Hardware) -> Split:
    """Every GPU trains from features on disk; no target is there. What disks give is not known here."""
    count = hardware.num_gpus
    consumed = count * drafter_rate(job, hardware.card, reduce_seconds(job, hardware, count))
    memory = (drafter_memory(job, ring_here=False),)
    return Split(
        targets=0,
        drafters=count,
        joint=False,
        rate=consumed,
        target_rate=float("inf"),
        drafter_rate=consumed,
        memory=memory,
        fits=memory[0].fits(hardware.card),
    )


def all_splits(job: Job, hardware: Hardware) -> list[Split]:
    """Every way to use all GPUs, fastest first, those that fit before those that don't."""
    count = hardware.num_gpus
    splits = [evaluate_split(job, hardware, targets, count - targets) for targets in range(1, count)]
    splits.append(evaluate_joint(job, hardware))
    return sorted(splits, key=lambda split: (not split.fits, -split.rate))


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Features over the network, per second and at the busiest host; zero on one host."""

    bytes_per_token: float
    busiest: str
    """Which host's link is busiest and which way, for a sentence: what host 0 sends."""
    share: float
    """Of all tokens, those that pass that link."""
    limit: float
    """Tokens a second at which that link is full."""


NO_CROSSING = Crossing(bytes_per_token=0.0, busiest="nothing", share=0.0, limit=float("inf"))


def network(job: Job, hardware: Hardware, targets: int, drafters: int) -> Crossing:
    """What a split sends between hosts: ranks in order, targets first, so drafters fill the last hosts.

    Batches go round: batch n comes from target n mod targets and goes to drafter n mod drafters, so each drafter
    hears equally from every target, on its own host or not.
    """
    per_token = job.shape.num_bytes / job.batch_tokens
    if hardware.hosts == 1:
        return Crossing(bytes_per_token=per_token, busiest="nothing", share=0.0, limit=float("inf"))
    busiest, what = 0.0, "nothing"
    for host in range(hardware.hosts):
        first = host * hardware.per_host
        mine = min(max(targets - first, 0), hardware.per_host)
        theirs = min(hardware.per_host - mine, drafters)
        incoming = theirs / drafters * (targets - mine) / targets
        outgoing = mine / targets * (drafters - theirs) / drafters
        for share, way in ((incoming, "receives"), (outgoing, "sends")):
            if share > busiest:
                busiest, what = share, f"what host {host} {way}"
    limit = hardware.link_bytes / (busiest * per_token) if busiest else float("inf")
    return Crossing(bytes_per_token=per_token, busiest=what, share=busiest, limit=limit)


def peak_memory(split: Split) -> int:
    return max(role.total for role in split.memory)


def best_card_use(split: Split, card: Card) -> float:
    """Share of the card that the fullest role uses."""
    return peak_memory(split) / card.memory
