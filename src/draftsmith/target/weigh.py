"""How large a target is and what a token costs it, from its config alone: the model is laid out without memory.

Targets that come with the package are weighed beforehand, since importing transformers takes longer than all else that
a plan does.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

import torch

from draftsmith.records import TargetFacts
from draftsmith.target import smollm2
from draftsmith.target.anatomy import find_anatomy
from draftsmith.target.bundled import HUB_CONFIGS
from draftsmith.target.facts import facts_from_config, text_values
from draftsmith.target.model import TargetConfig, auto_class, load_config, locate

EXPERTS = ".experts."
SIZES = "sizes.json"
"""Of the package's own targets, as `size_values` writes them; a test lays each out again and compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSize:
    """Parameters of a target, in numbers of elements."""

    facts: TargetFacts
    source: str
    """Where the config came from."""
    total: int
    """All that a worker loads."""
    layers: tuple[int, ...]
    """Per decoder layer, those that a token passes through: of experts only the routed ones."""
    ends: int
    """Embedding and head, a tied pair once."""


def weigh_target(config: TargetConfig) -> TargetSize:
    """Sizes of the target that `config` names, from its config.json; hub ids that are bundled need no network.

    Raises:
        TargetError: as `load_target`.
    """
    name = HUB_CONFIGS.get(config.target, config.target)
    if name == smollm2.NAME:
        smollm2.gguf_file()  # without its package there is nothing to plan for
    known = json.loads(files("draftsmith").joinpath("assets", SIZES).read_text(encoding="utf-8"))
    if name in known:
        size = size_from_values(known[name])
        return replace(size, facts=replace(size.facts, name=config.target))
    return lay_out(config)


def lay_out(config: TargetConfig) -> TargetSize:
    """Sizes counted on the model itself, without memory for its weights.

    Raises:
        TargetError: as `load_target`.
    """
    hf_config = load_config(config, locate(config))
    facts = facts_from_config(hf_config, None, name=config.target)
    with torch.device("meta"):
        model: Any = auto_class(hf_config, config.target).from_config(hf_config)
    anatomy = find_anatomy(model, facts.num_layers)
    routed = _routed_share(text_values(hf_config))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return TargetSize(
        facts=facts,
        source=config.target,
        total=sum(parameter.numel() for parameter in model.parameters()),
        layers=tuple(_active(layer, routed) for layer in anatomy.layers),
        ends=embedding.numel() + (0 if head is embedding else head.numel()),
    )


def size_values(size: TargetSize) -> dict[str, Any]:
    """`size` as JSON holds it."""
    return asdict(replace(size, facts=replace(size.facts, rope_scaling=dict(size.facts.rope_scaling))))


def size_from_values(values: dict[str, Any]) -> TargetSize:
    """What `size_values` wrote."""
    facts: dict[str, Any] = dict(values["facts"])
    for key in ("layer_types", "eos_token_ids", "reserved_token_ids"):
        facts[key] = tuple(facts[key])
    rest: dict[str, Any] = values | {"facts": TargetFacts(**facts), "layers": tuple(values["layers"])}
    return TargetSize(**rest)


def _routed_share(values: dict[str, Any]) -> float:
    """Share of a layer's experts that one token passes through; 1 without experts."""
    experts = values.get("num_experts") or values.get("num_local_experts") or values.get("n_routed_experts")
    chosen = values.get("num_experts_per_tok")
    return float(chosen) / float(experts) if experts and chosen else 1.0


def _active(layer: torch.nn.Module, routed: float) -> int:
    named = [(f".{name}", parameter.numel()) for name, parameter in layer.named_parameters()]
    return round(sum(count * (routed if EXPERTS in name else 1.0) for name, count in named))
