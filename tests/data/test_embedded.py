from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.data.conversations import Skip
from draftsmith.data.embedded import EmbeddedGenerate, pick
from draftsmith.data.regenerate import Answer, Prompt, SamplingConfig
from draftsmith.errors import ConfigError, TargetError

ForTemplate = Callable[[str | None], PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=480,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def prompts(*texts: str) -> list[Prompt]:
    return [
        Prompt(messages=[{"role": "user", "content": text}], tools=(), template_kwargs={}, seed=index)
        for index, text in enumerate(texts)
    ]


def answers(generate: EmbeddedGenerate, asked: list[Prompt]) -> list[Answer]:
    given = generate(asked)
    assert all(isinstance(answer, Answer) for answer in given)
    return [answer for answer in given if isinstance(answer, Answer)]


def test_greedy_answers_equal_the_models_own_generate(tokenizer_for: ForTemplate, model: LlamaForCausalLM) -> None:
    tokenizer = tokenizer_for("chatml")
    sampling = SamplingConfig(temperature=0, max_new_tokens=12)
    asked = prompts("a", "Hello there, how are you today?", "中文")
    for answer, prompt in zip(answers(EmbeddedGenerate(model, tokenizer, sampling), asked), asked, strict=True):
        ids = tokenizer.apply_chat_template(
            prompt.messages, add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
        )  # fmt: skip
        assert answer.prompt_ids == tuple(ids[0].tolist())
        assert answer.completion_ids == tuple(whole[0, ids.shape[1] :].tolist())
        assert answer.message["content"] == tokenizer.decode(list(answer.completion_ids or ()))
        assert answer.finish_reason == "length"


def test_an_answer_is_the_same_in_any_batch(tokenizer_for: ForTemplate, model: LlamaForCausalLM) -> None:
    tokenizer, sampling = tokenizer_for("chatml"), SamplingConfig(max_new_tokens=8, top_p=0.9)
    asked = prompts("a", "Hello there, how are you today?", "b c")
    together = EmbeddedGenerate(model, tokenizer, sampling)
    alone = EmbeddedGenerate(model, tokenizer, sampling, batch_size=1)
    assert answers(together, asked) == answers(alone, asked)
    before = torch.get_rng_state()
    answers(together, asked)
    assert torch.get_rng_state().equal(before)


def test_an_end_token_ends_the_answer(tokenizer_for: ForTemplate, model: LlamaForCausalLM) -> None:
    tokenizer, sampling = tokenizer_for("chatml"), SamplingConfig(temperature=0, max_new_tokens=10)
    first = answers(EmbeddedGenerate(model, tokenizer, sampling), prompts("a"))[0].completion_ids
    assert first is not None
    stop = first[3]
    ended = answers(EmbeddedGenerate(model, tokenizer, sampling, end_token_ids=(stop,)), prompts("a"))[0]
    expected = first[: first.index(stop) + 1]
    assert ended.completion_ids == expected
    assert ended.finish_reason == "stop"
    assert ended.message["content"] == tokenizer.decode(list(expected[:-1]))


def test_prompts_that_cannot_be_answered_are_skipped_in_place(
    tokenizer_for: ForTemplate, model: LlamaForCausalLM
) -> None:
    sampling = SamplingConfig(max_new_tokens=4)
    given = EmbeddedGenerate(model, tokenizer_for("chatml"), sampling)(prompts("word " * 100, "a"))
    assert isinstance(given[0], Skip)
    assert "no room" in given[0].reason
    assert isinstance(given[1], Answer)
    system = Prompt(messages=[{"role": "system", "content": "s"}], tools=(), template_kwargs={}, seed=0)
    (refused,) = EmbeddedGenerate(model, tokenizer_for("gemma"), sampling)([system])
    assert isinstance(refused, Skip)
    assert "System role" in refused.detail


def test_what_cannot_generate_is_refused(tokenizer_for: ForTemplate, model: LlamaForCausalLM) -> None:
    with pytest.raises(TargetError, match="no chat template"):
        EmbeddedGenerate(model, tokenizer_for(None), SamplingConfig())(prompts("a"))
    with pytest.raises(ConfigError, match="at least 1"):
        EmbeddedGenerate(model, tokenizer_for("chatml"), SamplingConfig(), batch_size=0)


def test_top_p_keeps_the_smallest_set() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = {pick(logits, SamplingConfig(top_p=0.7), generator) for _ in range(200)}
    assert drawn == {0, 1}
    assert {pick(logits, SamplingConfig(), generator) for _ in range(300)} == {0, 1, 2, 3}
    assert pick(logits, SamplingConfig(temperature=0), generator) == 0
