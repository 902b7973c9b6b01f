"""One visibility rule in four forms, equal element by element on random layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from draftsmith.drafter.anchors import Anchors, draw_uniforms, select_anchors
from draftsmith.drafter.layout import DocumentLayout, document_layout
from draftsmith.drafter.mask import (
    TILE,
    MaskShape,
    Ranges,
    block_mask,
    context_ranges,
    dense_mask,
    range_mask_mod,
    visible_by_document,
)

# Rows per anchor -> (block size, group): what must not divide the 128 rows of a tile, and what does.
SIZES = {8: (8, 1), 24: (8, 3), 40: (10, 4), 48: (16, 3), 64: (16, 4), 112: (16, 7), 256: (32, 8)}
ANCHORS = 64  # times every block size above: whole tiles


@dataclass(frozen=True, slots=True)
class Case:
    """A packed layout with anchors drawn on it."""

    layout: DocumentLayout
    anchors: Anchors
    shape: MaskShape

    @property
    def ranges(self) -> Ranges:
        return context_ranges(self.anchors, self.layout)


def make_case(lengths: list[int], supervised: float, shape: MaskShape, seed: int = 0) -> Case:
    """`supervised` is the share of supervised tokens; padding is left out of the mask by `select_anchors`."""
    layout = document_layout(torch.tensor(lengths), shape.num_tokens)
    generator = torch.Generator().manual_seed(seed)
    mask_T = torch.rand(shape.num_tokens, generator=generator) < supervised
    uniforms_T = draw_uniforms(seed, 0, 0, shape.num_tokens)
    return Case(layout, select_anchors(mask_T, layout.document_ids_T, uniforms_T, shape.num_anchors), shape)


def shape_of(rows: int, window: int | None, num_tokens: int = 512, num_anchors: int = ANCHORS) -> MaskShape:
    block_size, group = SIZES[rows]
    return MaskShape(num_tokens=num_tokens, num_anchors=num_anchors, block_size=block_size, group=group, window=window)


def by_loop(case: Case) -> Tensor:
    """The rule in plain Python, one element at a time."""
    shape, anchors = case.shape, case.anchors
    T, B = shape.num_tokens, shape.block_size
    ids = case.layout.document_ids_T.tolist()
    visible = torch.zeros(shape.num_anchors * B, T + shape.num_anchors * B, dtype=torch.bool)
    for j, (a, valid) in enumerate(zip(anchors.index_A.tolist(), anchors.valid_A.tolist(), strict=True)):
        for k in range(B):
            oldest = -1 if shape.window is None else a + k - (shape.window - 1)
            for p in range(a if valid else 0):
                visible[j * B + k, p] = ids[p] == ids[a] and p >= oldest
            for other in range(B):
                visible[j * B + k, T + j * B + other] = shape.window is None or other <= k
    return visible


def folded(visible_QK: Tensor, group: int) -> Tensor:
    """Each query place repeated for the heads that share its keys, as flex attention sees the rows."""
    return visible_QK.repeat_interleave(group, dim=0)


def tile_ids(counts: Tensor, indices: Tensor, num_columns: int) -> Tensor:
    """Bool [row tiles, column tiles] of what a BlockMask lists."""
    listed = torch.zeros(indices.shape[2], num_columns, dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        columns = indices[0, 0, row, :count].tolist()
        assert len(set(columns)) == count
        listed[row, columns] = True
    return listed


def tiles_of(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Which tiles are listed in part, and which whole."""
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    columns = mask.kv_indices.shape[-1]
    partial = tile_ids(mask.kv_num_blocks, mask.kv_indices, columns)
    return partial, tile_ids(mask.full_kv_num_blocks, mask.full_kv_indices, columns)


def elements(tiles: Tensor) -> Tensor:
    return tiles.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)


def expanded(mask: BlockMask) -> Tensor:
    """What attention computes with: whole tiles, and partial ones under the `mask_mod`."""
    partial, whole = tiles_of(mask)
    assert not (partial & whole).any()
    rows, keys = mask.seq_lengths
    zero = torch.zeros((), dtype=torch.int64)
    allowed = mask.mask_mod(zero, zero, torch.arange(rows)[:, None], torch.arange(keys)[None])
    return elements(whole) | (elements(partial) & allowed)


def check_all_forms(case: Case) -> None:
    reference = visible_by_document(case.anchors, case.layout, case.shape)
    flat = replace(case.shape, group=1)
    assert torch.equal(dense_mask(case.ranges, flat), reference)
    rows = folded(reference, case.shape.group)
    assert torch.equal(dense_mask(case.ranges, case.shape), rows)
    mask = block_mask(case.ranges, case.shape)
    assert torch.equal(expanded(mask), rows)
    _, whole = tiles_of(mask)
    assert bool(rows[elements(whole)].all())
    assert bool(rows.any(1).all()), "a row with nothing to see turns into NaN"


@pytest.mark.parametrize("window", [None, 8, 11])
def test_the_reference_equals_the_rule_in_plain_python(window: int | None) -> None:
    shape = MaskShape(num_tokens=128, num_anchors=16, block_size=8, group=1, window=window)
    for lengths, supervised in (([50, 30, 20], 0.9), ([128], 1.0), ([1, 2, 100], 1.0), ([20], 0.3), ([0], 1.0)):
        case = make_case(lengths, supervised, shape)
        assert torch.equal(visible_by_document(case.anchors, case.layout, shape), by_loop(case))


