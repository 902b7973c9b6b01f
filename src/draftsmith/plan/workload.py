"""What a run computes: operations of a draw and of a target token, and rates from them."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.data.buckets import OrderConfig
from draftsmith.drafter.model import DrafterConfig
from draftsmith.errors import ConfigError
from draftsmith.plan.calibration import (
    BYTES_PER_DISTILLED_LOGIT,
    BYTES_PER_LOGIT,
    DECODE_SHARE,
    DRAFTER_SHARE,
    HOST_SECONDS_PER_LAYER,
    LOGIT_BYTES_MOVED,
    MOVED_TIMES,
    TARGET_DENSE_SHARE,
    TARGET_FP8_SHARE,
    TARGET_HYBRID_SHARE,
    TEACHER_BYTES_MOVED,
    UPDATE_BYTES,
    Card,
)
from draftsmith.records import BatchShape
from draftsmith.target.weigh import TargetSize

BF16, FP32 = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The data in numbers, over one epoch."""

    tokens: int
    supervised: int
    padding: float
    """Share of the target's forward tokens that are padding."""
    fill: float
    """Share of a batch's places that hold a token."""
    source: str
    """Where the numbers come from, for the reader."""
    is_assumed: bool = False
    """Nobody looked at the data."""

    def __post_init__(self) -> None:
        if not 0 < self.supervised <= self.tokens:
            raise ConfigError(
                f"{self.supervised:,} supervised of {self.tokens:,} tokens is no data to plan for: give --tokens above "
                "0 and --supervised-share between 0 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run to plan: what it trains, on what, how often."""

    target: TargetSize
    drafter: DrafterConfig
    shape: BatchShape
    corpus: Corpus
    num_anchors: int
    labels_per_token: float
    draws: int
    """Draws from a batch; 0 follows `labels_per_token`."""
    epochs: float
    max_steps: int
    """Optimizer steps; 0 follows `epochs`."""
    accumulation: int
    ring_slots: int
    chunk_rows: int
    fp8: bool
    checkpoint_layers: bool
    freeze_context: bool = False
    """`fc` and `hidden_norm` don't train, and the target's side applies them."""

    @property
    def batch_tokens(self) -> float:
        """Tokens that a batch really holds."""
        return self.shape.num_tokens * self.corpus.fill

    @property
    def draws_per_batch(self) -> int:
        if self.draws:
            return self.draws
        supervised = self.batch_tokens * self.corpus.supervised / self.corpus.tokens
        return max(1, round(self.labels_per_token * supervised / self.labels_per_draw))

    @property
    def labels_per_draw(self) -> int:
        return self.num_anchors * (self.drafter.block_size - 1)

    @property
    def density(self) -> float:
        """Labels that a supervised token really gets per visit."""
        supervised = self.batch_tokens * self.corpus.supervised / self.corpus.tokens
        return self.draws_per_batch * self.labels_per_draw / supervised

    def tokens_read(self, num_drafters: int) -> float:
        """Tokens of the whole run, each counted as often as the target reads it."""
        if not self.max_steps:
            return self.epochs * self.corpus.tokens
        return self.max_steps * self.accumulation * num_drafters / self.draws_per_batch * self.batch_tokens


def layer_parameters(drafter: DrafterConfig) -> int:
    """Matrix elements of one drafter layer that block rows pass through."""
    H = drafter.hidden_size
    heads, keys = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    return 2 * H * heads + 2 * H * keys + 3 * H * drafter.intermediate_size


def drafter_parameters(drafter: DrafterConfig) -> int:
    """All trained elements: layers with their norms, `fc`, the two outer norms."""
    H = drafter.hidden_size
    layer = layer_parameters(drafter) + 2 * H + 2 * drafter.head_dim
    return drafter.num_layers * layer + len(drafter.taps) * H * H + 2 * H


def trained_parameters(job: Job) -> int:
    """Elements with a gradient and moments."""
    H = job.drafter.hidden_size
    context = len(job.drafter.taps) * H * H + H
    return drafter_parameters(job.drafter) - (context if job.freeze_context else 0)


def fc_flops(job: Job) -> float:
    """Of a token, `fc` once."""
    return 2.0 * len(job.drafter.taps) * job.drafter.hidden_size**2


def draw_flops(job: Job) -> float:
    """Model operations of a draw, attention left out: layers, context keys and values, fc, head.

    6 per parameter and row forward and backward (8 where layers are recomputed); `fc` needs no gradient of its input;
    the frozen head is read twice (a teacher adds one more product). A frozen context needs no gradient.
    """
    d = job.drafter
    rows, tokens, H = job.num_anchors * d.block_size, job.shape.num_tokens, d.hidden_size
    passes = 8 if job.checkpoint_layers else 6
    layers = passes * rows * d.num_layers * layer_parameters(d)
    keys = 2 * d.num_layers * H * d.num_kv_heads * d.head_dim
    context = (passes - 2 if job.freeze_context else passes) * tokens * keys
    head = (6 if job.shape.last_hidden else 4) * rows * H * d.vocab_size
    return layers + context + (0.0 if job.freeze_context else 2 * tokens * fc_flops(job)) + head


def activation_bytes(job: Job) -> int:
    """Kept from forward to backward by a draw, apart from the logits: what the graphs' pool is mostly made of.

    Per block row and layer: the residual stream and its norm, twice; queries before and after rotation and the
    attention's output; own keys and values; gate, up and their product. Per context token and layer: keys, rotated
    keys, values, and both beside the block's. Once: the context before and after its norm, its gradient; the
    block's embedding, the last hidden state and its gradient.
    """
    d = job.drafter
    rows, tokens, H = job.num_anchors * d.block_size, job.shape.num_tokens, d.hidden_size
    heads, keys = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    per_row = 4 * H + 3 * heads + 2 * keys + 3 * d.intermediate_size
    kept = 1 if job.checkpoint_layers else d.num_layers
    stream = rows * H * (d.num_layers if job.checkpoint_layers else 0)
    context = tokens * (5 * keys * kept + 3 * H)
    return BF16 * (rows * per_row * kept + stream + context + rows * 3 * H)


def chunk_bytes(job: Job) -> int:
    """Logits of a chunk at its fullest."""
    return chunk_rows(job) * job.drafter.vocab_size * bytes_per_logit(job)


def chunk_rows(job: Job) -> int:
    """Guesses of whole blocks, at least one, and no more than a draw has: the anchor of each is known."""
    return min(max(1, job.chunk_rows // job.drafter.block_size), job.num_anchors) * (job.drafter.block_size - 1)


def bytes_per_logit(job: Job) -> int:
    return BYTES_PER_DISTILLED_LOGIT if job.shape.last_hidden else BYTES_PER_LOGIT


def moved_bytes(job: Job) -> float:
    """Activations of a draw, counted once, and what all its logits move."""
    guesses = job.num_anchors * (job.drafter.block_size - 1)
    per_logit = LOGIT_BYTES_MOVED + (TEACHER_BYTES_MOVED if job.shape.last_hidden else 0)
    return activation_bytes(job) + per_logit * guesses * job.drafter.vocab_size


def target_flops(job: Job) -> float:
    """Operations of a target worker for one token, attention left out: 2 per parameter passed."""
    return 2.0 * sum(passed_layers(job)) + (fc_flops(job) if job.freeze_context else 0.0)


def passed_layers(job: Job) -> tuple[int, ...]:
    """Parameters of the layers that run: up to the last tap, or all where the last hidden state is needed."""
    return job.target.layers if job.shape.last_hidden else job.target.layers[: job.drafter.taps[-1] + 1]


def draw_seconds(job: Job, card: Card) -> float:
    """One captured draw with its update: products at the matrix rate, everything between them at memory's."""
    moved = moved_bytes(job) * MOVED_TIMES + UPDATE_BYTES * trained_parameters(job)
    return draw_flops(job) / (DRAFTER_SHARE * card.tflops * 1e12) + moved / (card.bandwidth * 1e12)


def target_share(job: Job) -> float:
    """Of the card's matrix rate, what the target's forward reaches."""
    if "linear_attention" in job.target.facts.layer_types:
        return TARGET_HYBRID_SHARE * (TARGET_FP8_SHARE / TARGET_DENSE_SHARE if job.fp8 else 1.0)
    return TARGET_FP8_SHARE if job.fp8 else TARGET_DENSE_SHARE


def target_rate(job: Job, card: Card) -> float:
    """Real tokens a second of one target worker; what is padded costs, but doesn't count. Host or GPU, whichever is
    slower for a forward."""
    tokens = forward_tokens(job)
    on_gpu = tokens * target_flops(job) / (target_share(job) * card.tflops * 1e12)
    on_host = len(passed_layers(job)) * HOST_SECONDS_PER_LAYER
    return tokens * (1.0 - job.corpus.padding) / max(on_gpu, on_host)


def forward_tokens(job: Job) -> int:
    """Padded tokens of one forward of the target."""
    return max(1, job.shape.num_tokens // OrderConfig().forwards_per_batch)


def drafter_rate(job: Job, card: Card, reduce_seconds: float = 0.0) -> float:
    """Real tokens a second of one drafter: a batch, used `draws_per_batch` times, an average of gradients per step."""
    steps = job.draws_per_batch / job.accumulation
    return job.batch_tokens / (job.draws_per_batch * draw_seconds(job, card) + steps * reduce_seconds)


def regenerate_seconds(job: Job, card: Card, num_gpus: int) -> float:
    """To write every supervised token anew with the target itself on all GPUs."""
    flops = 2.0 * (sum(job.target.layers) + job.target.ends / 2)
    return job.corpus.supervised * flops / (DECODE_SHARE * card.tflops * 1e12 * num_gpus)
