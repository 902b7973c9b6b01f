"""Everything a bare `draftsmith train` chooses by itself, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftsmith.data.buckets import OrderConfig, choose_buckets, padding_waste
from draftsmith.data.loader import BatchOrder
from draftsmith.drafter.loss import LossSpec
from draftsmith.drafter.mask import TILE
from draftsmith.drafter.model import FULL, SLIDING, DrafterConfig
from draftsmith.drafter.objectives import LossConfig, resolve_gamma
from draftsmith.drafter.rope import RopeConfig, rope_kind
from draftsmith.errors import ConfigError, DataError
from draftsmith.pipeline.settings import Auto, BatchOptions, DrafterOptions, Init, PipelineConfig
from draftsmith.records import BatchShape, TargetFacts
from draftsmith.target.taps import check_taps, default_taps
from draftsmith.train.step import StepConfig

SMALL_WIDTH = 1024
"""Targets narrower than this guess fewer tokens ahead: smaller blocks and fewer layers pay (docs/log.md)."""
MAX_ANCHORS = 1024
RANDOM_START_STEPS = 4000
"""Steps from which random weights end better than the target's last layers. Seen on a 135M target (docs/log.md): behind
after some 500, about level at 2,000 (an early trial), ahead at 8,000 (tau +0.10) and 16,000 (+0.12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One resolved value and why it is that."""

    name: str
    value: str
    why: str


@dataclass(slots=True)
class Choices:
    """The choices of a run in the order made."""

    made: list[Choice] = field(default_factory=list[Choice])

    def note(self, name: str, value: object, why: str) -> None:
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        self.made.append(Choice(name=name, value=shown, why=why))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Sizes of batches, steps and the whole run."""

    order: OrderConfig
    buckets: tuple[int, ...]
    num_anchors: int
    draws_per_batch: int
    accumulation: int
    total_steps: int


def resolve_drafter(options: DrafterOptions, facts: TargetFacts, choices: Choices) -> DrafterConfig:
    """The architecture for a fresh drafter of this target.

    Raises:
        TargetError: taps that the target doesn't have.
        ConfigError: no usable mask token, or sizes that contradict each other.
    """
    small = facts.hidden_size < SMALL_WIDTH
    width = f"target width {facts.hidden_size:,}"
    layers = _num_layers(options, facts)
    choices.note("layers", layers, width if options.layers == "auto" else "given")
    block = (8 if small else 16) if options.block_size == "auto" else options.block_size
    choices.note("block size", block, width if options.block_size == "auto" else "given")
    taps = options.taps or default_taps(facts.num_layers)
    check_taps(taps, facts)
    choices.note("taps", list(taps), "given" if options.taps else f"spread over {facts.num_layers} layers (paper)")
    if options.mask_token_id != "auto":
        mask = options.mask_token_id
        _check_mask_token(mask, facts)
        choices.note("mask token", mask, "given")
    elif facts.reserved_token_ids:
        mask = facts.reserved_token_ids[0]
        choices.note("mask token", mask, "an embedding row that the tokenizer never emits")
    else:
        raise ConfigError(f"{facts.name} has no reserved token: name an id it never emits with --mask-token-id")
    heads = _heads(options, facts, choices)
    full = min(options.full_layers, layers) if options.sliding_window else layers
    scaling = {} if options.rope == "plain" else dict(facts.rope_scaling)
    rope_kind(scaling)
    return DrafterConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=_or(options.intermediate_size, facts.intermediate_size),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=facts.rms_norm_eps,
        layer_types=(SLIDING,) * (layers - full) + (FULL,) * full,
        sliding_window=options.sliding_window if full < layers else 0,
        block_size=block,
        mask_token_id=mask,
        taps=tuple(taps),
        num_target_layers=facts.num_layers,
        vocab_size=facts.vocab_size,
        rope=RopeConfig(
            head_dim=heads.head_dim, theta=facts.rope_theta, scaling=scaling, max_positions=facts.max_positions
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


def _heads(options: DrafterOptions, facts: TargetFacts, choices: Choices) -> _Heads:
    """Sizes of the drafter's attention; those of its MLP are noted with them."""
    heads = _Heads(
        num_heads=_or(options.num_heads, facts.num_heads),
        num_kv_heads=_or(options.num_kv_heads, facts.num_kv_heads),
        head_dim=_or(options.head_dim, facts.head_dim),
    )
    is_own = {options.num_heads, options.num_kv_heads, options.head_dim} == {"auto"}
    shown = f"{heads.num_heads} x {heads.head_dim}, {heads.num_kv_heads} for keys"
    choices.note("heads", shown, "as the target's" if is_own else "given")
    if options.intermediate_size != "auto":
        choices.note("MLP width", options.intermediate_size, "given")
    return heads


def _or(size: int | Auto, targets: int) -> int:
    return targets if size == "auto" else size


def _num_layers(options: DrafterOptions, facts: TargetFacts) -> int:
    if options.layers != "auto":
        return options.layers
    return 2 if facts.hidden_size < SMALL_WIDTH else 5


def start_layers(options: DrafterOptions, facts: TargetFacts) -> int:
    """How many of the target's layers a fresh drafter starts from."""
    return 0 if options.init_from or options.init == "random" else _num_layers(options, facts)


def resolve_init(choice: Init | Auto, total_steps: int, choices: Choices) -> Init:
    """Where a fresh drafter's weights begin."""
    if choice == "auto":
        init: Init = "target" if total_steps < RANDOM_START_STEPS else "random"
        reason = f"{total_steps:,} steps; from {RANDOM_START_STEPS:,} on random weights end better"
    else:
        init, reason = choice, "given"
    choices.note("start", "the target's last layers" if init == "target" else "random weights", reason)
    return init


def _check_mask_token(mask: int, facts: TargetFacts) -> None:
    taken = {*facts.eos_token_ids, facts.pad_token_id, facts.bos_token_id}
    if mask in taken:
        raise ConfigError(
            f"--mask-token-id {mask} is a bos, eos or pad id of {facts.name}: a drafter would learn to see masks where "
            "text ends; leave it out to take a reserved id"
        )


def resolve_loss(config: LossConfig, block_size: int, choices: Choices) -> LossSpec:
    """The objective with its decay constant."""
    gamma = resolve_gamma(config, block_size)
    choices.note("objective", f"{config.loss}, {config.weights}", "default" if config == LossConfig() else "given")
    if config.weights == "decay":
        choices.note("gamma", f"{gamma:g}", f"block size {block_size}" if config.gamma == "auto" else "given")
    return LossSpec(config=config, gamma=gamma, block_size=block_size)


def resolve_batching(
    options: BatchOptions,
    drafter: DrafterConfig,
    lengths: Sequence[int],
    num_supervised: int,
    on_gpu: bool,
    num_drafters: int,
    choices: Choices,
) -> Batching:
    """Budget, buckets, anchors, draws and steps for this data.

    Args:
        lengths: tokens of every document.
        num_supervised: supervised tokens of all documents.
    """
    if not lengths:
        raise DataError("no documents to train on: the data holds no usable row")
    budget = _token_budget(options, drafter, max(lengths), on_gpu, choices)
    order = OrderConfig(
        token_budget=budget, max_documents=options.max_documents, seed=options.seed, mixed=options.mixed
    )
    buckets = choose_buckets(lengths, options.num_buckets, 64 if on_gpu else 8)
    waste = padding_waste(lengths, buckets)
    choices.note("buckets", list(buckets), f"least padding on your lengths: {waste:.1%} waste")
    corpus = Corpus(num_batches=BatchOrder(lengths, buckets, order).num_batches(0), num_supervised=num_supervised)
    return resolve_draws(options, drafter, order, buckets, corpus, num_drafters, choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """One epoch in numbers."""

    num_batches: int
    num_supervised: int


def resolve_draws(
    options: BatchOptions,
    drafter: DrafterConfig,
    order: OrderConfig,
    buckets: tuple[int, ...],
    corpus: Corpus,
    num_drafters: int,
    choices: Choices,
) -> Batching:
    """Anchors, draws and steps for an epoch of known size."""
    places = drafter.block_size - 1
    anchors = usual_anchors(order.token_budget, drafter.block_size) if options.anchors == "auto" else options.anchors
    choices.note("anchors", anchors, "a 32nd of the budget" if options.anchors == "auto" else "given")
    labels = anchors * places * corpus.num_batches
    if options.draws_per_batch == "auto":
        draws = max(1, round(options.labels_per_token * corpus.num_supervised / labels))
        why = f"{options.labels_per_token:g} labels for each of {corpus.num_supervised:,} supervised tokens an epoch"
    else:
        draws = options.draws_per_batch
        why = f"given: {draws * labels / max(1, corpus.num_supervised):.1f} labels a token"
    choices.note("draws per batch", draws, why)
    each = options.accumulation * num_drafters
    steps = options.max_steps or max(1, round(options.epochs * corpus.num_batches * draws / each))
    epochs = steps * each / (corpus.num_batches * draws)
    choices.note("steps", steps, f"{epochs:.2g} epochs of {corpus.num_batches:,} batches x {draws} draws")
    return Batching(
        order=order,
        buckets=buckets,
        num_anchors=anchors,
        draws_per_batch=draws,
        accumulation=options.accumulation,
        total_steps=steps,
    )


def usual_anchors(token_budget: int, block_size: int) -> int:
    """Blocks drafted from a batch at a time where nobody says: a 32nd of its tokens, in whole tiles of attention."""
    tile = TILE // math.gcd(block_size, TILE)
    return max(tile, min(MAX_ANCHORS, token_budget // 32) // tile * tile)


def usual_budget(hidden_size: int, on_gpu: bool) -> int:
    """Tokens of a batch where nobody says, unless a document is longer."""
    small = hidden_size < SMALL_WIDTH
    return (16_384 if small else 49_152) if on_gpu else 2_048


def _token_budget(options: BatchOptions, drafter: DrafterConfig, longest: int, on_gpu: bool, choices: Choices) -> int:
    if options.token_budget != "auto":
        if longest > options.token_budget:
            raise ConfigError(
                f"a document of {longest:,} tokens doesn't fit --token-budget {options.token_budget:,}: raise it, or "
                "lower --max-length"
            )
        choices.note("token budget", options.token_budget, "given")
        return options.token_budget
    usual = usual_budget(drafter.hidden_size, on_gpu)
    budget = max(usual, -(-longest // TILE) * TILE)
    why = "on a GPU" if on_gpu else "on a CPU"
    choices.note("token budget", budget, why if budget == usual else f"the longest document has {longest:,} tokens")
    return budget


def resolve_step(config: PipelineConfig, num_anchors: int, on_gpu: bool, choices: Choices) -> StepConfig:
    """How the step computes."""
    attention = ("flex" if on_gpu else "dense") if config.attention == "auto" else config.attention
    if attention == "flex" and not on_gpu:
        raise ConfigError("--attention flex has no backward on a CPU: leave it out, or use dense")
    if attention == "dense" and on_gpu:
        choices.note("attention", "dense", "given by name: slow on a GPU, for comparison")
    return StepConfig(
        num_anchors=num_anchors,
        attention=attention,
        checkpoint_layers=config.checkpoint_layers,
        feature_noise=config.feature_noise,
    )


def batch_shape(
    batching: Batching, drafter: DrafterConfig, dtype: torch.dtype, last_hidden: bool, freeze_context: bool = False
) -> BatchShape:
    """The one shape of the run's FeatureBatches; with a frozen context they carry it in the features' place."""
    return BatchShape(
        num_tokens=batching.order.token_budget,
        num_documents=batching.order.max_documents,
        num_taps=1 if freeze_context else len(drafter.taps),
        hidden_size=drafter.hidden_size,
        dtype=dtype,
        last_hidden=last_hidden,
    )
