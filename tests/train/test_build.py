"""Sizes that the step can't compute with, and what building a state leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftsmith.errors import ConfigError
from draftsmith.train.build import check_sizes
from draftsmith.train.step import StepConfig
from tests.train.tiny import Tiny, tiny_shape


@pytest.mark.parametrize(
    ("options", "tokens", "block_size", "remedy"),
    [
        ({"num_anchors": 0, "attention": "dense"}, 512, 8, "--anchors 0 is not between 1 and the token budget 512"),
        ({"num_anchors": 513, "attention": "dense"}, 512, 8, "--anchors 513"),
        ({"num_anchors": 16, "attention": "flex"}, 500, 8, "--token-budget 500 is not a multiple of 128"),
        ({"num_anchors": 15, "attention": "flex"}, 512, 8, "--anchors 15 x --block-size 8 .* change --anchors"),
    ],
)
def test_sizes_that_can_not_work_are_refused(
    options: dict[str, Any], tokens: int, block_size: int, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        check_sizes(StepConfig(**options), tiny_shape(tokens), block_size)


def test_sizes_that_work_pass() -> None:
    check_sizes(StepConfig(num_anchors=512, attention="dense"), tiny_shape(512), 8)
    check_sizes(StepConfig(num_anchors=16, attention="flex"), tiny_shape(512), 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_built_state_holds_zeros_where_sums_and_moments_start(dtype: torch.dtype) -> None:
    state = Tiny(dtype=dtype).build()
    assert (state.sums == 0).all()
    assert state.sums.numel() == 4 + 3 * state.drafter.config.block_size
    assert all((value == 0).all() for value in state.optimizer.tensors().values())
    assert (state.parameters.grad_N == 0).all()
    assert state.parameters.shadow_N.dtype == dtype
    assert state.inv_freq.dtype == torch.float32
