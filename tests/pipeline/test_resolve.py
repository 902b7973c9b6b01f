"""What a bare run chooses, why, and what it refuses; how lengths mix in every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.data.buckets import OrderConfig, bucket_of
from draftsmith.data.loader import BatchOrder
from draftsmith.drafter.model import FULL, SLIDING
from draftsmith.drafter.objectives import LossConfig
from draftsmith.errors import ConfigError, DataError, TargetError
from draftsmith.pipeline.resolve import (
    Choices,
    Corpus,
    batch_shape,
    resolve_batching,
    resolve_drafter,
    resolve_draws,
    resolve_init,
    resolve_loss,
    resolve_step,
    start_layers,
)
from draftsmith.pipeline.settings import BatchOptions, DrafterOptions, PipelineConfig
from tests.families import tiny_target
from tests.pipeline.tiny import CONFIG, FAMILY

FACTS = tiny_target(FAMILY).facts
WIDE = replace(FACTS, hidden_size=4096, num_layers=36, layer_types=("full_attention",) * 36)


def made(choices: Choices) -> dict[str, tuple[str, str]]:
    return {choice.name: (choice.value, choice.why) for choice in choices.made}


def test_a_wide_target_gets_the_papers_sizes() -> None:
    choices = Choices()
    drafter = resolve_drafter(DrafterOptions(), WIDE, choices)
    assert (len(drafter.layer_types), drafter.block_size, len(drafter.taps)) == (5, 16, 5)
    assert drafter.hidden_size == 4096
    assert made(choices)["layers"] == ("5", "target width 4,096")


def test_a_narrow_target_gets_a_small_drafter() -> None:
    drafter = resolve_drafter(DrafterOptions(), FACTS, Choices())
    assert (len(drafter.layer_types), drafter.block_size) == (2, 8)
    assert drafter.rope.theta == FACTS.rope_theta


def test_what_is_given_wins() -> None:
    choices = Choices()
    options = DrafterOptions(layers=3, block_size=4, taps=(0, 2), mask_token_id=100, sliding_window=16, full_layers=1)
    drafter = resolve_drafter(options, FACTS, choices)
    assert drafter.layer_types == (SLIDING, SLIDING, FULL)
    assert (drafter.block_size, drafter.taps, drafter.mask_token_id, drafter.sliding_window) == (4, (0, 2), 100, 16)
    assert made(choices)["taps"] == ("[0, 2]", "given")


def test_a_window_that_no_layer_has_is_none() -> None:
    """An exported config states none then, and would be held against the one trained with."""
    options = DrafterOptions(layers=2, sliding_window=64, full_layers=2)
    drafter = resolve_drafter(options, FACTS, Choices())
    assert (drafter.layer_types, drafter.sliding_window) == ((FULL, FULL), 0)


def test_heads_are_the_targets_or_those_given() -> None:
    choices = Choices()
    targets = resolve_drafter(DrafterOptions(), WIDE, choices)
    assert (targets.num_heads, targets.num_kv_heads) == (WIDE.num_heads, WIDE.num_kv_heads)
    assert (targets.head_dim, targets.intermediate_size) == (WIDE.head_dim, WIDE.intermediate_size)
    assert made(choices)["heads"][1] == "as the target's"
    assert "MLP width" not in made(choices)
    choices = Choices()
    options = DrafterOptions(num_heads=32, num_kv_heads=8, head_dim=WIDE.head_dim * 2, intermediate_size=96)
    own = resolve_drafter(options, WIDE, choices)
    assert (own.num_heads, own.num_kv_heads, own.intermediate_size) == (32, 8, 96)
    assert own.head_dim == own.rope.head_dim == WIDE.head_dim * 2
    assert made(choices)["heads"] == (f"32 x {own.head_dim}, 8 for keys", "given")
    assert made(choices)["MLP width"] == ("96", "given")


def test_heads_that_cant_be_shared_or_rotated_are_refused() -> None:
    with pytest.raises(ConfigError, match="give --num-kv-heads a divisor of --num-heads"):
        resolve_drafter(DrafterOptions(num_heads=6, num_kv_heads=4), FACTS, Choices())
    with pytest.raises(ConfigError, match="--head-dim 15 is odd"):
        resolve_drafter(DrafterOptions(head_dim=15), FACTS, Choices())


def test_C18_the_mask_token_is_a_reserved_id_never_eos() -> None:
    drafter = resolve_drafter(DrafterOptions(), FACTS, Choices())
    assert drafter.mask_token_id == FACTS.reserved_token_ids[0]
    with pytest.raises(ConfigError, match="is a bos, eos or pad id"):
        resolve_drafter(DrafterOptions(mask_token_id=FACTS.eos_token_ids[0]), FACTS, Choices())
    with pytest.raises(ConfigError, match="name an id it never emits with --mask-token-id"):
        resolve_drafter(DrafterOptions(), replace(FACTS, reserved_token_ids=()), Choices())


def test_B08_taps_that_the_target_lacks_are_refused() -> None:
    with pytest.raises(TargetError):
        resolve_drafter(DrafterOptions(taps=(1, FACTS.num_layers)), FACTS, Choices())


@pytest.mark.parametrize(("block", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_gamma_follows_the_block_size(block: int, gamma: float) -> None:
    choices = Choices()
    assert resolve_loss(LossConfig(weights="decay"), block, choices).gamma == gamma
    assert made(choices)["gamma"] == (f"{gamma:g}", f"block size {block}")


def draws(options: BatchOptions, *, batches: int = 10, supervised: int = 10_000, drafters: int = 1) -> Any:
    order = OrderConfig(token_budget=2048, max_documents=8)
    corpus = Corpus(num_batches=batches, num_supervised=supervised)
    return resolve_draws(options, CONFIG, order, (64,), corpus, drafters, Choices())


def test_density_fixes_draws() -> None:
    """64 anchors x 3 labels x 10 batches = 1,920 labels a pass; 2.5 labels for 10,000 tokens are 13 passes."""
    batching = draws(BatchOptions())
    assert batching.num_anchors == 64
    assert batching.draws_per_batch == 13
    assert batching.total_steps == 6 * 10 * 13


def test_E07_accumulation_and_drafters_share_draws_without_losing_any_whole_step() -> None:
    batching = draws(BatchOptions(draws_per_batch=3, epochs=1, accumulation=2), drafters=2)
    assert batching.total_steps == round(10 * 3 / 4)
    assert draws(BatchOptions(draws_per_batch=1, epochs=0.01), drafters=4).total_steps == 1
    assert draws(BatchOptions(max_steps=7)).total_steps == 7


def test_a_document_longer_than_the_budget_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a document of 300 tokens doesn't fit --token-budget 256"):
        resolve_batching(BatchOptions(token_budget=256), CONFIG, [10, 300], 100, False, 1, Choices())
    with pytest.raises(DataError, match="no documents to train on"):
        resolve_batching(BatchOptions(), CONFIG, [], 0, False, 1, Choices())


def test_the_budget_grows_to_the_longest_document() -> None:
    batching = resolve_batching(BatchOptions(), CONFIG, [10, 3000], 100, False, 1, Choices())
    assert batching.order.token_budget == 3072
    assert resolve_batching(BatchOptions(), CONFIG, [10, 300], 100, False, 1, Choices()).order.token_budget == 2048


def test_steps_compute_as_the_device_can() -> None:
    assert resolve_step(PipelineConfig(), 8, False, Choices()).attention == "dense"
    assert resolve_step(PipelineConfig(), 8, True, Choices()).attention == "flex"
    with pytest.raises(ConfigError, match="--attention flex has no backward on a CPU"):
        resolve_step(PipelineConfig(attention="flex"), 8, False, Choices())
    choices = Choices()
    assert resolve_step(PipelineConfig(attention="dense"), 8, True, choices).attention == "dense"
    assert "slow on a GPU" in made(choices)["attention"][1]


def test_batch_shape() -> None:
    batching = draws(BatchOptions())
    shape = batch_shape(batching, CONFIG, torch.bfloat16, True)
    assert (shape.num_tokens, shape.num_documents, shape.num_taps) == (2048, 8, len(CONFIG.taps))
    assert shape.last_hidden


def shares(mixed: bool, batches_per_step: int) -> tuple[np.ndarray, np.ndarray]:
    """Per optimizer step of an epoch: each bucket's share of the tokens; and each bucket's share of all."""
    lengths = np.random.default_rng(0).integers(8, 200, 4000).tolist()
    buckets = (48, 96, 200)
    order = BatchOrder(lengths, buckets, OrderConfig(token_budget=4096, max_documents=256, seed=1, mixed=mixed))
    counts = np.zeros((order.num_batches(0), len(buckets)))
    for number in range(order.num_batches(0)):
        for document in order.batch(number).documents:
            counts[number, bucket_of(lengths[document], buckets)] += lengths[document]
    whole = len(counts) // batches_per_step * batches_per_step
    steps = counts[:whole].reshape(-1, batches_per_step, len(buckets)).sum(1)
    return steps / steps.sum(1, keepdims=True), counts.sum(0) / counts.sum()


def test_every_step_mixes_buckets_in_proportion_to_their_tokens() -> None:
    """Stated bounds: with two batches a step no bucket's share is off by more than 0.15, on average by 0.05."""
    steps, overall = shares(mixed=True, batches_per_step=2)
    off = np.abs(steps - overall)
    assert off.max() < 0.15
    assert off.mean() < 0.05


