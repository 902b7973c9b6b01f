"""The z-lab layout between a Drafter and its files: parameter names and config.json, both ways.

Engines read it as the Qwen3 layout with an `fc`, a `hidden_norm`, no embedding and no head. A key that would be
guessed, defaulted or dropped in silence elsewhere is required, written at every place loaders look, or refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.drafter.model import FULL, SLIDING, DrafterConfig
from draftsmith.drafter.rope import RopeConfig
from draftsmith.errors import ConfigError, ExportError
from draftsmith.records import EMPTY, FrozenEnds, TargetFacts

ARCHITECTURE = "DFlashDraftModel"
KNOWN_OPTIONS = {
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "is_causal",
    "causal",
}
"""Keys of `dflash_config` that are understood; any other changes what a drafter computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportInfo:
    """What an exported config states of the target, beside the drafter's own sizes."""

    target: str
    """Hub id or folder, for the card and the verifier entry."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    soft_cap: float | None = None
    target_architecture: str = ""
    """Class name of the target, for the speculators layout; "" where unknown."""
    template_hash: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the chat template that the training prompts were rendered with."""

    @classmethod
    def of(
        cls, facts: TargetFacts, ends: FrozenEnds, architecture: str = "", template_kwargs: Mapping[str, Any] = EMPTY
    ) -> ExportInfo:
        return cls(
            target=facts.name,
            bos_token_id=facts.bos_token_id,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id,
            input_embedding_scale=ends.embedding_scale,
            output_multiplier=ends.logit_scale,
            soft_cap=ends.soft_cap,
            target_architecture=architecture,
            template_hash=facts.template_hash,
            template_kwargs=template_kwargs,
        )


def split_weights(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters of a Drafter under the names of the z-lab layout, on the CPU in `dtype`.

    `kv_proj` rows are [k; v] and `gate_up_proj` rows [gate; up].
    """
    parts = {"kv_proj": ("k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    named: dict[str, Tensor] = {}
    for name, weight in weights.items():
        kept = weight.detach().to("cpu", dtype)
        fused = next((key for key in parts if f".{key}." in name), None)
        if fused is None:
            named[name] = kept.contiguous()
            continue
        for part, half in zip(parts[fused], kept.chunk(2), strict=True):
            named[name.replace(fused, part)] = half.clone()
    return named


def merge_weights(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `split_weights`, dtype kept."""
    second = {"k_proj": ("v_proj", "kv_proj"), "gate_proj": ("up_proj", "gate_up_proj")}
    weights: dict[str, Tensor] = {}
    for name, weight in named.items():
        part = next((key for key in (*second, "v_proj", "up_proj") if f".{key}." in name), None)
        if part is None:
            weights[name] = weight
        elif part in second:
            other, fused = second[part]
            weights[name.replace(part, fused)] = torch.cat([weight, named[name.replace(part, other)]])
    return weights


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the z-lab layout and its shape."""
    H, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(config.taps) * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (H,),
            f"{layer}.post_attention_layernorm.weight": (H,),
            f"{layer}.self_attn.q_proj.weight": (config.num_heads * D, H),
            f"{layer}.self_attn.k_proj.weight": (config.num_kv_heads * D, H),
            f"{layer}.self_attn.v_proj.weight": (config.num_kv_heads * D, H),
            f"{layer}.self_attn.o_proj.weight": (H, config.num_heads * D),
            f"{layer}.self_attn.q_norm.weight": (D,),
            f"{layer}.self_attn.k_norm.weight": (D,),
            f"{layer}.mlp.gate_proj.weight": (inner, H),
            f"{layer}.mlp.up_proj.weight": (inner, H),
            f"{layer}.mlp.down_proj.weight": (H, inner),
        }
    return shapes


def check_weights(found: Mapping[str, tuple[int, ...]], config: DrafterConfig, where: str) -> None:
    """Refuse a key set or shapes other than the config's, by name: vLLM accepts missing weights in silence.

    Raises:
        ExportError: naming the first few keys.
    """
    expected = expected_shapes(config)
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise ExportError(f"{where} lacks {some(missing)}: export the drafter again, or give a complete one")
    if extra:
        raise ExportError(
            f"{where} holds {some(extra)}, which a DFlash drafter of its config doesn't have: it is another "
            "architecture or its config.json states fewer layers"
        )
    wrong = [f"{name} {list(found[name])} instead of {list(expected[name])}" for name in expected]
    wrong = [text for name, text in zip(expected, wrong, strict=True) if found[name] != expected[name]]
    if wrong:
        raise ExportError(f"{where}: {some(wrong)}; its config.json doesn't describe its weights")


def some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def qwen3_values(config: DrafterConfig, info: ExportInfo, dtype: torch.dtype) -> dict[str, Any]:
    """The Qwen3 settings of the drafter's own layers, RoPE in both its forms."""
    rope: dict[str, Any] = {"rope_type": "default"} | dict(config.rope.scaling) | {"rope_theta": config.rope.theta}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    slides = SLIDING in config.layer_types
    eos = info.eos_token_ids
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window if slides else None,
        "use_sliding_window": slides,
        "max_window_layers": config.num_layers,
        "rope_parameters": rope,
        # Loaders that know only one of these forms silently take theta 1e4 otherwise.
        "rope_theta": config.rope.theta,
        "rope_scaling": scaling if config.rope.scaling else None,
        "max_position_embeddings": config.rope.max_positions,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": info.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else (list(eos) or None),
        "pad_token_id": info.pad_token_id,
        "dtype": str(dtype).removeprefix("torch."),
        "initializer_range": 0.02,
        "use_cache": True,
    }


