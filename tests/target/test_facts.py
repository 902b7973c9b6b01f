"""Facts come from config and tokenizer as transformers 5 lays them out: nothing defaulted in silence."""

from __future__ import annotations

import hashlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from draftsmith.errors import TargetError
from draftsmith.target.facts import facts_from_config, layer_types_of, reserved_ids, rope_of, template_hash
from tests.families import CHATML, FAMILIES, HIDDEN, LAYERS, ROWS, SIZES, THETA, TOKENS, tiny_target, tiny_tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_B16_B18_sizes_and_theta_of_every_family(family: str) -> None:
    facts = tiny_target(family).facts
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (LAYERS, HIDDEN, ROWS)
    assert (facts.num_heads, facts.intermediate_size) == (4, 48)
    assert facts.num_kv_heads == 2
    assert facts.rope_theta == THETA
    assert facts.tokenizer_size == TOKENS
    assert facts.eos_token_ids == (258,)
    assert facts.bos_token_id is None
    assert facts.pad_token_id == 256
    assert len(facts.layer_types) == LAYERS
    assert facts.max_positions == 512
    assert facts.reserved_token_ids[:2] == (TOKENS, TOKENS + 1)
    assert facts.template_hash == hashlib.sha256(CHATML.encode()).hexdigest()


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_need_no_weights(family: str) -> None:
    with_weights = tiny_target(family).facts
    assert facts_from_config(FAMILIES[family](), tiny_tokenizer(), name=f"tiny-{family}") == with_weights


def test_facts_without_a_tokenizer_leave_its_part_open() -> None:
    facts = facts_from_config(FAMILIES["qwen3"]())
    assert (facts.tokenizer_size, facts.reserved_token_ids, facts.template_hash) == (0, (), "")


def test_B17_scaling_round_trips_and_is_not_invented() -> None:
    assert tiny_target("llama").facts.rope_scaling == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    assert tiny_target("gpt_oss").facts.rope_scaling["rope_type"] == "yarn"
    for family in ("qwen2", "qwen3_5", "gemma3", "phi", "phi3"):
        assert tiny_target(family).facts.rope_scaling == {}


def test_B16_rope_of_older_layouts_and_nested_ones() -> None:
    assert rope_of({"rope_theta": 7e5}, 64) == (7e5, {})
    old = {"rope_theta": 7e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert rope_of(old, 64) == (7e5, {"rope_type": "linear", "factor": 2.0})
    nested = {
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
    }
    assert rope_of({"rope_parameters": nested}, 64) == (1e6, {"rope_type": "linear", "factor": 8.0})
    assert rope_of({}, 64) == (1e4, {})


def test_a_partial_rotary_factor_never_reaches_the_drafter() -> None:
    scaled = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "partial_rotary_factor": 0.25}
    assert rope_of({"rope_parameters": scaled}, 64) == (1e6, {"rope_type": "yarn", "factor": 4.0})


def test_B16_rope_without_theta_is_an_error_not_a_default() -> None:
    with pytest.raises(TargetError, match="without rope_theta"):
        rope_of({"rope_parameters": {"rope_type": "default"}}, 64)


def test_longrope_factors_are_carried_only_where_they_fit_full_rotary(caplog: pytest.LogCaptureFixture) -> None:
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 24, "short_factor": [1.0] * 24}
    values = {"rope_parameters": factors, "original_max_position_embeddings": 4096}
    theta, scaling = rope_of(values, 48)
    assert (theta, scaling["original_max_position_embeddings"], len(scaling["long_factor"])) == (1e4, 4096, 24)
    with caplog.at_level(logging.WARNING):
        assert rope_of(values, 64) == (1e4, {})
    assert "plain RoPE" in caplog.text


