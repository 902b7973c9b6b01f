"""Random anchors, and the blocks of labels and inputs that hang on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.drafter.layout import DocumentLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """A anchors in rising order: packed index and whether the place was filled (unfilled ones stand last, index 0)."""

    index_A: Tensor
    valid_A: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What the drafter reads and is asked for, block after block.

    `input_ids_Q`: the anchor's token, then mask tokens. `positions_Q`: a + k within the document. `labels_Q`: token
    a + k. `supervised_AB`: whether place k counts: true from place 1 up to the first unsupervised token. `index_AB`:
    packed index of a + k, clamped into the batch (where clamped, never supervised).
    """

    input_ids_Q: Tensor
    positions_Q: Tensor
    labels_Q: Tensor
    supervised_AB: Tensor
    index_AB: Tensor


def draw_uniforms(seed: int, batch: int, draw: int, num_tokens: int) -> Tensor:
    """One uniform a token, float64 on the CPU, from a generator seeded by (seed, batch number, draw).

    Made outside the graph and copied in, so that capture, resume, tests and any number of drafters replay the same
    anchors. Doubles, since among 49,152 floats some would tie and devices break ties differently.
    """
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + batch) * 1_009 + draw) % 2**63)
    return torch.rand(num_tokens, generator=generator, dtype=torch.float64)


def select_anchors(loss_mask_T: Tensor, document_ids_T: Tensor, uniforms_T: Tensor, num_anchors: int) -> Anchors:
    """Choose `num_anchors` tokens at random among those supervised whose next token is supervised too.

    Both must lie in the same document: the anchor is known, so a block whose first guess has no label teaches nothing.
    Fixed shape: scores are the uniforms where eligible and -1 elsewhere, `topk` takes the best, and sorting makes the
    block mask mostly full tiles. Where fewer tokens are eligible than asked for, the rest of the places is unfilled.
    """
    supervised_T = loss_mask_T & (document_ids_T >= 0)
    next_supervised_T = F.pad(supervised_T[1:], (0, 1), value=False)
    next_document_T = F.pad(document_ids_T[1:], (0, 1), value=-1)
    eligible_T = supervised_T & next_supervised_T & (next_document_T == document_ids_T)
    score_A, index_A = torch.topk(torch.where(eligible_T, uniforms_T, -1.0), num_anchors)
    num_tokens = loss_mask_T.numel()
    # Unfilled places sort behind every token; their index then reads token 0, which nothing weighs.
    index_A = torch.where(score_A >= 0, index_A, num_tokens).sort().values
    valid_A = index_A < num_tokens
    return Anchors(index_A=torch.where(valid_A, index_A, 0), valid_A=valid_A)


def make_blocks(
    anchors: Anchors, layout: DocumentLayout, token_ids_T: Tensor, loss_mask_T: Tensor, block_size: int, mask_id: int
) -> Blocks:
    """Inputs, positions, labels and supervision of the block at each anchor.

    Place k predicts token a + k; place 0 is the anchor itself and is never supervised (the convention that engines
    serve). A label past the batch, past the document or behind an unsupervised token counts for nothing: it is not
    clamped into weight.
    """
    num_tokens = token_ids_T.numel()
    place_B = torch.arange(block_size, device=token_ids_T.device)
    unclamped_AB = anchors.index_A[:, None] + place_B
    index_AB = unclamped_AB.clamp(max=num_tokens - 1)
    same_document_AB = layout.document_ids_T[index_AB] == layout.document_ids_T[anchors.index_A][:, None]
    counts_AB = (unclamped_AB < num_tokens) & same_document_AB & loss_mask_T[index_AB] & anchors.valid_A[:, None]
    unbroken_AB = counts_AB.to(torch.int32).cumprod(1).bool()
    is_first_B = place_B == 0
    return Blocks(
        input_ids_Q=torch.where(is_first_B, token_ids_T[anchors.index_A][:, None], mask_id).reshape(-1),
        positions_Q=(layout.positions_T[anchors.index_A][:, None] + place_B).reshape(-1),
        labels_Q=token_ids_T[index_AB].reshape(-1),
        supervised_AB=unbroken_AB & ~is_first_B,
        index_AB=index_AB,
    )
