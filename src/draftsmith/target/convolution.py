"""The short causal convolution of linear-attention layers as shifted products, which a compiler fuses.

Without the package causal_conv1d, transformers runs it as a grouped convolution: a kernel of its own between two
transposes, that no neighbour fuses with. Four shifted products in fp32 are one pass over the same numbers.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from draftsmith.target.model import Target

NAME = "causal_conv1d_fn"
"""What the families' modules call it."""


def shifted_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Each channel convolved with its own taps over the places up to its own, zeros before the first.

    Args:
        hidden_states: [batch, channels, length].
        weight: [channels, taps]; the last tap meets the place itself.
        bias: [channels].
        activation: a name of transformers' activations.

    Returns:
        [batch, channels, length] in the input's dtype; products and sums in fp32, rounded once before the activation.
    """
    length, num_taps = hidden_states.shape[-1], weight.shape[-1]
    padded = F.pad(hidden_states.to(weight.dtype), (num_taps - 1, 0)).float()
    taps = weight.float()[:, :, None]
    wide = padded[..., :length] * taps[:, 0]
    for shift in range(1, num_taps):
        wide = wide + padded[..., shift : shift + length] * taps[:, shift]
    if bias is not None:
        wide = wide + bias.float()[:, None]
    output = wide.to(weight.dtype)
    if activation is not None:
        from transformers.activations import ACT2FN  # the model has long imported it; a plan never does

        activations: Any = ACT2FN
        output = activations[activation](output)
    return output.to(hidden_states.dtype)


def fuse_convolutions(target: Target) -> int:
    """Put the shifted form where `target`'s layers call the grouped one, for this process; in how many model files.

    Nothing is replaced where the package causal_conv1d is there, whose own kernel is as good.
    """
    if importlib.util.find_spec("causal_conv1d") is not None:
        return 0
    files = {type(part).__module__ for layer in target.layers for part in layer.modules()}
    found = [vars(sys.modules[name]) for name in files if NAME in vars(sys.modules[name])]
    for names in found:
        names[NAME] = shifted_convolution
    return len(found)
