"""Every buffer of a worker by name and size: what a GPU of each role holds from warm-up to the end."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.drafter.loss import LossSums
from draftsmith.plan.calibration import CONTEXT_BYTES, POOL_SLACK, Card
from draftsmith.plan.workload import (
    BF16,
    FP32,
    Job,
    activation_bytes,
    bytes_per_logit,
    chunk_bytes,
    chunk_rows,
    drafter_parameters,
    forward_tokens,
    trained_parameters,
)

STAGING_SETS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A named piece of memory."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """What one GPU of a role holds."""

    role: str
    buffers: tuple[Buffer, ...]

    @property
    def total(self) -> int:
        return sum(buffer.bytes for buffer in self.buffers)

    def fits(self, card: Card) -> bool:
        return self.total <= card.memory


def elements(count: int) -> str:
    """A number of parameters as people say it."""
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:,}"


def ends_bytes(job: Job) -> int:
    return job.target.ends * BF16


def state_buffers(job: Job) -> list[Buffer]:
    """Weights of the drafter in all their forms, and the target's ends beside them."""
    count, trained = drafter_parameters(job.drafter), trained_parameters(job)
    return [
        Buffer(name="masters", bytes=count * FP32, why=f"{elements(count)} parameters, fp32"),
        Buffer(name="gradients", bytes=trained * FP32, why="fp32, one flat buffer"),
        Buffer(name="moments", bytes=2 * trained * FP32, why="AdamW, two of fp32"),
        Buffer(name="shadow", bytes=count * BF16, why="bf16 weights that compute"),
    ]


def batch_why(job: Job) -> str:
    kinds = ("one context" if job.freeze_context else f"{job.shape.num_taps} taps") + (
        " and the last hidden state" if job.shape.last_hidden else ""
    )
    return f"{job.shape.num_tokens:,} tokens x {job.shape.hidden_size:,} x {kinds}"


def graph_buffers(job: Job) -> list[Buffer]:
    """What a captured step reads and its pool."""
    d = job.drafter
    small = job.shape.num_tokens * FP32 + LossSums.num_sums(d.block_size) * 2 * FP32
    activations = activation_bytes(job)
    slack = round(activations * (POOL_SLACK - 1))
    return [
        Buffer(name="graph input", bytes=job.shape.num_bytes + small, why=f"one batch: {batch_why(job)}"),
        Buffer(
            name="activations",
            bytes=activations,
            why=f"{job.num_anchors:,} anchors x {d.block_size}, {d.num_layers} layers"
            + (", recomputed" if job.checkpoint_layers else ""),
        ),
        Buffer(
            name="logits chunk",
            bytes=chunk_bytes(job),
            why=f"{chunk_rows(job):,} rows x {d.vocab_size:,} x {bytes_per_logit(job)} bytes",
        ),
        Buffer(name="pool slack", bytes=slack, why="what the count of activations misses, gaps"),
    ]


def target_buffers(job: Job) -> list[Buffer]:
    """The frozen target's weights and what its forward needs. 8-bit weights take a byte, embeddings stay in bf16."""
    facts = job.target.facts
    inner = job.target.total - job.target.ends
    weights = inner * (1 if job.fp8 else BF16) + ends_bytes(job)
    tokens = forward_tokens(job)
    heads = facts.num_heads * facts.head_dim + 2 * facts.num_kv_heads * facts.head_dim
    forward = tokens * (4 * facts.hidden_size + 2 * heads + 3 * facts.intermediate_size) * BF16
    H, taps = facts.hidden_size, len(job.drafter.taps)
    # A frozen context is made of the features here: they are staged beside it, and the drafter's fc lies here too.
    wide = job.shape.num_tokens * taps * H * BF16 if job.freeze_context else 0
    own = [Buffer(name="drafter's fc", bytes=(taps * H + 1) * H * BF16, why="frozen, applied here")]
    return [
        *(own if job.freeze_context else []),
        Buffer(
            name="target weights",
            bytes=weights,
            why=f"{elements(job.target.total)} parameters, " + ("fp8, ends bf16" if job.fp8 else "bf16"),
        ),
        Buffer(
            name="staging",
            bytes=STAGING_SETS * (job.shape.num_bytes + wide),
            why=f"{STAGING_SETS} batches, filled while the last is sent" + (", features too" if wide else ""),
        ),
        Buffer(name="forward", bytes=forward, why=f"one layer's activations of {tokens:,} tokens"),
    ]


def context_buffer() -> Buffer:
    return Buffer(name="CUDA context", bytes=CONTEXT_BYTES, why="driver, libraries, workspaces")


def ring_buffer(job: Job, slots: int, where: str) -> Buffer:
    return Buffer(name="ring", bytes=slots * job.shape.num_bytes, why=f"{slots} waiting batch(es), {where}")


def ends_buffer(job: Job) -> Buffer:
    return Buffer(name="embedding and head", bytes=ends_bytes(job), why="the target's own, bf16, frozen")


def drafter_memory(job: Job, ring_here: bool) -> RoleMemory:
    """A GPU that only trains; `ring_here` where targets write straight into its memory."""
    ring = [ring_buffer(job, job.ring_slots, "written by targets")] if ring_here else []
    buffers = [*state_buffers(job), ends_buffer(job), *ring, *graph_buffers(job), context_buffer()]
    return RoleMemory(role="the drafter", buffers=tuple(buffers))


def target_memory(job: Job) -> RoleMemory:
    """A GPU that only runs the target."""
    return RoleMemory(role="the target", buffers=(*target_buffers(job), context_buffer()))


def joint_memory(job: Job) -> RoleMemory:
    """A GPU that does both in turns: the ends are shared, one batch waits at a time."""
    ring = ring_buffer(job, 1, "between the two roles")
    buffers = [*target_buffers(job), *state_buffers(job), ring, *graph_buffers(job), context_buffer()]
    return RoleMemory(role="both roles", buffers=tuple(buffers))
