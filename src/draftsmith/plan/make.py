"""A whole plan: the split that is asked for or fastest, what it costs, and what each change would do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draftsmith.errors import ConfigError
from draftsmith.plan.hardware import Hardware
from draftsmith.plan.roles import idle_remarks
from draftsmith.plan.split import (
    NO_CROSSING,
    Crossing,
    Split,
    all_splits,
    evaluate_disk,
    evaluate_joint,
    evaluate_split,
    network,
    peak_memory,
    reduce_seconds,
)
from draftsmith.plan.workload import Job, draw_seconds, regenerate_seconds

REDUCE_LIMIT = 0.1
FASTER = 1.05
"""Another split is worth a word from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A split that a recipe or the flags fix; zeros leave it open."""

    targets: int = 0
    drafters: int = 0
    joint: bool = False
    from_disk: bool = False
    """Features were captured before: no target runs."""

    @property
    def is_open(self) -> bool:
        return not (self.targets or self.drafters or self.joint or self.from_disk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one different choice would do."""

    name: str
    split: Split
    hours: float
    density: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `draftsmith plan` says."""

    job: Job
    hardware: Hardware
    split: Split
    fastest: Split
    hours: float
    gpu_hours: float
    regenerate_hours: float
    draw_ms: float
    reduce_ms: float
    crossing: Crossing
    changes: tuple[Change, ...]
    store_bytes: float
    """Of one epoch's features on disk."""

    @property
    def fits(self) -> bool:
        return self.split.fits

    @property
    def reduce_share(self) -> float:
        """Of a drafter's step, the averaging of gradients."""
        return self.reduce_ms / (self.job.accumulation * self.draw_ms + self.reduce_ms)

    def remarks(self) -> list[str]:
        """What a person should know before starting, each with what would help."""
        said: list[str] = []
        card = self.hardware.card
        if not self.split.fits:
            fullest = max(self.split.memory, key=lambda role: role.total)
            said.append(
                f"doesn't fit: a GPU for {fullest.role} needs {fullest.total / 1e9:.1f} GB of {card.memory / 1e9:.1f}: "
                "fewer --anchors, a smaller --token-budget, --checkpoint-layers, or features from disk (--features)"
            )
        elif peak_memory(self.split) > 0.95 * card.memory:
            said.append("fits within 5% of the card: anything else on the GPU would break it")
        said += idle_remarks(self.job, self.hardware, self.split)
        if self.reduce_share > REDUCE_LIMIT:
            said.append(
                f"averaging gradients takes {self.reduce_share:.0%} of a drafter's time: more draws a step "
                "(--accumulation) share one average"
            )
        said += self._better_use(" ".join(said))
        if self.crossing.limit < 1.05 * self.split.rate:
            said.append(
                f"the network is the limit ({self.crossing.busiest}): a faster link, or drafters spread over hosts, "
                "or features captured to a shared disk"
            )
        return said

    def _better_use(self, said: str) -> list[str]:
        """GPUs that the split leaves out, and a faster split, unless that was `said` with the idle roles."""
        split, fastest, count = self.split, self.fastest, self.hardware.num_gpus
        found: list[str] = []
        if (unused := 0 if split.joint else count - split.targets - split.drafters) > 0:
            verb = "has" if unused == 1 else "have"
            found.append(f"{unused} of {count} GPUs {verb} no role: raise --targets or --drafters, or name fewer GPUs")
        flags = "--colocate" if fastest.joint else f"--targets {fastest.targets} --drafters {fastest.drafters}"
        if fastest.rate > FASTER * split.rate and flags not in said:
            gain = fastest.rate / split.rate - 1
            found.append(f"{fastest.describe()} ({flags}) would be {gain:.0%} faster than what is asked for")
        return found


def fastest_split(job: Job, hardware: Hardware, asked: Asked) -> Split:
    """The fastest that fits, or the fastest at all; with features on disk there is but one."""
    return evaluate_disk(job, hardware) if asked.from_disk else all_splits(job, hardware)[0]


def choose_split(job: Job, hardware: Hardware, asked: Asked) -> Split:
    """The split that is asked for, or the fastest that fits (the fastest at all where none does).

    Raises:
        ConfigError: more workers than GPUs.
    """
    count = hardware.num_gpus
    if asked.is_open or asked.from_disk:
        return fastest_split(job, hardware, asked)
    if asked.joint:
        return evaluate_joint(job, hardware)
    drafters = asked.drafters or count - asked.targets
    targets = asked.targets or count - asked.drafters
    if targets + drafters > count or min(targets, drafters) < 1:
        raise ConfigError(
            f"{targets} targets and {drafters} drafters don't share {count} GPUs: change them or "
            "--hardware, or leave the split open with --targets auto --drafters auto"
        )
    return evaluate_split(job, hardware, targets, drafters)


def make_plan(job: Job, hardware: Hardware, asked: Asked) -> Plan:
    """Plan `job` on `hardware`."""
    split = choose_split(job, hardware, asked)
    hours = _hours(job, split)
    regenerate = regenerate_seconds(job, hardware.card, hardware.num_gpus) / 3600
    return Plan(
        job=job,
        hardware=hardware,
        split=split,
        fastest=fastest_split(job, hardware, asked),
        hours=hours,
        gpu_hours=hours * hardware.num_gpus,
        regenerate_hours=regenerate,
        draw_ms=1e3 * draw_seconds(job, hardware.card),
        reduce_ms=1e3 * reduce_seconds(job, hardware, split.drafters),
        crossing=NO_CROSSING
        if split.from_disk or split.joint
        else network(job, hardware, split.targets, split.drafters),
        changes=tuple(_changes(job, hardware, asked, split)),
        store_bytes=job.corpus.tokens / job.batch_tokens * job.shape.num_bytes,
    )


def _changes(job: Job, hardware: Hardware, asked: Asked, split: Split) -> list[Change]:
    """The plan with one thing changed at a time, each on its own best split."""
    jobs = [
        ("twice the anchors", _with_anchors(job, 2 * job.num_anchors, job.draws // 2)),
        ("half the anchors", _with_anchors(job, job.num_anchors // 2, job.draws * 2)),
    ]
    if job.draws_per_batch > 1:
        jobs.append(("half the labels", _with_labels(job, job.labels_per_token / 2, job.draws // 2)))
    jobs.append(("twice the labels", _with_labels(job, job.labels_per_token * 2, job.draws * 2)))
    if not job.checkpoint_layers:
        jobs.append(("--checkpoint-layers", replace(job, checkpoint_layers=True)))
    if hardware.card.fp8 and not job.fp8 and not asked.from_disk:
        jobs.append(("--target-compute fp8", replace(job, fp8=True)))
    changes = [_change(name, changed, fastest_split(changed, hardware, asked)) for name, changed in jobs]
    if not split.joint and not asked.from_disk:
        changes.append(_change("--colocate", job, evaluate_joint(job, hardware)))
    return changes


def _with_anchors(job: Job, anchors: int, draws: int) -> Job:
    """`draws` only where the job fixes them: otherwise they follow the labels, as `draftsmith train` has it."""
    return replace(job, num_anchors=max(1, anchors), draws=max(1, draws) if job.draws else 0)


def _with_labels(job: Job, labels_per_token: float, draws: int) -> Job:
    """Likewise."""
    return replace(job, labels_per_token=labels_per_token, draws=max(1, draws) if job.draws else 0)


def _change(name: str, job: Job, split: Split) -> Change:
    return Change(name=name, split=split, hours=_hours(job, split), density=job.density)


def _hours(job: Job, split: Split) -> float:
    return job.tokens_read(split.drafters) / split.rate / 3600
