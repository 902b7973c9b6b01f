"""What a compiled linear-attention layer calls in place of two functions of transformers.

Outside a compiled layer nothing changes. Inside, transformers 5 asks torch whether it is being exported, and takes its
readable references where it is, whatever packages are installed. Some versions of torch (2.11, going by what ran) say
so of every traced function. Seen in a Qwen3.5 of 27B at [24, 2048] on an H200: the delta rule as a loop over chunks of
fp32 products, three tenths of the target's time, with flash-linear-attention installed and no word said. Hence:

- the delta rule is one opaque operation, which runs what the uncompiled layer would run;
- the short causal convolution is four shifted products, which a compiler fuses into one pass over the numbers. As a
  grouped convolution it is a kernel of its own between two transposes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional as F

from draftsmith.target.model import Target

CONVOLUTION = "causal_conv1d_fn"
HUB = "transformers.integrations.hub_kernels"
EXPORTING = "is_torchdynamo_exporting"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
"""What the families' modules call them: Qwen3.5, Qwen3-Next, OLMo hybrid; Kimi linear."""

Rule = Callable[..., tuple[Tensor, Tensor | None]]
rules: dict[str, Rule] = {}
"""Delta rules as they were, by model file and name."""
fused: set[str] = set()
"""Model files whose convolution was replaced."""


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


@library.custom_op("draftsmith::delta_rule", mutates_args=())
def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, l2norm: bool, rule: str) -> Tensor:
    """A model file's own delta rule over whole sequences from no state: [batch, length, heads, width] of `value`."""
    states: dict[str, Any] = {"initial_state": None, "output_final_state": False}
    output, _ = rules[rule](query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=l2norm, **states)
    return output.contiguous()


@delta_rule.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, l2norm: bool, rule: str) -> Tensor:
    return value.new_empty(value.shape)


def opaque_rule(original: Rule, label: str) -> Rule:
    """`original`, and within a compiled graph, where no state comes in or goes out, one operation that calls it."""
    rules[label] = original

    @functools.wraps(original)
    def rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        starts_or_ends = options.get("initial_state") is not None or options.get("output_final_state", False)
        if starts_or_ends or options.get("cu_seqlens") is not None or not torch.compiler.is_compiling():
            return original(query, key, value, g=g, beta=beta, **options)
        return delta_rule(query, key, value, g, beta, options.get("use_qk_l2norm_in_kernel", False), label), None

    return rule


def fused_convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`original`, and within a compiled graph the shifted form."""

    @functools.wraps(original)
    def convolution(*arguments: Any, **options: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return shifted_convolution(*arguments, **options)
        return original(*arguments, **options)

    return convolution


def never_exports() -> bool:
    return False


def take_packages() -> bool:
    """Tell transformers that no trace of this process is an export, so that it takes an installed package's kernels
    there too (Mamba's scans, say); whether it asks at all, which older versions don't. A kernel that can't be traced
    breaks its layer's graph, and `warm_up` reports that."""
    names = vars(sys.modules[HUB]) if HUB in sys.modules else {}
    if EXPORTING not in names:
        return False
    names[EXPORTING] = never_exports
    return True


def _model_files(target: Target) -> list[str]:
    return sorted({type(part).__module__ for layer in target.layers for part in layer.modules()})


def keep_rules_whole(target: Target) -> int:
    """Put `opaque_rule` where `target`'s layers look for their delta rule, for this process; how many model files."""
    found = [(file, name) for file in _model_files(target) for name in DELTA_RULES if name in vars(sys.modules[file])]
    for file, name in found:
        if f"{file}.{name}" not in rules:
            names = vars(sys.modules[file])
            names[name] = opaque_rule(names[name], f"{file}.{name}")
    return len(found)


def fuse_convolutions(target: Target) -> int:
    """Likewise `fused_convolution`. It rounds in another order than the grouped one: for GPUs, where it saves time."""
    found = [file for file in _model_files(target) if CONVOLUTION in vars(sys.modules[file])]
    for file in found:
        if file not in fused:
            names = vars(sys.modules[file])
            names[CONVOLUTION] = fused_convolution(names[CONVOLUTION])
            fused.add(file)
    return len(found)
