"""Where documents lie in a packed batch: ids, starts and positions from lengths alone, in one fixed shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLayout:
    """Per packed token: its document (-1 on padding), that document's first index, and the position in it."""

    document_ids_T: Tensor
    starts_T: Tensor
    positions_T: Tensor


def document_layout(lengths_D: Tensor, num_tokens: int) -> DocumentLayout:
    """Lay out documents of `lengths_D` (int64, zero-padded) over `num_tokens` places; what is left over is padding.

    Lengths become ids by a cumulative sum and a comparison: shapes never depend on values, so a captured graph can
    replay it for any batch. [1024, 2048, 512] over 49,152 places gives 1024 zeros, 2048 ones, 512 twos and 45,568
    times -1. Lengths of 0 take no place.
    """
    ends_D = lengths_D.cumsum(0)
    place_T = torch.arange(num_tokens, device=lengths_D.device)
    # The document of a place is the first one that ends after it.
    document_T = torch.searchsorted(ends_D, place_T, right=True)
    is_token_T = place_T < ends_D[-1]
    start_T = (ends_D - lengths_D)[document_T.clamp(max=lengths_D.numel() - 1)]
    return DocumentLayout(
        document_ids_T=torch.where(is_token_T, document_T, -1),
        starts_T=torch.where(is_token_T, start_T, 0),
        positions_T=torch.where(is_token_T, place_T - start_T, 0),
    )
