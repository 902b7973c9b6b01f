"""What a drafter needs to know of a target, read from its Hugging Face config and tokenizer alone, without weights."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from draftsmith.errors import TargetError
from draftsmith.records import TargetFacts

logger = logging.getLogger(__name__)

KNOWN_RESERVED: Mapping[str, int] = {"qwen3": 151669, "qwen3_moe": 151669, "qwen3_5": 248070, "qwen3_5_moe": 248070}
"""Reserved ids that published drafters of a family use as mask token, by model type (without its `_text` suffix)."""
MAX_RESERVED = 16
PLAIN_ROPE = {"default", "mrope", "axial", "proportional"}
"""RoPE kinds that are plain once every dimension rotates and only text is read (the drafter's case)."""
SCALED_ROPE = {"linear", "dynamic", "yarn", "llama3", "longrope"}
NOT_SCALING = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
SPARE_NAME = re.compile(r"reserved|unused|placeholder|dummy|spare|extra|empty|mask", re.IGNORECASE)
RECURRENT_KEY = re.compile(r"^(mamba|ssm|linear)_")


def text_values(config: Any) -> dict[str, Any]:
    """The text model's settings as a plain dictionary, its aliases (`n_embd` for `hidden_size`) resolved."""
    text = config.get_text_config(decoder=True)
    values: dict[str, Any] = text.to_dict()
    aliases: dict[str, str] = text.attribute_map
    return values | {alias: values[name] for alias, name in aliases.items() if name in values}


def facts_from_config(
    config: Any,
    tokenizer: Any = None,
    *,
    name: str = "",
    generation_config: Any = None,
    vocab_size: int | None = None,
) -> TargetFacts:
    """Facts of the target that `config` (a transformers PreTrainedConfig, nested or not) describes.

    `tokenizer` None leaves what needs one unknown (tokenizer_size 0, only family-known reserved ids);
    `vocab_size` is the number of embedding rows where the loaded model has another than the config states.

    Raises:
        TargetError: a config without the sizes of a decoder, or RoPE without its theta.
    """
    values = text_values(config)
    missing = [key for key in ("num_hidden_layers", "hidden_size", "num_attention_heads") if not values.get(key)]
    if missing:
        raise TargetError(
            f"{name or config.model_type} is no decoder-only language model (its config lacks {', '.join(missing)}): "
            "give a causal language model as --target"
        )
    # Of the text decoder, and the same whether a wrapper's config or the decoder's own was read.
    model_type = str(values["model_type"]).removesuffix("_text")
    heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
    head_dim = int(values.get("head_dim") or hidden // heads)
    theta, scaling = rope_of(values, head_dim)
    rows = vocab_size or int(values["vocab_size"])
    eos, bos, pad = token_ends(values, tokenizer, generation_config)
    return TargetFacts(
        name=name,
        model_type=model_type,
        num_layers=int(values["num_hidden_layers"]),
        hidden_size=hidden,
        intermediate_size=int(values.get("intermediate_size") or 4 * hidden),
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab_size=rows,
        tokenizer_size=tokenizer_rows(tokenizer),
        rms_norm_eps=norm_eps(values),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=int(values.get("max_position_embeddings") or 0),
        layer_types=layer_types_of(values),
        eos_token_ids=eos,
        bos_token_id=bos,
        pad_token_id=pad,
        reserved_token_ids=reserved_ids(model_type, rows, tokenizer, {*eos, bos, pad}),
        template_hash=template_hash(tokenizer),
    )


def norm_eps(values: Mapping[str, Any]) -> float:
    """The epsilon of the target's norms, under whichever name its config has it."""
    for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"):
        if values.get(key) is not None:
            return float(values[key])
    return 1e-6


def rope_of(values: Mapping[str, Any], head_dim: int) -> tuple[float, dict[str, Any]]:
    """Theta and scaling of the full-attention layers, as a drafter with full rotary over `head_dim` carries them.

    transformers 5 keeps both in `rope_parameters`, nested per layer type where layers differ (Gemma 3); configs of
    older remote code have `rope_theta` and `rope_scaling` at top level. A partial rotary factor belongs to the
    target's own heads and is dropped.
    """
    found: dict[str, Any] = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    nested: list[str] = [key for key, inner in found.items() if isinstance(inner, Mapping)]
    if nested:
        found = found["full_attention" if "full_attention" in nested else nested[0]]
    theta = found.get("rope_theta", values.get("rope_theta"))
    if theta is None and found:
        raise TargetError("the target's config.json states RoPE without rope_theta: add it to rope_parameters")
    kind = str(found.get("rope_type") or found.get("type") or "default")
    theta = 10_000.0 if theta is None else float(theta)
    if kind in PLAIN_ROPE:
        return theta, {}
    scaling = {"rope_type": kind} | {key: value for key, value in found.items() if key not in NOT_SCALING}
    original = values.get("original_max_position_embeddings")
    if original is not None:
        scaling.setdefault("original_max_position_embeddings", original)
    factors = scaling.get("long_factor")
    if kind not in SCALED_ROPE or (factors is not None and len(factors) != head_dim // 2):
        logger.warning("RoPE scaling %r of the target doesn't fit full rotary heads: the drafter uses plain RoPE", kind)
        return theta, {}
    return theta, scaling


def layer_types_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The kind of each decoder layer, in the three words that matter to a cache: full, sliding, linear."""
    stated = values.get("layer_types")
    if stated:
        return tuple(_layer_type(str(kind)) for kind in stated)
    if any(RECURRENT_KEY.match(key) for key in values):
        kind = "linear_attention"
    elif values.get("sliding_window") and values.get("use_sliding_window") is not False:
        kind = "sliding_attention"
    else:
        kind = "full_attention"
    return (kind,) * int(values["num_hidden_layers"])


def _layer_type(kind: str) -> str:
    if kind in ("full_attention", "attention", "mlp", "moe", "dense", "sparse"):
        return "full_attention"  # layers without attention have no state that a cut could spoil
    if kind in ("sliding_attention", "chunked_attention"):
        return "sliding_attention"
    return "linear_attention"  # whatever else keeps a running state, so nothing may be cropped from it


def token_ends(
    values: Mapping[str, Any], tokenizer: Any, generation_config: Any
) -> tuple[tuple[int, ...], int | None, int | None]:
    """End-of-answer ids, begin id and pad id. The model's own ids come first: a tokenizer converted from another
    format may state a wrong end (SmolLM2's GGUF gives `<|im_start|>`)."""
    stated: list[Any] = [None if generation_config is None else generation_config.eos_token_id]
    stated.append(values.get("eos_token_id"))
    eos: list[int] = []
    for one in stated:
        ids: list[int] = [one] if isinstance(one, int) else list(one or ())
        eos += [token for token in ids if token not in eos]
    if not eos and tokenizer is not None and tokenizer.eos_token_id is not None:
        eos = [int(tokenizer.eos_token_id)]
    bos, pad = values.get("bos_token_id"), values.get("pad_token_id")
    if tokenizer is not None:
        bos = tokenizer.bos_token_id if bos is None else bos
        pad = pad if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return tuple(eos), bos, pad


def tokenizer_rows(tokenizer: Any) -> int:
    """One more than the largest id the tokenizer can emit (ids may have holes), 0 without a tokenizer."""
    if tokenizer is None:
        return 0
    return max((len(tokenizer), *(int(token) + 1 for token in tokenizer.get_vocab().values())))


def reserved_ids(model_type: str, rows: int, tokenizer: Any, taken: set[int | None]) -> tuple[int, ...]:
    """Ids with an embedding row that text and template never produce, best first (dflash.md section 1).

    First the family's known id, then rows beyond the tokenizer, then special tokens named as spare, then other
    special tokens that the chat template doesn't write. Never an end, begin or pad token.
    """
    found: list[int] = []
    known = KNOWN_RESERVED.get(model_type)
    if known is not None and known < rows:
        found.append(known)
    if tokenizer is not None:
        size = tokenizer_rows(tokenizer)
        found += range(size, min(rows, size + MAX_RESERVED))
        template = _template_text(tokenizer)
        specials: dict[int, str] = {
            int(token): added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special
        }
        unwritten = sorted(token for token, text in specials.items() if text not in template and token < rows)
        own_roles = {tokenizer.unk_token_id, tokenizer.sep_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id}
        unwritten = [token for token in unwritten if token not in own_roles | {tokenizer.bos_token_id}]
        found += sorted(unwritten, key=lambda token: SPARE_NAME.search(specials[token]) is None)
    unique = dict.fromkeys(token for token in found if token not in taken)
    return tuple(unique)[:MAX_RESERVED]


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    if template is None:
        return ""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def template_hash(tokenizer: Any) -> str:
    """SHA-256 of the chat template, "" where there is none."""
    text = "" if tokenizer is None else _template_text(tokenizer)
    return hashlib.sha256(text.encode()).hexdigest() if text else ""
