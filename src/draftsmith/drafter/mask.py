"""Who sees whom: one visibility rule in four forms that a test proves equal element by element.

Keys are the T packed context tokens, then the Q = A * B block places. A place of block j sees the tokens of its own
document strictly before anchor j (the target has not read the anchor yet when it drafts), and its own block. On
sliding layers it sees only the last W positions, and its own block causally, as engines serve them.

    (i)   document ids       `visible_by_document`   the rule as one would say it: the reference
    (ii)  ranges             `range_mask_mod`        anchor j sees [low_j, high_j): the fast form for flex attention,
                                                     since looking ids up doubles its backward kernel
    (iii) dense boolean      `dense_mask`            CPU and tests
    (iv)  tiles              `block_mask`            flex attention's BlockMask, built from the ranges without
                                                     evaluating Q x (T + Q) elements

An unfilled anchor has an empty range and keeps its own block: a row with nothing to see would turn into NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from draftsmith.drafter.anchors import Anchors
from draftsmith.drafter.layout import DocumentLayout

TILE = 128
"""Rows and columns of a mask tile; flex attention lowers no smaller ones (measured: 64-row tiles fail)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskShape:
    """The fixed sizes behind every mask of a run. `window` is None on full layers."""

    num_tokens: int
    num_anchors: int
    block_size: int
    group: int
    """Query heads per key head, folded into the query rows (1 for the dense form, which keeps heads apart)."""
    window: int | None

    @property
    def rows_per_anchor(self) -> int:
        return self.block_size * self.group


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Anchor j sees the packed tokens [low_A[j], high_A[j]) (int32; both 0 where unfilled); high is the anchor."""

    low_A: Tensor
    high_A: Tensor


def context_ranges(anchors: Anchors, layout: DocumentLayout) -> Ranges:
    """The context each anchor sees, as ranges of packed indices."""
    low_A = torch.where(anchors.valid_A, layout.starts_T[anchors.index_A], 0)
    high_A = torch.where(anchors.valid_A, anchors.index_A, 0)
    return Ranges(low_A=low_A.to(torch.int32), high_A=high_A.to(torch.int32))


def visible_by_document(anchors: Anchors, layout: DocumentLayout, shape: MaskShape) -> Tensor:
    """Form (i), bool [Q, T + Q]: same document, which is not padding, and before the anchor; or the same block."""
    device = anchors.index_A.device
    block_Q = torch.arange(shape.num_anchors, device=device).repeat_interleave(shape.block_size)
    place_Q = torch.arange(shape.block_size, device=device).repeat(shape.num_anchors)
    anchor_Q1 = anchors.index_A[block_Q][:, None]
    token_T = torch.arange(shape.num_tokens, device=device)
    q_doc = torch.where(anchors.valid_A, layout.document_ids_T[anchors.index_A], -1)[block_Q][:, None]
    context = (q_doc == layout.document_ids_T) & (q_doc != -1) & (token_T < anchor_Q1)
    own = block_Q[:, None] == block_Q
    if shape.window is not None:
        context &= token_T >= anchor_Q1 + place_Q[:, None] - (shape.window - 1)
        own &= place_Q <= place_Q[:, None]
    return torch.cat([context, own], dim=1)


def range_mask_mod(ranges: Ranges, shape: MaskShape) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Form (ii): a `mask_mod` for flex attention over query rows with the head group folded in."""
    low_A, high_A = ranges.low_A, ranges.high_A
    num_tokens, block_size, group, window = shape.num_tokens, shape.block_size, shape.group, shape.window
    rows = shape.rows_per_anchor

    def visible(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = q // rows
        in_range = (kv >= low_A[block]) & (kv < high_A[block])
        in_block = (kv - num_tokens) // block_size == block
        if window is not None:
            place = (q % rows) // group
            in_range = in_range & (kv >= high_A[block] + place - (window - 1))
            in_block = in_block & ((kv - num_tokens) % block_size <= place)
        return torch.where(kv < num_tokens, in_range, in_block)

    return visible


def dense_mask(ranges: Ranges, shape: MaskShape) -> Tensor:
    """Form (iii), bool [rows, T + Q]: the ranges evaluated everywhere, for SDPA on the CPU."""
    device = ranges.low_A.device
    zero = torch.zeros((), dtype=torch.int64, device=device)
    q = torch.arange(shape.num_anchors * shape.rows_per_anchor, device=device)[:, None]
    kv = torch.arange(shape.num_tokens + shape.num_anchors * shape.block_size, device=device)[None, :]
    return range_mask_mod(ranges, shape)(zero, zero, q, kv)


def block_mask(ranges: Ranges, shape: MaskShape) -> BlockMask:
    """Form (iv): which 128 x 128 tiles are seen in part or whole, from the ranges alone.

    A tile of query rows touches the anchors floor(128 t / rows) .. floor((128 t + 127) / rows): at most 127 // rows + 2
    of them, gathered with padding, so rows = B x group need not divide 128. A tile is whole only where every row of it
    sees every key; the bounds used for sliding layers are the widest for "seen at all" and the narrowest for "whole".
    """
    device = ranges.low_A.device
    rows, block_size = shape.rows_per_anchor, shape.block_size
    tile_q = torch.arange(shape.num_anchors * rows // TILE, device=device)[:, None] * TILE
    first, last = tile_q // rows, (tile_q + TILE - 1) // rows
    anchor = first + torch.arange((TILE - 1) // rows + 2, device=device)
    touched = anchor <= last
    anchor = anchor.clamp(max=shape.num_anchors - 1)
    low, high = ranges.low_A[anchor], ranges.high_A[anchor]
    widest, narrowest = low, low
    if shape.window is not None:
        widest = torch.maximum(low, high - (shape.window - 1))
        narrowest = torch.maximum(low, high + (block_size - 1) - (shape.window - 1))

    key = torch.arange(shape.num_tokens // TILE, device=device, dtype=torch.int32)[None, None] * TILE
    has_context = touched & (high > low)
    seen = has_context[..., None] & (widest[..., None] < key + TILE) & (high[..., None] > key)
    whole = ((narrowest[..., None] <= key) & (high[..., None] >= key + TILE)) | ~touched[..., None]
    seen, whole = seen.any(1), whole.all(1)

    own_key = torch.arange(shape.num_anchors * block_size // TILE, device=device)[None] * TILE
    own = (own_key // block_size <= last) & ((own_key + TILE - 1) // block_size >= first)
    partial_counts, partial_indices = _ordered(torch.cat([seen & ~whole, own], dim=1))
    whole_counts, whole_indices = _ordered(torch.cat([whole, torch.zeros_like(own)], dim=1))
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_indices,
        whole_counts,
        whole_indices,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=range_mask_mod(ranges, shape),
        seq_lengths=(shape.num_anchors * rows, shape.num_tokens + shape.num_anchors * block_size),
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, q] and indices [1, 1, q, kv] of the set tiles of each row, set ones first and in order."""
    counts = tiles.sum(-1, dtype=torch.int32)
    indices = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]
