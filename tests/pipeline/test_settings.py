"""Options out of range are refused with the flag that mends them."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.errors import ConfigError
from draftsmith.pipeline.settings import (
    AnswerOptions,
    BatchOptions,
    DataOptions,
    DrafterOptions,
    MeasureOptions,
    PipelineConfig,
)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DrafterOptions, {"layers": 0}, "--layers 0"),
        (DrafterOptions, {"sliding_window": -1}, "--sliding-window"),
        (DrafterOptions, {"full_layers": -1}, "--full-layers"),
        (DrafterOptions, {"num_heads": 0}, "--num-heads 0 is not 1 or more; leave it out to take the target's"),
        (DrafterOptions, {"num_kv_heads": -2}, "--num-kv-heads -2"),
        (DrafterOptions, {"head_dim": 0}, "--head-dim 0"),
        (DrafterOptions, {"intermediate_size": 0}, "--intermediate-size 0"),
        (DrafterOptions, {"init_from": "d", "layers": 3, "head_dim": 64}, "of d as it is: drop --layers, --head-dim"),
        (DrafterOptions, {"init_from": "d", "init": "random"}, "drop --init$"),
        (BatchOptions, {"labels_per_token": 0}, "--labels-per-token 0"),
        (BatchOptions, {"accumulation": 0}, "--accumulation 0"),
        (BatchOptions, {"epochs": 0}, "--epochs"),
        (BatchOptions, {"max_steps": -1}, "--max-steps"),
        (PipelineConfig, {"ring_slots": 0}, "--ring-slots 0"),
        (PipelineConfig, {"targets": 0}, "--targets 0"),
        (PipelineConfig, {"drafters": 0}, "--drafters 0"),
        (PipelineConfig, {"colocate": True, "targets": 2}, "drop --targets and --drafters"),
        (PipelineConfig, {"stall_seconds": 0}, "--stall-seconds"),
        (PipelineConfig, {"threads": -1}, "--threads"),
        (PipelineConfig, {"feature_noise": -0.1}, "--feature-noise"),
        (DataOptions, {}, "give --data CHATS, or --features"),
        (DataOptions, {"features": "f", "cache_features": True}, "drop --cache-features"),
        (DataOptions, {"data": "d", "hold_out": -1}, "--hold-out -1"),
        (
            AnswerOptions,
            {"answer_temperature": -0.5},
            "--answer-temperature -0.5 is below 0: give 0 for greedy answers",
        ),
        (AnswerOptions, {"answer_tokens": 0}, "--answer-tokens and --answer-batch must be 1 or more"),
        (AnswerOptions, {"answer_batch": 0}, "--answer-tokens and --answer-batch must be 1 or more"),
        (MeasureOptions, {"num_prompts": -1}, "--num-prompts"),
        (MeasureOptions, {"eval_every": -1}, "--eval-every"),
        (MeasureOptions, {"max_new_tokens": 0}, "--max-new-tokens"),
    ],
)
def test_refuses(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


def test_defaults_are_fine() -> None:
    for kind in (AnswerOptions, DrafterOptions, BatchOptions, PipelineConfig, MeasureOptions):
        kind()
    DrafterOptions(init_from="drafter")
    DataOptions(data="chats.jsonl")
