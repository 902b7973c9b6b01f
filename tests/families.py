"""Tiny random targets of each family that draftsmith supports, for every test that needs a real Hugging Face model.

`tiny_target(family)` gives a cached Target: never quantise, compile or poison it in place; `fresh_target(family)`
gives one to spoil. `save_tiny(family, folder)` writes model and tokenizer as a local folder for the command line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from draftsmith.records import Document
from draftsmith.target.model import Target, build_target

LAYERS = 6
HIDDEN = 32
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved_0|>")
TOKENS = 256 + len(SPECIALS)
ROWS = 272
"""Embedding rows: more than the tokenizer's 260 ids, so that there are reserved rows."""
EOT, IM_START, IM_END = 256, 257, 258
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": IM_END,
    "pad_token_id": EOT,
}
THETA = 54_321.0
"""Far from every default, so that a silently dropped theta shows."""


def rope(**extra: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": THETA} | extra


@functools.cache
def tiny_tokenizer() -> Any:
    """Bytes as tokens, four special tokens, a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def _llama() -> Any:
    scaled = rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=128,
    )
    return transformers.LlamaConfig(**SIZES, rope_parameters=scaled, tie_word_embeddings=False)


def _qwen2() -> Any:
    return transformers.Qwen2Config(**SIZES, rope_parameters=rope(), tie_word_embeddings=True)


def _qwen3() -> Any:
    return transformers.Qwen3Config(**SIZES, head_dim=16, rope_parameters=rope(), tie_word_embeddings=False)


def _qwen3_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return transformers.Qwen3MoeConfig(**SIZES, **experts, head_dim=16, rope_parameters=rope())


def _qwen3_5_text() -> dict[str, Any]:
    return SIZES | {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * (LAYERS // 3),
        "rope_parameters": rope(partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True),
        "tie_word_embeddings": False,
    }


def _qwen3_5() -> Any:
    return transformers.Qwen3_5TextConfig(**_qwen3_5_text())


def _qwen3_5_vlm() -> Any:
    vision = {"depth": LAYERS, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": HIDDEN}
    return transformers.Qwen3_5Config(text_config=_qwen3_5_text(), vision_config=vision, tie_word_embeddings=False)


def _gemma3() -> Any:
    both = {"full_attention": rope(), "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * (LAYERS // 3)
    extra = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": kinds}
    return transformers.Gemma3TextConfig(**SIZES, **extra, rope_parameters=both)


def _gemma2() -> Any:
    extra = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "final_logit_softcapping": 3.0}
    return transformers.Gemma2Config(**SIZES, **extra, rope_parameters=rope())


def _mistral() -> Any:
    return transformers.MistralConfig(**SIZES, sliding_window=8, rope_parameters=rope())


def _gpt_oss() -> Any:
    yarn = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=32.0, beta_slow=1.0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}
    return transformers.GptOssConfig(**SIZES, **experts, rope_parameters=yarn)


def _phi() -> Any:
    return transformers.PhiConfig(**SIZES, rope_parameters=rope(partial_rotary_factor=0.5))


def _phi3() -> Any:
    return transformers.Phi3Config(**SIZES, rope_parameters=rope(partial_rotary_factor=1.0))


def _granite() -> Any:
    return transformers.GraniteConfig(
        **SIZES, rope_parameters=rope(), embedding_multiplier=6.0, logits_scaling=4.0, residual_multiplier=0.5
    )


def _cohere() -> Any:
    return transformers.CohereConfig(**SIZES, rope_parameters=rope(), logit_scale=0.25)


def _llava() -> Any:
    text = transformers.MistralConfig(**SIZES, sliding_window=None, rope_parameters=rope())
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    return transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=ROWS - 1)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_vlm": _qwen3_5_vlm,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mistral": _mistral,
    "gpt_oss": _gpt_oss,
    "phi": _phi,
    "phi3": _phi3,
    "granite": _granite,
    "cohere": _cohere,
    "llava": _llava,
}
VLM_CLASSES = {
    "qwen3_5_vlm": transformers.Qwen3_5ForConditionalGeneration,
    "llava": transformers.LlavaForConditionalGeneration,
}


def tiny_model(family: str, seed: int = 0) -> Any:
    """A random fp32 model whose layers all matter: weights are drawn wide enough that hidden states move."""
    config = FAMILIES[family]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family in VLM_CLASSES:
            model = VLM_CLASSES[family](config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.15)
        _slow_decay(model)
    return model.to(torch.float32).eval()


def _slow_decay(model: Any) -> None:
    """Linear attention that remembers: with the default fast decay a leak between documents would hide (B15)."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(parameter, -6.0)


def fresh_target(family: str, seed: int = 0) -> Target:
    """A Target of its own, for tests that change it."""
    return build_target(tiny_model(family, seed), tiny_tokenizer(), name=f"tiny-{family}")


@functools.cache
def tiny_target(family: str) -> Target:
    """A cached Target, shared by tests that only read."""
    return fresh_target(family)


def save_tiny(family: str, folder: Path) -> Path:
    """The tiny model and tokenizer as a local Hugging Face folder."""
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def documents_of(lengths: list[int], *, seed: int = 0) -> list[Document]:
    """Random documents of the tiny vocabulary, the second half of each supervised."""
    draw = torch.Generator().manual_seed(seed)
    return [
        Document(
            token_ids=torch.randint(0, 256, (length,), generator=draw),
            loss_mask=torch.arange(length) >= length // 2,
        )
        for length in lengths
    ]
