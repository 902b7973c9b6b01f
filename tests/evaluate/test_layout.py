"""Names and shapes between a Drafter and its file; strict loading is tested in test_export.py."""

from __future__ import annotations

import pytest
import torch

from draftsmith.errors import ExportError
from draftsmith.evaluate.layout import check_weights, expected_shapes, merge_weights, rope_from_values, split_weights
from tests.evaluate.overfit import drafter_config, random_drafter
from tests.families import tiny_target


def test_splitting_and_merging_are_inverse() -> None:
    drafter = random_drafter(drafter_config(tiny_target("qwen3")))
    weights = dict(drafter.named_parameters())
    named = split_weights(weights, torch.float32)
    assert {name: tuple(weight.shape) for name, weight in named.items()} == expected_shapes(drafter.config)
    again = merge_weights(named)
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())


def test_weights_that_do_not_fit_are_named() -> None:
    config = drafter_config(tiny_target("qwen3"))
    shapes = expected_shapes(config)
    check_weights(shapes, config, "here")
    with pytest.raises(ExportError, match=r"here lacks norm\.weight"):
        check_weights({name: shape for name, shape in shapes.items() if name != "norm.weight"}, config, "here")
    with pytest.raises(ExportError, match=r"here holds embed_tokens\.weight"):
        check_weights(shapes | {"embed_tokens.weight": (9, 9)}, config, "here")
    with pytest.raises(ExportError, match=r"fc\.weight \[32, 160\] instead of \[32, 96\]"):
        check_weights(shapes | {"fc.weight": (32, 160)}, config, "here")


def test_older_files_name_the_scaling_by_type() -> None:
    flat = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 64}
    rope = rope_from_values(flat, 16, "here")
    assert (rope.theta, dict(rope.scaling)) == (1e6, {"rope_type": "linear", "factor": 2.0})