def zlab_values(config: DrafterConfig, info: ExportInfo, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the z-lab layout."""
    dflash: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps),
        "block_size": config.block_size,
    }
    # Engines read these where the target scales its embeddings or logits; absent means 1 and none.
    if info.input_embedding_scale != 1.0:
        dflash["input_embedding_scale"] = info.input_embedding_scale
    if info.output_multiplier != 1.0:
        dflash["output_multiplier"] = info.output_multiplier
    if info.soft_cap is not None:
        dflash["final_logit_softcapping"] = info.soft_cap
    return {
        "architectures": [ARCHITECTURE],
        "auto_map": {"AutoModel": f"dflash.{ARCHITECTURE}"},
        **qwen3_values(config, info, dtype),
        "block_size": config.block_size,
        "dflash_config": dflash,
        "num_target_layers": config.num_target_layers,
    }


def config_from_values(values: Mapping[str, Any], where: str) -> DrafterConfig:
    """The DrafterConfig that a z-lab config.json states.

    Raises:
        ExportError: a key missing or contradicting another, or an option that draftsmith's drafters don't have.
    """
    if "speculators_model_type" in values:
        raise ExportError(
            f"{where} is in the speculators layout, which vLLM reads: give one from draftsmith export --layout zlab"
        )
    try:
        dflash = cast(dict[str, Any], values.get("dflash_config") or {})
        _refuse_other_kinds(values, dflash, where)
        layer_types = _layer_types(values, where)
        heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
        head_dim = int(values.get("head_dim") or hidden // heads)
        return DrafterConfig(
            hidden_size=hidden,
            intermediate_size=int(values["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rms_norm_eps=float(values["rms_norm_eps"]),
            layer_types=layer_types,
            sliding_window=int(values["sliding_window"]) if SLIDING in layer_types else 0,
            block_size=int(_from_both("block_size", values, dflash, where)),
            mask_token_id=int(_from_both("mask_token_id", values, dflash, where)),
            taps=tuple(int(tap) for tap in _from_both("target_layer_ids", values, dflash, where)),
            num_target_layers=int(values["num_target_layers"]),
            vocab_size=int(values["vocab_size"]),
            rope=rope_from_values(values, head_dim, where),
        )
    except KeyError as error:
        raise ExportError(
            f"{where} lacks {error}: without it engines guess, so add what the drafter trained with"
        ) from error
    except ConfigError as error:
        raise ExportError(f"{where}: {error}") from error


def _from_both(key: str, values: Mapping[str, Any], dflash: Mapping[str, Any], where: str) -> Any:
    """A key that stands at top level in older files and inside `dflash_config` in newer ones."""
    found = [place[key] for place in (dflash, values) if place.get(key) is not None]
    if not found:
        raise ExportError(
            f"{where} lacks {key} (looked at top level and in dflash_config): without it engines guess, so add what "
            "the drafter trained with"
        )
    if len(found) == 2 and found[0] != found[1]:
        raise ExportError(
            f"{where} states {key} twice, {found[1]} at top level and {found[0]} in dflash_config: correct one"
        )
    return found[0]


def _refuse_other_kinds(values: Mapping[str, Any], dflash: Mapping[str, Any], where: str) -> None:
    architectures = values.get("architectures") or [ARCHITECTURE]
    unknown = sorted(dflash.keys() - KNOWN_OPTIONS)
    wrong: list[str] = []
    if list(architectures) != [ARCHITECTURE]:
        wrong.append(f"architectures {architectures}")
    if unknown:
        wrong.append(f"dflash_config {', '.join(unknown)}")
    for key, plain in (("hidden_act", "silu"), ("attention_bias", False), ("sample_from_anchor", False)):
        if values.get(key, plain) != plain:
            wrong.append(f"{key} {values[key]}")
    if wrong:
        raise ExportError(
            f"{where} asks for {'; '.join(wrong)}, which is not the plain DFlash drafter draftsmith loads"
        )


def _layer_types(values: Mapping[str, Any], where: str) -> tuple[str, ...]:
    num_layers = int(values["num_hidden_layers"])
    types = tuple(str(kind) for kind in values.get("layer_types") or (FULL,) * num_layers)
    if len(types) != num_layers:
        raise ExportError(f"{where} states {num_layers} layers but {len(types)} layer_types: correct one of them")
    if SLIDING in types and not values.get("sliding_window"):
        raise ExportError(f"{where} has sliding layers without sliding_window: add the window it trained with")
    dflash = cast(dict[str, Any], values.get("dflash_config") or {})
    for place in (values, dflash):
        for key in ("is_causal", "causal"):
            causal = place.get(key)
            if causal is not None and set(types) != {SLIDING if causal else FULL}:
                raise ExportError(
                    f"{where} states {key} {str(causal).lower()} for layers {', '.join(sorted(set(types)))}: here full "
                    "layers see their whole block and sliding layers see it causally; remove the key if it is wrong"
                )
    return types


def rope_from_values(values: Mapping[str, Any], head_dim: int, where: str) -> RopeConfig:
    """RoPE from `rope_parameters`, or from `rope_theta` and `rope_scaling` where that is absent.

    Raises:
        ExportError: neither, both with different values, or a rotary over part of the head.
    """
    nested = cast(dict[str, Any] | None, values.get("rope_parameters"))
    flat_theta, flat_scaling = values.get("rope_theta"), cast(dict[str, Any], values.get("rope_scaling") or {})
    if nested is None:
        if flat_theta is None:
            raise ExportError(
                f"{where} lacks rope_theta: engines would take 10000, so add what the drafter trained with"
            )
        nested = {**flat_scaling, "rope_theta": flat_theta}
    theta = nested.get("rope_theta", flat_theta)
    if theta is None or (flat_theta is not None and float(flat_theta) != float(theta)):
        raise ExportError(f"{where} states rope_theta {flat_theta} beside rope_parameters {nested}: make them agree")
    if nested.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise ExportError(f"{where} asks for a partial_rotary_factor; a drafter rotates whole heads: remove it")
    scaling = _plain_scaling(nested)
    if flat_scaling and _plain_scaling(flat_scaling) != scaling:
        raise ExportError(
            f"{where} states rope_scaling {flat_scaling} beside rope_parameters {nested}: make them agree"
        )
    return RopeConfig(
        head_dim=head_dim,
        theta=float(theta),
        scaling=scaling,
        max_positions=int(values["max_position_embeddings"]),
    )


def _plain_scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling part of RoPE parameters: empty where plain."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return {}
    left_out = ("rope_theta", "type", "rope_type", "partial_rotary_factor")
    return {"rope_type": kind} | {key: value for key, value in rope.items() if key not in left_out}
