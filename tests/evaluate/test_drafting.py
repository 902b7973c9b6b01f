"""Blocks on a cached context compute what the training forward computes, and see what it lets them see."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafter.anchors import Anchors
from draftsmith.drafter.layout import document_layout
from draftsmith.drafter.mask import MaskShape, visible_by_document
from draftsmith.evaluate.drafting import Blocks, DraftContext, Slots, visible
from tests.evaluate.overfit import drafter_config, random_drafter
from tests.families import tiny_target

T, B = 20, 5


def blocks_at(anchors: list[int], size: int = B, widths: list[int] | None = None) -> Blocks:
    anchors_A = torch.tensor(anchors)
    widths_A = torch.tensor(widths or [size] * len(anchors))
    none_A = torch.zeros_like(anchors_A)
    return Blocks(rows_A=none_A, tokens_A=none_A, anchors_A=anchors_A, widths_A=widths_A, size=size)


def slots_of(length: int) -> Slots:
    return Slots(rows_S=torch.zeros(length, dtype=torch.int64), positions_S=torch.arange(length))


@pytest.mark.parametrize("window", [None, 7])
def test_visibility_is_the_training_rule(window: int | None) -> None:
    anchors = [0, 3, 11, 19]
    valid_A = torch.ones(4, dtype=torch.bool)
    layout = document_layout(torch.tensor([T, 0]), T)
    shape = MaskShape(num_tokens=T, num_anchors=4, block_size=B, group=1, window=window)
    expected = visible_by_document(Anchors(index_A=torch.tensor(anchors), valid_A=valid_A), layout, shape)
    assert torch.equal(visible(blocks_at(anchors), slots_of(T), window), expected)


def test_narrow_blocks_hide_their_missing_places() -> None:
    seen = visible(blocks_at([4], widths=[2]), slots_of(4), None)[:, 4:]
    assert seen[:2].tolist() == [[True, True, False, False, False]] * 2
    assert seen[2:].all()


@torch.no_grad()
def test_a_narrow_block_equals_a_smaller_one() -> None:
    target = tiny_target("llama")
    drafter = random_drafter(drafter_config(target))
    context = DraftContext.start(drafter, target.ends())
    context.extend(torch.randn(9, 3 * 32))
    narrow = context.hidden(blocks_at([9], widths=[3]))[:, :3]
    small = context.hidden(blocks_at([9], size=3))
    torch.testing.assert_close(narrow, small, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(narrow, context.hidden(blocks_at([9]))[:, :3], atol=1e-3)


@torch.no_grad()
def test_a_context_grown_in_pieces_equals_one_at_once() -> None:
    target = tiny_target("llama")
    drafter = random_drafter(drafter_config(target))
    features = torch.randn(17, 3 * 32)
    whole, pieces = (DraftContext.start(drafter, target.ends()) for _ in range(2))
    whole.extend(features)
    for low, high in ((0, 9), (9, 10), (10, 17)):
        pieces.extend(features[low:high])
    assert pieces.length == whole.length == 17
    ours, theirs = pieces.hidden(blocks_at([17])), whole.hidden(blocks_at([17]))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
