"""Anchors and blocks against examples worked by hand.

The batch of most tests: 12 places, documents of 5 and 4 tokens, 3 places of padding.

    place       0 1 2 3 4 | 5 6 7 8 | 9 10 11
    supervised  1 1 0 1 1 | 1 1 1 0 | (padding)
    eligible    x     x   | x x     |
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.drafter.anchors import Anchors, Blocks, draw_uniforms, make_blocks, select_anchors
from draftsmith.drafter.layout import document_layout

LENGTHS = (5, 4, 0, 0)
SUPERVISED = (1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0)
UNIFORMS = (0.1, 0.95, 0.95, 0.9, 0.95, 0.2, 0.8, 0.95, 0.95, 0.99, 0.99, 0.99)
MASK_ID = 99


def chosen(
    num_anchors: int,
    lengths: tuple[int, ...] = LENGTHS,
    supervised: tuple[int, ...] = SUPERVISED,
    uniforms: tuple[float, ...] | None = UNIFORMS,
) -> Anchors:
    mask_T = torch.tensor(supervised).bool()
    uniforms_T = draw_uniforms(0, 0, 0, len(supervised)) if uniforms is None else torch.tensor(uniforms).double()
    layout = document_layout(torch.tensor(lengths), len(supervised))
    return select_anchors(mask_T, layout.document_ids_T, uniforms_T, num_anchors)


def blocks_at(
    anchors: list[int], block_size: int, lengths: tuple[int, ...] = LENGTHS, supervised: tuple[int, ...] = SUPERVISED
) -> Blocks:
    """Blocks of hand-placed anchors; token i of the batch has id i."""
    T = len(supervised)
    placed = Anchors(index_A=torch.tensor(anchors), valid_A=torch.ones(len(anchors), dtype=torch.bool))
    layout = document_layout(torch.tensor(lengths), T)
    return make_blocks(placed, layout, torch.arange(T), torch.tensor(supervised).bool(), block_size, MASK_ID)


def test_takes_the_highest_uniforms_among_eligible_tokens_in_rising_order() -> None:
    anchors = chosen(3)
    assert anchors.index_A.tolist() == [3, 5, 6]
    assert anchors.valid_A.tolist() == [True, True, True]


def test_too_few_eligible_tokens_leave_places_unfilled_at_the_end() -> None:
    anchors = chosen(6)
    assert anchors.index_A.tolist() == [0, 3, 5, 6, 0, 0]
    assert anchors.valid_A.tolist() == [True] * 4 + [False] * 2


def test_nothing_supervised_fills_no_place() -> None:
    anchors = chosen(4, supervised=(0,) * 12)
    assert not anchors.valid_A.any()
    assert anchors.index_A.tolist() == [0, 0, 0, 0]


def test_C09_exactly_one_eligible_token_is_chosen() -> None:
    anchors = chosen(4, supervised=(0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0))
    assert anchors.index_A[anchors.valid_A].tolist() == [3]


def test_a_uniform_of_exactly_zero_is_eligible() -> None:
    assert chosen(12, uniforms=(0.0,) * 12).valid_A.sum() == 4


def test_supervised_padding_is_never_chosen() -> None:
    anchors = chosen(12, supervised=(*SUPERVISED[:9], 1, 1, 1))
    assert anchors.index_A[anchors.valid_A].tolist() == [0, 3, 5, 6]


def test_the_last_place_of_an_exactly_full_batch_is_no_anchor() -> None:
    """Unfilled places must not be parked on it either."""
    anchors = chosen(8, lengths=(5, 3), supervised=(1,) * 8, uniforms=None)
    assert anchors.index_A.tolist() == [0, 1, 2, 3, 5, 6, 0, 0]
    assert anchors.valid_A.tolist() == [True] * 6 + [False] * 2


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6).map(tuple),
    tail=st.integers(0, 6),
    bits=st.integers(0, 2**78 - 1),
    num_anchors=st.integers(1, 20),
)
def test_random_batches_fill_as_many_places_as_are_eligible(
    lengths: tuple[int, ...], tail: int, bits: int, num_anchors: int
) -> None:
    T = max(sum(lengths) + tail, num_anchors)
    supervised = tuple(bits >> i & 1 for i in range(T))
    ids = [document for document, length in enumerate(lengths) for _ in range(length)]
    eligible = {
        i for i in range(len(ids) - 1) if supervised[i] and supervised[i + 1] and ids[i] == ids[i + 1]
    }  # the last token has no next one
    anchors = chosen(num_anchors, lengths, supervised, None)
    index = anchors.index_A[anchors.valid_A].tolist()
    assert len(index) == min(num_anchors, len(eligible))
    assert set(index) <= eligible
    assert index == sorted(set(index))


def test_every_eligible_token_is_chosen_about_equally_often() -> None:
    mask_T = torch.ones(41, dtype=torch.bool)
    ids_T = torch.zeros(41, dtype=torch.int64)
    counts = torch.zeros(41)
    for draw in range(400):
        counts[select_anchors(mask_T, ids_T, draw_uniforms(3, 0, draw, 41), 10).index_A] += 1
    assert counts[40] == 0
    expected = 400 * 10 / 40
    chi_square = ((counts[:40] - expected).square() / (expected * (1 - 10 / 40))).sum()
    assert chi_square < 72.7  # 39 degrees of freedom, p = 0.001


def test_C07_every_supervised_token_behind_a_supervised_one_is_a_label_and_no_anchor_has_none() -> None:
    """The first token of a span comes from the target's own forward when served, so it is never a guess."""
    supervised = (0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 1, 1)
    spans_first, spans_last, alone = {1, 5, 10}, {3, 6, 11}, {8}
    anchors = chosen(12, lengths=(12,), supervised=supervised, uniforms=None)
    index = anchors.index_A[anchors.valid_A].tolist()
    asked = {place for place, is_on in enumerate(supervised) if is_on}
    assert set(index) == asked - spans_last - alone
    blocks = blocks_at(index, 2, (12,), supervised)
    assert set(blocks.index_AB[blocks.supervised_AB].tolist()) == asked - spans_first - alone
    assert blocks.supervised_AB.any(1).all(), "an anchor whose first guess has no label teaches nothing"


