"""The teacher-forced estimate of tau: what the draft-verify loop would do on answers whose features are at hand.

It walks as the loop does: start at the answer's first token, move on by accepted + 1, bonus token counted. On greedy
answers of the target it is the loop's own tau; averaging over uniform anchors instead overstates it (by 11-55% on
mixed text, since hard places are visited less than the loop, which stops at each, visits them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError
from draftsmith.evaluate.decode import VerifyStep
from draftsmith.evaluate.drafting import Blocks, DraftContext
from draftsmith.records import Document, FeatureBatch, FrozenEnds

CHUNK_ROWS = 512
"""Block rows drafted at once: bounds the logits [rows, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """tau pooled over documents, and beside it, under its own name, the figure that uniform anchors give."""

    steps: tuple[VerifyStep, ...]
    uniform_anchor_tau: float

    @property
    def tau(self) -> float:
        return sum(step.committed for step in self.steps) / len(self.steps) if self.steps else 0.0


@torch.no_grad()
def accepted_everywhere(
    drafter: Drafter, ends: FrozenEnds, document: Document, features_TFH: Tensor, span: tuple[int, int], cut: bool
) -> Tensor:
    """How many drafts match the document's own tokens, for a block at each anchor of `span` but its last (int64).

    `cut` says that a length limit ended the answer: the loop's last blocks are then narrower. Where the answer ended
    by itself blocks stay whole, though places past its end have nothing to match.
    """
    start, end = span
    size = drafter.config.block_size
    context = DraftContext.start(drafter, ends)
    context.extend(features_TFH[:end])
    token_ids_T = document.token_ids.to(context.device)
    found: list[Tensor] = []
    step = max(1, CHUNK_ROWS // size)
    for low in range(start, end - 1, step):
        anchors_A = torch.arange(low, min(low + step, end - 1), device=context.device)
        widths_A = (end - anchors_A).clamp(max=size) if cut else torch.full_like(anchors_A, size)
        blocks = Blocks(
            rows_A=torch.zeros_like(anchors_A),
            tokens_A=token_ids_T[anchors_A],
            anchors_A=anchors_A,
            widths_A=widths_A,
            size=size,
        )
        hidden = context.hidden(blocks)[:, 1:]
        drafts = context.logits(hidden.reshape(-1, hidden.shape[-1])).argmax(-1).view(len(anchors_A), size - 1)
        index = anchors_A[:, None] + torch.arange(1, size, device=context.device)
        right = (drafts.to(context.device) == token_ids_T[index.clamp(max=end - 1)]) & (index < end)
        found.append(right.int().cumprod(1).sum(1))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def walk(accepted: Sequence[int], block_size: int) -> list[VerifyStep]:
    """The loop's steps over an answer of `len(accepted) + 1` tokens, `accepted[i]` drafts holding at its i-th token."""
    steps: list[VerifyStep] = []
    place, last = 0, len(accepted)
    while place < last:
        committed = min(accepted[place] + 1, last - place)
        drafted = min(block_size - 1, last - place)
        steps.append(VerifyStep(drafted=drafted, accepted=accepted[place], committed=committed))
        place += committed
    return steps


def estimate_tau(drafter: Drafter, ends: FrozenEnds, batch: FeatureBatch, stop_ids: Sequence[int] = ()) -> Estimate:
    """Walk every document of a FeatureBatch over its supervised spans.

    Args:
        drafter, ends: as they decode, on one device with the batch or not.
        batch: captured features; each contiguous supervised span of a document is one answer.
        stop_ids: ends of answer. An answer that doesn't close with one was cut by a length limit.

    Raises:
        ConfigError: no supervised span of two tokens or more.
    """
    steps: list[VerifyStep] = []
    everywhere: list[int] = []
    low = 0
    for length in (int(value) for value in batch.lengths_D.cpu() if value > 0):
        rows = slice(low, low + length)
        document = Document(token_ids=batch.token_ids_T[rows].cpu(), loss_mask=batch.loss_mask_T[rows].cpu())
        for span in spans(document.loss_mask):
            cut = int(document.token_ids[span[1] - 1]) not in stop_ids
            accepted = accepted_everywhere(drafter, ends, document, batch.features_TFH[rows], span, cut)
            counts = [int(count) for count in accepted]
            steps += walk(counts, drafter.config.block_size)
            everywhere += counts
        low += length
    if not everywhere:
        raise ConfigError("no answer of two tokens or more to estimate tau on: give conversations with answers")
    return Estimate(steps=tuple(steps), uniform_anchor_tau=sum(everywhere) / len(everywhere) + 1)


def spans(loss_mask: Tensor) -> list[tuple[int, int]]:
    """[start, end) of each run of supervised tokens."""
    found: list[tuple[int, int]] = []
    start = -1
    for place, supervised in enumerate([*(bool(value) for value in loss_mask), False]):
        if supervised and start < 0:
            start = place
        elif not supervised and start >= 0:
            found.append((start, place))
            start = -1
    return found
