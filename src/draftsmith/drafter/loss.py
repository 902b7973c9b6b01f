"""The frozen head's loss, chunk by chunk: no tensor of [Q, V] ever exists.

Chunks hold whole blocks and their number is fixed by the shape. `fused` exploits that the head never trains: each chunk
computes logits, loss and dL/dhidden at once in forward (two matrix products, nothing recomputed); `recompute` is the
plain loop under non-reentrant checkpointing. Both return numerators and denominators; the step divides once, by the
sum over draws, micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.drafter.objectives import LossConfig, place_weights, row_gradient, row_loss
from draftsmith.drafter.recompute import recomputed
from draftsmith.records import FrozenEnds

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Rows, weights [out, in], bias -> rows times weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """The objective with everything resolved."""

    config: LossConfig
    gamma: float
    block_size: int

    @property
    def chunk_blocks(self) -> int:
        """Blocks a chunk: as many as `chunk_rows` holds whole, at least one; B - 1 rows of each are guessed."""
        return max(1, self.config.chunk_rows // self.block_size)


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over one draw, fp32 on the device, added up over a step and divided once.

    A tensor `vector` of `4 + 3 B`: numerator · denominator · cross entropy · labels · then per place of a block the
    labels, the right guesses, and the guesses right with every earlier one right (survival).
    """

    vector: Tensor

    @classmethod
    def num_sums(cls, block_size: int) -> int:
        return 4 + 3 * block_size

    @property
    def numerator(self) -> Tensor:
        return self.vector[0]

    @property
    def denominator(self) -> Tensor:
        return self.vector[1]


def head_logits(hidden: Tensor, ends: FrozenEnds, product: Product = F.linear) -> Tensor:
    """The target's own head on hidden states [rows, H]: fp32 [rows, V], its bias, scale and soft cap included."""
    logits = product(hidden, ends.head_VH, ends.head_bias_V).to(torch.float32)
    if ends.logit_scale != 1.0:
        logits = logits * ends.logit_scale
    if ends.soft_cap is not None:
        logits = torch.tanh(logits / ends.soft_cap) * ends.soft_cap
    return logits


def chunk_sums(spec: LossSpec, loss: Tensor, ce: Tensor, right: Tensor, guessed_AG: Tensor) -> tuple[Tensor, Tensor]:
    """The sums vector of a chunk, and its row weights [rows]."""
    by_block = (-1, spec.block_size - 1)
    weights_AG, denominator = place_weights(spec.config, spec.gamma, guessed_AG, ce.view(by_block))
    weights = weights_AG.reshape(-1)
    right_AG = right.view(by_block) & guessed_AG
    survived_AG = right_AG.to(torch.int32).cumprod(1).bool()
    counts = guessed_AG.to(torch.float32)
    head = torch.stack([(loss * weights).sum(), denominator, (ce * counts.reshape(-1)).sum(), counts.sum()])
    places = torch.stack([counts.sum(0), right_AG.to(torch.float32).sum(0), survived_AG.to(torch.float32).sum(0)])
    return torch.cat([head, F.pad(places, (1, 0)).reshape(-1)]), weights  # place 0 counts nothing


def fused_chunk(
    spec: LossSpec,
    ends: FrozenEnds,
    hidden: Tensor,
    labels: Tensor,
    guessed_AG: Tensor,
    teacher_hidden: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Sums of one chunk and d(numerator)/d(hidden) [rows, H], without autograd."""
    kind = spec.config.loss
    logits = head_logits(hidden, ends)
    teacher = head_logits(teacher_hidden, ends) if teacher_hidden is not None else None
    loss, ce = row_loss(kind, logits, labels, teacher)
    vector, weights = chunk_sums(spec, loss, ce, logits.argmax(-1) == labels, guessed_AG)
    gradient = row_gradient(kind, logits, labels, teacher) * weights[:, None]
    if ends.soft_cap is not None:
        gradient = gradient * (1.0 - (logits / ends.soft_cap).square())
    if ends.logit_scale != 1.0:
        gradient = gradient * ends.logit_scale
    return vector, gradient.to(hidden.dtype) @ ends.head_VH


ChunkFunction = Callable[[LossSpec, FrozenEnds, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class _FusedLoss(torch.autograd.Function):
    """Sums in forward together with the gradient of the numerator, which backward only scales."""

    @staticmethod
    def forward(ctx: Any, hidden_GH: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        gradient_GH = torch.empty_like(hidden_GH)
        vector = run(hidden_GH.detach(), gradient_GH)  # a chunk with a history would warn when it is compiled
        ctx.save_for_backward(gradient_GH)
        return vector

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_GH,) = ctx.saved_tensors
        # Only the numerator (place 0) is ever differentiated; the other sums are statistics.
        return gradient_GH * gradients[0][0].to(gradient_GH.dtype), None


def chunked_loss(
    spec: LossSpec,
    ends: FrozenEnds,
    hidden_GH: Tensor,
    labels_G: Tensor,
    guessed_AG: Tensor,
    teacher_GH: Tensor | None,
    chunk: ChunkFunction = fused_chunk,
) -> LossSums:
    """Loss sums of all blocks.

    Args:
        spec: the resolved objective.
        ends: the target's head.
        hidden_GH: the drafter's output at places 1 to B - 1; gradients flow into it from `numerator` alone.
        labels_G: token at each of these places.
        guessed_AG: which of them count [A, B - 1].
        teacher_GH: the target's last hidden state at a + k - 1, for distilled kinds.
        chunk: `fused_chunk`, compiled or not.

    Returns:
        Sums over all places, on the device.
    """
    wide, num_blocks = spec.block_size - 1, guessed_AG.shape[0]
    starts = range(0, num_blocks, spec.chunk_blocks)
    bounds = [(low * wide, min(low + spec.chunk_blocks, num_blocks) * wide) for low in starts]

    def piece(low: int, high: int) -> tuple[Tensor, Tensor, Tensor | None]:
        blocks = guessed_AG[low // wide : high // wide]
        return labels_G[low:high], blocks, None if teacher_GH is None else teacher_GH[low:high]

    def run(hidden: Tensor, gradient: Tensor) -> Tensor:
        vector = torch.zeros(LossSums.num_sums(spec.block_size), dtype=torch.float32, device=hidden.device)
        for low, high in bounds:
            sums, gradient_CH = chunk(spec, ends, hidden[low:high], *piece(low, high))
            vector = vector + sums
            gradient[low:high] = gradient_CH
        return vector

    if spec.config.loss_method == "fused":
        return LossSums(_apply_fused(hidden_GH, run))

    def plain(hidden: Tensor, labels: Tensor, blocks: Tensor, teacher_hidden: Tensor | None) -> Tensor:
        logits = head_logits(hidden, ends)
        teacher = head_logits(teacher_hidden, ends) if teacher_hidden is not None else None
        loss, ce = row_loss(spec.config.loss, logits, labels, teacher)
        return chunk_sums(spec, loss, ce, logits.argmax(-1) == labels, blocks)[0]

    vector = torch.zeros(LossSums.num_sums(spec.block_size), dtype=torch.float32, device=hidden_GH.device)
    for low, high in bounds:
        vector = vector + recomputed(plain, hidden_GH[low:high], *piece(low, high))
    return LossSums(vector)


def _apply_fused(hidden_GH: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return cast(Tensor, _FusedLoss.apply(hidden_GH, run))