def test_one_bucket_a_batch_shows_the_whiplash() -> None:
    steps, overall = shares(mixed=False, batches_per_step=2)
    assert np.abs(steps - overall).max() > 0.3


def test_a_fresh_drafter_starts_from_as_many_layers_as_it_has() -> None:
    assert [start_layers(DrafterOptions(), facts) for facts in (WIDE, FACTS)] == [5, 2]
    assert start_layers(DrafterOptions(layers=3), FACTS) == 3
    assert start_layers(DrafterOptions(init="random"), FACTS) == start_layers(DrafterOptions(init_from="d"), FACTS) == 0


@pytest.mark.parametrize(
    ("choice", "steps", "init", "why"),
    [
        ("auto", 3999, "target", "3,999 steps; from 4,000 on random weights end better"),
        ("auto", 4000, "random", "4,000 steps; from 4,000 on random weights end better"),
        ("target", 10**6, "target", "given"),
        ("random", 1, "random", "given"),
    ],
)
def test_long_runs_start_at_random_and_short_ones_from_the_target(choice: Any, steps: int, init: str, why: str) -> None:
    choices = Choices()
    assert resolve_init(choice, steps, choices) == init
    (made,) = choices.made
    assert (made.name, made.why) == ("start", why)
    assert made.value == {"target": "the target's last layers", "random": "random weights"}[init]