def test_C08_a_short_documents_share_of_the_anchors_is_its_share_of_the_tokens() -> None:
    """187 and 1,313 supervised tokens, 100 anchors: the short document has 12.4 of them, not a place in a queue."""
    lengths, eligible, draws = torch.tensor([187, 1313]), torch.tensor([186, 1312]), 200
    layout = document_layout(lengths, 1500)
    mask_T = torch.ones(1500, dtype=torch.bool)
    counts = torch.zeros(2)
    for draw in range(draws):
        anchors = select_anchors(mask_T, layout.document_ids_T, draw_uniforms(0, 0, draw, 1500), 100)
        counts += torch.bincount(layout.document_ids_T[anchors.index_A], minlength=2)
    share = float(eligible[0] / eligible.sum())
    deviation = (100 * share * (1 - share) / draws) ** 0.5
    assert float(counts[0]) / draws == pytest.approx(100 * share, abs=4 * deviation)


def test_uniforms_are_a_function_of_seed_batch_and_draw() -> None:
    assert torch.equal(draw_uniforms(1, 2, 3, 50), draw_uniforms(1, 2, 3, 50))
    places = [(seed, batch, draw) for seed in range(4) for batch in range(5) for draw in range(8)]
    firsts = {float(draw_uniforms(*place, 1)) for place in places}
    assert len(firsts) == len(places)


def test_uniforms_do_not_tie_over_a_full_batch() -> None:
    u = draw_uniforms(0, 0, 0, 49_152)
    assert u.dtype == torch.float64
    assert u.unique().numel() == 49_152


def as_places(supervised_AB: Tensor) -> list[list[int]]:
    return supervised_AB.int().tolist()


def test_C04_C05_place_k_is_asked_for_token_a_plus_k() -> None:
    """Not a + k + 1: at serving, place k is read as the token k after the anchor, and place 0 is the anchor itself."""
    blocks = blocks_at([0, 5], 3, lengths=(12,), supervised=(1,) * 12)
    assert blocks.labels_Q.tolist() == [0, 1, 2, 5, 6, 7]
    assert blocks.input_ids_Q.tolist() == [0, MASK_ID, MASK_ID, 5, MASK_ID, MASK_ID]
    assert as_places(blocks.supervised_AB) == [[0, 1, 1], [0, 1, 1]]


def test_positions_restart_with_the_document_and_run_on_past_its_end() -> None:
    blocks = blocks_at([3, 6], 4)
    assert blocks.positions_Q.tolist() == [3, 4, 5, 6, 1, 2, 3, 4]


def test_labels_end_with_the_document_and_at_the_first_unsupervised_token() -> None:
    blocks = blocks_at([0, 3, 5, 6], 5)
    assert as_places(blocks.supervised_AB) == [
        [0, 1, 0, 0, 0],  # token 2 is unsupervised; 3 and 4 come too late
        [0, 1, 0, 0, 0],  # token 5 belongs to the next document
        [0, 1, 1, 0, 0],
        [0, 1, 0, 0, 0],
    ]


def test_C06_the_separator_after_a_turn_gets_no_loss() -> None:
    turn = tuple(int(8 <= i <= 39) for i in range(48))
    blocks = blocks_at([37], 4, lengths=(48,), supervised=turn)
    assert as_places(blocks.supervised_AB) == [[0, 1, 1, 0]]


def test_blocks_that_run_past_the_batch_are_not_clamped_into_weight() -> None:
    blocks = blocks_at([4, 6], 5, lengths=(8,), supervised=(1,) * 8)
    assert as_places(blocks.supervised_AB) == [[0, 1, 1, 1, 0], [0, 1, 0, 0, 0]]
    assert blocks.index_AB.tolist() == [[4, 5, 6, 7, 7], [6, 7, 7, 7, 7]]


def test_unfilled_places_supervise_nothing() -> None:
    unfilled = Anchors(index_A=torch.tensor([0, 0]), valid_A=torch.tensor([True, False]))
    layout = document_layout(torch.tensor([8]), 8)
    blocks = make_blocks(unfilled, layout, torch.arange(8), torch.ones(8, dtype=torch.bool), 3, MASK_ID)
    assert as_places(blocks.supervised_AB) == [[0, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("block_size", [2, 3, 8])
def test_A28_A29_labels_with_weight_are_the_supervised_tokens_after_a_supervised_one(block_size: int) -> None:
    """The first token of each span is known when the span is drafted: it serves as anchor and never as label."""
    spans = (0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0)  # documents of 10 and 6, 2 of padding
    anchors = chosen(16, lengths=(10, 6), supervised=spans, uniforms=None)
    filled = anchors.index_A[anchors.valid_A].tolist()
    blocks = blocks_at(filled, block_size, lengths=(10, 6), supervised=spans)
    labels = set(blocks.index_AB[blocks.supervised_AB].tolist())
    assert labels == {2, 3, 7, 11, 12, 15}
