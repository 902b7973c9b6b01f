"""How likely the target finds each token of a document, and how sure it was there: what the off-policy alarm reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.records import Document
from draftsmith.target.anatomy import logits_of
from draftsmith.target.model import Target

CHUNK_ROWS = 256
"""Tokens whose logits exist at a time: 250 MB of fp32 at a vocabulary of 248,320."""


@torch.no_grad()
def score_documents(target: Target, documents: Sequence[Document]) -> list[tuple[Tensor, Tensor]]:
    """Score documents in one right-padded forward.

    Returns:
        Per document of n tokens: negative log-likelihood [n] of each token given those before it, and entropy [n] of
        the distribution that it was drawn from, in nats, fp32 on the CPU; place 0, which nothing precedes, holds 0.
    """
    longest = max(document.length for document in documents)
    ids = torch.zeros(len(documents), longest, dtype=torch.int64)
    for row, document in enumerate(documents):
        ids[row, : document.length] = document.token_ids
    # Padding on the right reaches no earlier token, in linear attention neither: no mask is needed.
    backbone: Any = target.anatomy.backbone
    hidden: Tensor = backbone(input_ids=ids.to(target.device), use_cache=False).last_hidden_state
    scored: list[tuple[Tensor, Tensor]] = []
    for row, document in enumerate(documents):
        nll, entropy = torch.zeros(document.length), torch.zeros(document.length)
        for low in range(0, document.length - 1, CHUNK_ROWS):
            high = min(low + CHUNK_ROWS, document.length - 1)
            log_probs = logits_of(target.ends(), hidden[row, low:high]).log_softmax(-1)
            labels = ids[row, low + 1 : high + 1, None].to(log_probs.device)
            nll[low + 1 : high + 1] = -log_probs.gather(1, labels)[:, 0].cpu()
            entropy[low + 1 : high + 1] = -(log_probs.exp() * log_probs).sum(-1).cpu()
        scored.append((nll, entropy))
    return scored
