"""Products of a few rows on a CPU, with the weights laid out for them once.

One row times a matrix (plain decoding) runs at the speed of memory; for a block of rows the usual product lays the
weights out anew at every call, which takes longer than to read them. oneDNN's products take weights laid out once;
torch's own compiler uses them so. They round a little otherwise, as every order of a sum does.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_ROWS = 64
"""Longer inputs, such as prompts, are faster without."""
USUAL_ROWS = 8
"""The layout suits a block of this many best."""
MEMORY_SHARE = 0.25
"""The second layout of the weights may take this much of the machine's memory."""

_packed: ContextVar[MappingProxyType[int, Tensor]] = ContextVar("_packed", default=MappingProxyType({}))
"""Address of a weight matrix -> the same laid out for blocks of rows."""


def linear(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`inputs @ weight.T + bias`, by packed weights where there are any and 2 to 64 rows come (without gradients)."""
    packed = _packed.get().get(weight_OI.data_ptr())
    num_rows = inputs.numel() // inputs.shape[-1]
    if packed is None or not 1 < num_rows <= MOST_ROWS or torch.is_grad_enabled():
        return F.linear(inputs, weight_OI, bias_O)
    product: Any = torch.ops.mkldnn._linear_pointwise
    return product(inputs, packed, bias_O, "none", [], "")


def is_available() -> bool:
    """Whether this torch has oneDNN and its packed products."""
    try:
        _lay_out(torch.zeros(1, 1))
    except (AttributeError, RuntimeError):  # NotImplementedError is one
        return False
    return torch.backends.mkldnn.is_available()


@contextmanager
def packed_products(*modules: nn.Module) -> Generator[int]:
    """Linear layers in `modules` that compute in fp32 on the CPU multiply blocks of rows by packed weights meanwhile,
    and so does `linear` with their weights, which must not change.

    Yields how many layers it packed: none on other devices, where torch has no such products, or where the second
    layout would take more than a quarter of the machine's memory; nor those that an outer call packed.
    """
    known = _packed.get()
    layers = {
        layer.weight.data_ptr(): layer
        for module in modules
        for layer in module.modules()
        if _multiplies_plainly(layer) and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32
    }
    layers = {address: layer for address, layer in layers.items() if address not in known}
    room = MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not is_available() or sum(layer.weight.nbytes for layer in layers.values()) > room:
        layers = {}
    laid_out = {address: _lay_out(layer.weight.detach()) for address, layer in layers.items()}
    token = _packed.set(MappingProxyType({**known, **laid_out}))
    for layer in layers.values():
        layer.forward = cast(Any, _Forward(layer))
    try:
        yield len(layers)
    finally:
        for layer in layers.values():
            del layer.forward
        _packed.reset(token)


def _multiplies_plainly(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """torch's own linear layer, or the drafter's, which is the same where nothing trains; quantised ones are not."""
    plain = type(layer) is nn.Linear or type(layer).__module__ == "draftsmith.drafter.linear"
    return plain and isinstance(layer, nn.Linear)


def _lay_out(weight_OI: Tensor) -> Tensor:
    reorder: Any = torch.ops.mkldnn._reorder_linear_weight
    return reorder(weight_OI, USUAL_ROWS)


class _Forward:
    """A linear layer's forward by way of `linear`."""

    def __init__(self, layer: nn.Linear):
        self._layer = layer

    def __call__(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self._layer.weight, self._layer.bias)