def test_layer_types_are_the_three_words_that_matter_to_a_cache() -> None:
    assert tiny_target("qwen3_5").facts.layer_types == ("linear_attention", "linear_attention", "full_attention") * 2
    assert tiny_target("gemma3").facts.layer_types == ("sliding_attention", "sliding_attention", "full_attention") * 2
    assert tiny_target("mistral").facts.layer_types == ("sliding_attention",) * LAYERS
    assert layer_types_of({"layer_types": ["chunked_attention", "attention", "mamba", "moe"]}) == (
        "sliding_attention",
        "full_attention",
        "linear_attention",
        "full_attention",
    )
    assert layer_types_of({"num_hidden_layers": 2, "mamba_d_conv": 4}) == ("linear_attention",) * 2
    dormant = {"num_hidden_layers": 1, "sliding_window": 4096, "use_sliding_window": False}
    assert layer_types_of(dormant) == ("full_attention",)


def fake_tokenizer(size: int, specials: dict[int, str], template: str | None = None, **roles: int) -> Any:
    """A stand-in with only what is read of a tokenizer."""
    ids = {f"{role}_token_id": roles.get(role) for role in ("bos", "eos", "pad", "unk", "sep", "cls")}
    added = {token: SimpleNamespace(content=text, special=True) for token, text in specials.items()}
    vocabulary = {str(token): token for token in range(size)}

    class Fake(SimpleNamespace):
        def __len__(self) -> int:
            return size

        def get_vocab(self) -> dict[str, int]:
            return vocabulary

    return Fake(**ids, added_tokens_decoder=added, chat_template=template)


@pytest.mark.parametrize(("model_type", "known"), [("qwen3", 151669), ("qwen3_5", 248070), ("qwen3_5_moe", 248070)])
def test_C18_C19_the_familys_own_mask_id_comes_first(model_type: str, known: int) -> None:
    assert reserved_ids(model_type, 248320, None, set()) == (known,)
    assert reserved_ids(model_type, 1000, None, set()) == ()


def test_C18_full_vocabularies_fall_back_to_special_tokens_nobody_writes() -> None:
    specials = {
        0: "<|endoftext|>",
        1: "<|im_start|>",
        2: "<|im_end|>",
        3: "<repo_name>",
        4: "<empty_output>",
        5: "<unk>",
    }
    tokenizer = fake_tokenizer(100, specials, CHATML, eos=2, bos=0, pad=0, unk=5)
    assert reserved_ids("llama", 100, tokenizer, {2, 0}) == (4, 3)


def test_pad_equal_to_a_spare_token_is_never_offered() -> None:
    specials = {8: "<|reserved_1|>", 9: "<|reserved_2|>"}
    assert reserved_ids("llama", 10, fake_tokenizer(10, specials, pad=8), {8}) == (9,)


def test_end_tokens_come_from_the_model_before_the_tokenizer() -> None:
    wrong = fake_tokenizer(100, {}, eos=1, bos=1)
    config = transformers.LlamaConfig(**SIZES)
    generation = transformers.GenerationConfig(eos_token_id=[258, 200])
    assert facts_from_config(config, wrong, generation_config=generation).eos_token_ids == (258, 200)
    assert facts_from_config(config, wrong).eos_token_ids == (258,)
    bare = transformers.LlamaConfig(**SIZES | {"eos_token_id": None})
    assert facts_from_config(bare, wrong).eos_token_ids == (1,)


def test_named_templates_have_a_hash_and_none_has_none() -> None:
    named = fake_tokenizer(1, {})
    named.chat_template = {"default": "a", "tools": "b"}
    assert len(template_hash(named)) == 64
    assert template_hash(fake_tokenizer(1, {})) == ""


def test_not_a_decoder_is_refused() -> None:
    with pytest.raises(TargetError, match="num_hidden_layers"):
        facts_from_config(transformers.ResNetConfig(), name="a-picture-model")


def test_model_type_is_the_text_decoders() -> None:
    found = {family: tiny_target(family).facts.model_type for family in ("qwen3_5", "qwen3_5_vlm", "gemma3", "llava")}
    assert found == {"qwen3_5": "qwen3_5", "qwen3_5_vlm": "qwen3_5", "gemma3": "gemma3", "llava": "mistral"}
