"""Where a Hugging Face causal LM keeps its decoder layers, final norm, embedding and head.

Found by structure and proved by one small forward pass, since wrappers nest them differently and families scale their
embeddings and logits in ways that no common interface names.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftsmith.errors import TargetError
from draftsmith.records import FrozenEnds
from draftsmith.target.facts import text_values

logger = logging.getLogger(__name__)

PROBE_TOKENS = 8
OTHER_TOWERS = ("vision", "visual", "audio", "speech")


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The parts of a causal LM that capture and drafting touch; all belong to the model, none is a copy."""

    backbone: nn.Module
    """The text decoder that owns the layers: ids in, the final norm's output out."""
    layers: nn.ModuleList
    final_norm: nn.Module


def find_anatomy(model: Any, num_layers: int) -> Anatomy:
    """Decoder, its `num_layers` layers and final norm of `model`, wherever its wrapper nests them.

    Raises:
        TargetError: no such list of layers, or no norm behind them.
    """
    name = type(model).__name__
    backbone, layers = _find_layers(model, num_layers)
    if backbone is None or layers is None:
        raise TargetError(
            f"no list of {num_layers} decoder layers found in {name}: draftsmith taps decoder-only language models"
        )
    norms = [child for child in backbone.children() if "norm" in type(child).__name__.lower()]
    if not norms:
        raise TargetError(f"no final norm found beside the decoder layers of {name}: this architecture isn't supported")
    return Anatomy(backbone=backbone, layers=layers, final_norm=norms[-1])


def _find_layers(model: Any, num_layers: int) -> tuple[nn.Module | None, nn.ModuleList | None]:
    # Parents come before children, so a decoder's own list wins over lists of experts inside its layers.
    for root in (model.get_decoder(), model):
        for path, module in root.named_modules():
            if any(tower in path.lower() for tower in OTHER_TOWERS):
                continue
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                    return module, child
    return None, None


def first_tensor(output: Any) -> Tensor:
    """The hidden states of a layer's output, which families return bare or first in a tuple."""
    return cast(Tensor, output[0] if isinstance(output, tuple) else output)


@contextmanager
def layers_cut(anatomy: Anatomy, num_layers: int) -> Generator[None]:
    """The backbone running its first `num_layers` layers only; all of them again afterwards, also after an error."""
    whole = anatomy.layers
    backbone: Any = anatomy.backbone
    name = next(name for name, child in backbone.named_children() if child is whole)
    setattr(backbone, name, nn.ModuleList(list(whole)[:num_layers]))
    try:
        yield
    finally:
        setattr(backbone, name, whole)