@pytest.mark.parametrize("window", [None, 40, 150])
@pytest.mark.parametrize("rows", SIZES)
def test_all_forms_agree_for_each_number_of_rows_per_anchor(rows: int, window: int | None) -> None:
    check_all_forms(make_case([200, 30, 1, 150, 90], 0.9, shape_of(rows, window)))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([8, 24, 40, 48]),
    window=st.sampled_from([None, 16, 17, 130, 300]),
    lengths=st.lists(st.integers(1, 250), min_size=1, max_size=6),
    supervised=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_all_forms_agree_on_random_layouts(
    rows: int, window: int | None, lengths: list[int], supervised: float, seed: int
) -> None:
    while sum(lengths) > 512:
        lengths = lengths[1:]
    check_all_forms(make_case(lengths, supervised, shape_of(rows, window, num_anchors=16 if rows != 40 else 64), seed))


@pytest.mark.parametrize("lengths", [[512], [511, 1], [1] * 8, [0]], ids=["full", "full of two", "ones", "empty"])
@pytest.mark.parametrize("rows", [24, 64])
@pytest.mark.parametrize("window", [None, 32])
def test_all_forms_agree_at_the_edges(lengths: list[int], rows: int, window: int | None) -> None:
    check_all_forms(make_case(lengths, 1.0, shape_of(rows, window)))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rows", [24, 64, 256])
def test_block_mask_equals_torch_create_block_mask(rows: int, window: int | None) -> None:
    """Evaluated element by element; on full layers the listed tiles are the very same, too."""
    case = make_case([290, 100, 1, 60], 0.9, shape_of(rows, window))
    ours = block_mask(case.ranges, case.shape)
    q_len, kv_len = ours.seq_lengths
    theirs = create_block_mask(
        range_mask_mod(case.ranges, case.shape), None, None, q_len, kv_len, device="cpu", BLOCK_SIZE=TILE
    )
    assert torch.equal(expanded(ours), expanded(theirs))
    if window is None:
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        assert torch.equal(tiles_of(ours)[1], tiles_of(theirs)[1])


def test_context_ends_right_before_the_anchor() -> None:
    """The target has not read the anchor yet when it drafts."""
    shape = MaskShape(num_tokens=128, num_anchors=16, block_size=8, group=1, window=None)
    layout = document_layout(torch.tensor([40, 60]), 128)
    placed = Anchors(index_A=torch.full((16,), 45), valid_A=torch.ones(16, dtype=torch.bool))
    seen = [int(i) for i in visible_by_document(placed, layout, shape)[0, :128].nonzero()]
    assert seen == [40, 41, 42, 43, 44]
    assert [int(i) for i in dense_mask(context_ranges(placed, layout), shape)[0, :128].nonzero()] == seen


def test_C16_each_place_of_a_sliding_layer_sees_exactly_its_window() -> None:
    shape = MaskShape(num_tokens=256, num_anchors=16, block_size=8, group=1, window=10)
    layout = document_layout(torch.tensor([200]), 256)
    placed = Anchors(index_A=torch.full((16,), 150), valid_A=torch.ones(16, dtype=torch.bool))
    visible = dense_mask(context_ranges(placed, layout), shape)
    for k in range(8):
        positions = [int(i) for i in visible[k, :256].nonzero()]
        positions += [150 + int(i) for i in visible[k, 256 : 256 + 8].nonzero()]
        # The anchor at 150 stands in its block, not in the context: W places that end with the query's own.
        assert positions == list(range(150 + k - 9, 150 + k + 1))


def test_C11_C22_unfilled_anchors_keep_their_own_block_and_nothing_else() -> None:
    case = make_case([30], 0.0, shape_of(24, None))
    assert not case.anchors.valid_A.any()
    visible = visible_by_document(case.anchors, case.layout, case.shape)
    assert not visible[:, : case.shape.num_tokens].any()
    assert torch.equal(visible[:, case.shape.num_tokens :], torch.block_diag(*[torch.ones(8, 8)] * ANCHORS).bool())
    partial, whole = tiles_of(block_mask(case.ranges, case.shape))
    assert not whole.any()
    assert not partial[:, : case.shape.num_tokens // TILE].any(), "an empty range lists no tile of the context"


def test_unfilled_anchors_see_no_padding_wherever_they_are_parked() -> None:
    """Padding has id -1, as has an unfilled anchor: equal ids alone would show it the padding before it."""
    shape = MaskShape(num_tokens=128, num_anchors=16, block_size=8, group=1, window=None)
    layout = document_layout(torch.tensor([40]), 128)
    parked = Anchors(index_A=torch.full((16,), 127), valid_A=torch.zeros(16, dtype=torch.bool))
    assert not visible_by_document(parked, layout, shape)[:, :128].any()
    assert not dense_mask(context_ranges(parked, layout), shape)[:, :128].any()


def test_sorted_anchors_of_a_long_document_make_mostly_whole_tiles() -> None:
    """What sorting is for: unsorted, a tile holds anchors from everywhere and nearly all its tiles are partial."""
    shape = replace(shape_of(64, None, num_tokens=4096), num_anchors=256)
    case = make_case([4096], 1.0, shape)
    partial, whole = tiles_of(block_mask(case.ranges, shape))
    context = slice(0, 4096 // TILE)
    share = whole[:, context].sum() / (whole[:, context].sum() + partial[:, context].sum())
    assert share > 0.85
