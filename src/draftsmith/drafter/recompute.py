"""torch's non-reentrant checkpointing behind a typed seam (reentrant checkpointing traces a second time)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """`function(*arguments)`, whose inner activations are made again in backward instead of being kept."""
    return cast(Tensor, checkpoint(function, *arguments, use_reentrant=False))