@torch.no_grad()
def frozen_ends(model: Any, anatomy: Anatomy) -> FrozenEnds:
    """Embedding and head of `model` as the drafter uses them, shared by reference.

    The logit scale, soft cap and embedding scale are read from the config and proved on a few tokens: the returned
    ends must give the model's own logits from its own last hidden states.

    Raises:
        TargetError: no head, a head stored in a quantised format, or logits that these ends don't explain.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    name = type(model).__name__
    if embedding is None or head is None:
        raise TargetError(f"{name} has no language-model head: give a causal language model, not its base model")
    for part, module in (("embedding", embedding), ("head", head)):
        weight = module.weight
        if not weight.is_floating_point() or weight.ndim != 2 or weight.dtype.itemsize < 2:
            raise TargetError(
                f"the {part} of {name} is stored as {weight.dtype} {list(weight.shape)}: "
                "the drafter needs it in plain floating point (exclude it from quantisation)"
            )
    if embedding.weight.shape != head.weight.shape:
        raise TargetError(
            f"embedding {list(embedding.weight.shape)} and head {list(head.weight.shape)} of {name} differ in shape: "
            "a drafter shares both, so this architecture isn't supported"
        )
    values = text_values(model.config)
    seen = _probe(model, anatomy, embedding.weight)
    soft_cap = values.get("final_logit_softcapping")
    bias: Tensor | None = head.bias
    for scale in _logit_scales(values):
        ends = FrozenEnds(
            embedding_VH=embedding.weight,
            head_VH=head.weight,
            head_bias_V=bias,
            logit_scale=scale,
            soft_cap=None if soft_cap is None else float(soft_cap),
            embedding_scale=_embedding_scale(values, seen, embedding.weight),
        )
        if _close(logits_of(ends, seen.last_hidden), seen.logits):
            return ends
    raise TargetError(
        f"the logits of {name} aren't its head applied to its last hidden states, so it does something to them that "
        "drafters of engines don't: this architecture isn't supported"
    )


def logits_of(ends: FrozenEnds, hidden_QH: Tensor) -> Tensor:
    """Logits in fp32 as FrozenEnds states them: the reference for every faster form."""
    hidden = hidden_QH.to(ends.head_VH.device)
    bias = None if ends.head_bias_V is None else ends.head_bias_V.to(ends.head_VH.dtype)
    logits = nn.functional.linear(hidden.to(ends.head_VH.dtype), ends.head_VH, bias).float() * ends.logit_scale
    return logits if ends.soft_cap is None else ends.soft_cap * torch.tanh(logits / ends.soft_cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    token_ids: Tensor
    embedded: Tensor
    """What the first layer reads."""
    last_hidden: Tensor
    logits: Tensor


def _probe(model: Any, anatomy: Anatomy, embedding_VH: Tensor) -> _Probe:
    rows = embedding_VH.shape[0]
    ids = torch.arange(PROBE_TOKENS, device=embedding_VH.device) * max(1, rows // PROBE_TOKENS) % rows
    caught: dict[str, Tensor] = {}

    def at_first(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught["embedded"] = args[0] if args else kwargs["hidden_states"]

    def at_norm(_module: nn.Module, _args: Any, output: Any) -> None:
        caught["last_hidden"] = first_tensor(output)

    handles = [
        anatomy.layers[0].register_forward_pre_hook(at_first, with_kwargs=True),
        anatomy.final_norm.register_forward_hook(at_norm),
    ]
    try:
        logits = model(input_ids=ids[None], use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return _Probe(token_ids=ids, embedded=caught["embedded"][0], last_hidden=caught["last_hidden"][0], logits=logits[0])


def _logit_scales(values: dict[str, Any]) -> Sequence[float]:
    """Factors that families put on their logits; Granite divides by `logits_scaling`, others multiply by it."""
    scales = [1.0]
    for key in ("logit_scale", "lm_head_multiplier", "logits_scaling"):
        if values.get(key):
            scales += [1.0 / float(values[key]), float(values[key])]
    return list(dict.fromkeys(scales[1:] + scales[:1]))


def _embedding_scale(values: dict[str, Any], seen: _Probe, embedding_VH: Tensor) -> float:
    """The factor between an embedding row and what the first layer reads; 1 where the family adds something else
    (learned positions): the drafter then reads raw rows, and its exported config says so to the engine."""
    scales = [1.0, math.sqrt(embedding_VH.shape[1])]
    scales += [float(values[key]) for key in ("embedding_multiplier", "scale_emb") if values.get(key)]
    raw = embedding_VH[seen.token_ids].float().to(seen.embedded.device)
    for scale in scales:
        if _close(raw * scale, seen.embedded):
            return scale
    logger.warning("the first layer reads more than scaled embeddings: the drafter embeds its block with raw rows")
    return 1.0


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Equal up to the rounding of the coarser of bf16 and the model's dtype (a wrong factor is off by far more)."""
    tolerance = 1e-4 if theirs.dtype == torch.float32 else 2e-2
    gap = (ours.float().to(theirs.device) - theirs.float()).abs().max()
    return bool(gap <= tolerance * theirs.float().abs().max().clamp(min=1e-6))
