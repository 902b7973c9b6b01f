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
    def chunk_rows(self) -> int:
        """Rows a chunk: whole blocks, at least one."""
        return max(1, self.config.chunk_rows // self.block_size) * self.block_size


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


def head_logits(hidden: Tensor, ends: FrozenEnds, product: Product = torch.nn.functional.linear) -> Tensor:
    """The target's own head on hidden states [rows, H]: fp32 [rows, V], its bias, scale and soft cap included."""
    logits = product(hidden, ends.head_VH, ends.head_bias_V).to(torch.float32)
    if ends.logit_scale != 1.0:
        logits = logits * ends.logit_scale
    if ends.soft_cap is not None:
        logits = torch.tanh(logits / ends.soft_cap) * ends.soft_cap
    return logits


def _sums(spec: LossSpec, loss: Tensor, ce: Tensor, right: Tensor, supervised_AB: Tensor) -> tuple[Tensor, Tensor]:
    """The sums vector of a chunk, and its row weights [rows]."""
    by_block = (-1, spec.block_size)
    weights_AB, denominator = place_weights(spec.config, spec.gamma, supervised_AB, ce.view(by_block))
    weights = weights_AB.reshape(-1)
    right_AB = right.view(by_block) & supervised_AB
    is_first = torch.arange(spec.block_size, device=ce.device) == 0
    survived_AB = (right_AB | is_first).to(torch.int32).cumprod(1).bool() & supervised_AB
    counts = supervised_AB.to(torch.float32)
    head = torch.stack([(loss * weights).sum(), denominator, (ce * counts.reshape(-1)).sum(), counts.sum()])
    places = [counts.sum(0), right_AB.to(torch.float32).sum(0), survived_AB.to(torch.float32).sum(0)]
    return torch.cat([head, *places]), weights


def fused_chunk(
    spec: LossSpec,
    ends: FrozenEnds,
    hidden: Tensor,
    labels: Tensor,
    supervised_AB: Tensor,
    teacher_hidden: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Sums of one chunk and d(numerator)/d(hidden) [rows, H], without autograd."""
    kind = spec.config.loss
    logits = head_logits(hidden, ends)
    teacher = head_logits(teacher_hidden, ends) if teacher_hidden is not None else None
    loss, ce = row_loss(kind, logits, labels, teacher)
    vector, weights = _sums(spec, loss, ce, logits.argmax(-1) == labels, supervised_AB)
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
    def forward(ctx: Any, hidden_QH: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        gradient_QH = torch.empty_like(hidden_QH)
        vector = run(hidden_QH.detach(), gradient_QH)  # a chunk with a history would warn when it is compiled
        ctx.save_for_backward(gradient_QH)
        return vector

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_QH,) = ctx.saved_tensors
        # Only the numerator (place 0) is ever differentiated; the other sums are statistics.
        return gradient_QH * gradients[0][0].to(gradient_QH.dtype), None


def chunked_loss(
    spec: LossSpec,
    ends: FrozenEnds,
    hidden_QH: Tensor,
    labels_Q: Tensor,
    supervised_AB: Tensor,
    teacher_QH: Tensor | None,
    chunk: ChunkFunction = fused_chunk,
) -> LossSums:
    """Loss sums of all blocks.

    Args:
        spec: the resolved objective.
        ends: the target's head.
        hidden_QH: the drafter's output; gradients flow into it from `numerator` alone.
        labels_Q: token at each place.
        supervised_AB: which places count.
        teacher_QH: the target's last hidden state at a + k - 1, for distilled kinds.
        chunk: `fused_chunk`, compiled or not.

    Returns:
        Sums over all places, on the device.
    """
    step = spec.chunk_rows
    bounds = [(low, min(low + step, hidden_QH.shape[0])) for low in range(0, hidden_QH.shape[0], step)]

    def piece(low: int, high: int) -> tuple[Tensor, Tensor, Tensor | None]:
        blocks = supervised_AB[low // spec.block_size : high // spec.block_size]
        return labels_Q[low:high], blocks, None if teacher_QH is None else teacher_QH[low:high]

    def run(hidden: Tensor, gradient: Tensor) -> Tensor:
        vector = torch.zeros(LossSums.num_sums(spec.block_size), dtype=torch.float32, device=hidden.device)
        for low, high in bounds:
            sums, gradient_CH = chunk(spec, ends, hidden[low:high], *piece(low, high))
            vector = vector + sums
            gradient[low:high] = gradient_CH
        return vector

    if spec.config.loss_method == "fused":
        return LossSums(_apply_fused(hidden_QH, run))

    def plain(hidden: Tensor, labels: Tensor, blocks: Tensor, teacher_hidden: Tensor | None) -> Tensor:
        logits = head_logits(hidden, ends)
        teacher = head_logits(teacher_hidden, ends) if teacher_hidden is not None else None
        loss, ce = row_loss(spec.config.loss, logits, labels, teacher)
        return _sums(spec, loss, ce, logits.argmax(-1) == labels, blocks)[0]

    vector = torch.zeros(LossSums.num_sums(spec.block_size), dtype=torch.float32, device=hidden_QH.device)
    for low, high in bounds:
        vector = vector + recomputed(plain, hidden_QH[low:high], *piece(low, high))
    return LossSums(vector)


def _apply_fused(hidden_QH: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return cast(Tensor, _FusedLoss.apply(hidden_QH, run))
