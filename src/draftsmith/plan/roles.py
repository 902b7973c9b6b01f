"""Who does what where nobody said so: the split whose slower side is fastest, why, and what would use who idles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draftsmith.errors import ConfigError
from draftsmith.plan.hardware import Hardware
from draftsmith.plan.split import Split, evaluate_joint, evaluate_split
from draftsmith.plan.workload import Job

IDLE_LIMIT = 0.15
"""A role that would idle more is worth a word."""
MOST_DRAWS = 4
"""More times the draws than this is no use of anchors any more."""
WORTH_SAYING = 1.02
"""A change that isn't faster than by this is no remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A split with its reason, and what a person should know of it."""

    split: Split
    why: str
    remarks: tuple[str, ...]


def choose_roles(job: Job, hardware: Hardware, targets: int = 0, drafters: int = 0) -> Chosen:
    """The roles that are asked for (zeros leave them open), or those whose slower side is fastest, among what fits.

    Both roles on every GPU is never chosen here: it is offered where it would be faster.

    Raises:
        ConfigError: more workers than GPUs, or none for a role.
    """
    count = hardware.num_gpus
    if targets or drafters:
        targets, drafters = targets or count - drafters, drafters or count - targets
        if targets + drafters > count or min(targets, drafters) < 1:
            raise ConfigError(
                f"{targets} target(s) and {drafters} drafter(s) don't share {count} GPUs: change --targets or "
                "--drafters"
            )
        split, word = evaluate_split(job, hardware, targets, drafters), "given"
    else:
        if count < 2:
            raise ConfigError("one GPU can't be split between two roles: drop --targets and --drafters")
        split, word = best_split(job, hardware), "auto"
    card = hardware.card
    why = (
        f"{word}: targets read {split.target_rate:,.0f} tokens/s, drafters use {split.drafter_rate:,.0f} "
        f"(rate of {card.name}: {card.source})"
    )
    return Chosen(split=split, why=why, remarks=tuple(idle_remarks(job, hardware, split)))


def best_split(job: Job, hardware: Hardware) -> Split:
    """The fastest way to give every GPU one role; where the network limits several, the one with most to spare."""
    count = hardware.num_gpus
    splits = [evaluate_split(job, hardware, targets, count - targets) for targets in range(1, count)]
    return max(splits, key=lambda split: (split.fits, split.rate, min(split.target_rate, split.drafter_rate)))


def idle_remarks(job: Job, hardware: Hardware, split: Split) -> list[str]:
    """A sentence for a role that would idle more than IDLE_LIMIT, with what would use it."""
    said: list[str] = []
    for role, idle in (("targets", split.idle_targets), ("drafters", split.idle_drafters)):
        if idle > IDLE_LIMIT:
            remedies = [_draws(job, hardware, split, role), *_changes(job, hardware, split, role)]
            found = ", ".join(remedy for remedy in remedies if remedy)
            said.append(f"{role} would idle {idle:.0%}: {found or 'other counts (--targets, --drafters)'}")
    return said


def _draws(job: Job, hardware: Hardware, split: Split, idle: str) -> str:
    """Draws a batch with which both sides would be about equally fast; "" where none, or none sensible, is nearer."""
    draws = job.draws_per_batch
    equal = draws * split.drafter_rate / split.target_rate
    better = max(1, int(equal) if idle == "drafters" else round(equal))
    if better == draws or better > MOST_DRAWS * draws:
        return ""
    after = evaluate_split(replace(job, draws=better), hardware, split.targets, split.drafters)
    if max(after.idle_targets, after.idle_drafters) >= max(split.idle_targets, split.idle_drafters):
        return ""
    labels = job.density * better / draws
    cost = "cost nothing" if idle == "drafters" else "would do"
    return f"{better} draws a batch instead of {draws} {cost} (--labels-per-token {labels:.1f})"


def _changes(job: Job, hardware: Hardware, split: Split, idle: str) -> list[str]:
    """Other ways to use the same GPUs, where they are faster."""
    ways: list[tuple[str, Split]] = []
    if idle == "drafters" and hardware.card.fp8 and not job.fp8:
        with_fp8 = best_split(replace(job, fp8=True), hardware)
        ways.append((f"--target-compute fp8 as {with_fp8.describe()}", with_fp8))
    ways.append(("--colocate", evaluate_joint(job, hardware)))
    if (best := best_split(job, hardware)) != split:
        ways.append((f"--targets {best.targets} --drafters {best.drafters}", best))
    return [
        f"{name} would be {way.rate / split.rate - 1:.0%} faster"
        for name, way in ways
        if way.fits and way.rate > WORTH_SAYING * split.rate
    ]
