"""What a block is asked to match, and how much each of its places counts.

Kinds (p: drafter, t: target's distribution at a + k - 1, y: the token at a + k; fp32 throughout, since p - t cancels):

    ce   cross entropy on the target's own text        -log p[y]
    kl   forward divergence                             sum t (log t - log p)
    tv   total variation, one minus the acceptance rate 1 - sum min(p, t)
    lk   lam * kl + (1 - lam) * tv, lam = exp(-3 (1 - tv)) held constant (arXiv 2602.23881)

Weights:

    decay  exp(-(k - 1) / gamma), normalised by their sum (arXiv 2602.06036)
    dpace  D-PACE (arXiv 2605.18810): place k counts as much as the survival of the places from k on depends on it;
           normalised by the number of supervised labels
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.errors import ConfigError

LossKind = Literal["ce", "kl", "tv", "lk"]
PlaceWeights = Literal["decay", "dpace"]

GAMMA_BY_BLOCK = ((8, 4.0), (10, 5.0), (16, 7.0))
"""The paper's decay constants; other block sizes interpolate, or continue the nearest line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The objective. Resuming a run with another one is refused unless asked for."""

    loss: LossKind = "ce"
    """What a place is to match: the text (ce), or the distribution of the target (kl, tv, lk)."""
    weights: PlaceWeights = "dpace"
    """How places in a block count: decay (exp(-(k-1)/gamma)) or dpace (by what the acceptance depends on)."""
    gamma: float | Literal["auto"] = "auto"
    """Decay constant; auto takes 4, 5, 7 for blocks of 8, 10, 16 and interpolates."""
    dpace_alpha: float = 0.5
    """D-PACE's smoothing of the drafter's own confidence, between 0 and 1."""
    loss_method: Literal["fused", "recompute"] = "fused"
    """fused computes gradients in forward; recompute runs the head again in backward (the plain reference)."""
    chunk_rows: int = 2048
    """Rows of logits that exist at a time."""

    def __post_init__(self) -> None:
        if self.gamma != "auto" and self.gamma <= 0:
            raise ConfigError(f"--gamma {self.gamma} is not above 0; leave it out to derive it from the block size")
        if not 0.0 <= self.dpace_alpha <= 1.0:
            raise ConfigError(f"--dpace-alpha {self.dpace_alpha} is not between 0 and 1")
        if self.chunk_rows < 1:
            raise ConfigError(f"--chunk-rows {self.chunk_rows} is not above 0")

    @property
    def distilled(self) -> bool:
        """Whether the loss reads the target's last hidden states."""
        return self.loss != "ce"


def resolve_gamma(config: LossConfig, block_size: int) -> float:
    """The decay constant in force: the given one, or 7 / 5 / 4 for blocks of 16 / 10 / 8, linear elsewhere."""
    if config.gamma != "auto":
        return float(config.gamma)
    points = GAMMA_BY_BLOCK
    (b0, g0), (b1, g1) = points[:2] if block_size <= points[1][0] else points[1:]
    return max(0.5, g0 + (block_size - b0) * (g1 - g0) / (b1 - b0))


def place_weights(config: LossConfig, gamma: float, guessed_AG: Tensor, ce_AG: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of each guessed place 1 to B - 1 [A, B - 1] fp32, and what the step divides by (0-D); no gradient."""
    counts_AG = guessed_AG.to(torch.float32)
    if config.weights == "decay":
        place_G = torch.arange(1, guessed_AG.shape[1] + 1, device=guessed_AG.device, dtype=torch.float32)
        weights_AG = counts_AG * torch.exp(-(place_G - 1.0) / gamma)
        return weights_AG, weights_AG.sum()
    confidence_AG = torch.exp(-ce_AG.detach().to(torch.float32))
    smoothed_AG = torch.where(guessed_AG, (1 - config.dpace_alpha) * confidence_AG + config.dpace_alpha, 1.0)
    survival_AG = smoothed_AG.cumprod(1) * counts_AG
    weights_AG = survival_AG.flip(1).cumsum(1).flip(1) * counts_AG
    return weights_AG, counts_AG.sum()


def row_loss(kind: LossKind, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
    """Loss and cross entropy of each row, fp32 [rows], differentiable by autograd.

    Args:
        logits: fp32 [rows, V] of the drafter.
        labels: int64 [rows].
        teacher: fp32 [rows, V] logits of the target, None for `ce`.
    """
    log_p = F.log_softmax(logits, dim=-1)
    ce = -log_p.gather(-1, labels[:, None])[:, 0]
    if kind == "ce":
        return ce, ce
    assert teacher is not None, f"{kind} compares with the target's logits"
    log_t = F.log_softmax(teacher, dim=-1)
    t = log_t.exp()
    if kind == "kl":
        return (t * (log_t - log_p)).sum(-1), ce
    tv = 1.0 - torch.minimum(log_p.exp(), t).sum(-1)
    if kind == "tv":
        return tv, ce
    kl = (t * (log_t - log_p)).sum(-1)
    lam = torch.exp(-3.0 * (1.0 - tv.detach()))
    return lam * kl + (1.0 - lam) * tv, ce


def row_gradient(kind: LossKind, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
    """d(row loss) / d(logits), fp32 [rows, V], written out (`row_loss` through autograd is its test)."""
    p = F.softmax(logits, dim=-1)
    if kind == "ce":
        is_label = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
        return p - is_label.to(p.dtype)
    assert teacher is not None, f"{kind} compares with the target's logits"
    t = F.softmax(teacher, dim=-1)
    if kind == "kl":
        return p - t
    lost = torch.where(p < t, -1.0, 0.0)
    tv_gradient = p * (lost - (p * lost).sum(-1, keepdim=True))
    if kind == "tv":
        return tv_gradient
    accepted = torch.minimum(p, t).sum(-1, keepdim=True)
    lam = torch.exp(-3.0 * accepted)
    return lam * (p - t) + (1.0 - lam) * tv_gradient
