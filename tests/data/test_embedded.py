from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from draftsmith.data.conversations import Skip
from draftsmith.data.embedded import EmbeddedGenerate, pick
from draftsmith.data.regenerate import Answer, Prompt, RegenerateConfig, SamplingConfig, answer_all, regenerate
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
        initializer_range=0.3,  # of 0.02, what a row attends to would hardly change its answer
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
    given = answer_all(generate, asked)
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


WORDS = ["a", "Hello there, how are you today?", "b c", "中文", "The quick brown fox jumps over the lazy dog."]


class _Counted:
    """Rows of each forward that reads one token a row."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.widths: list[int] = []
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs["past_key_values"] is not None:
            self.widths.append(len(kwargs["input_ids"]))

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def test_rows_join_and_leave_while_others_go_on(tokenizer_for: ForTemplate, model: LlamaForCausalLM) -> None:
    """Answers of very different lengths: the same as alone, and the batch is nearly always full."""
    tokenizer, sampling = tokenizer_for("chatml"), SamplingConfig(max_new_tokens=40)
    ends = tuple(range(0, 480, 12))
    asked = prompts(*(f"{WORDS[index % 5]} {index}" for index in range(48)))
    alone = answers(EmbeddedGenerate(model, tokenizer, sampling, end_token_ids=ends, batch_size=1), asked)
    with _Counted(model) as counted:
        together = answers(EmbeddedGenerate(model, tokenizer, sampling, end_token_ids=ends, batch_size=6), asked)
    assert together == alone
    lengths = [len(answer.completion_ids or ()) for answer in alone]
    assert max(lengths) > 5 * min(lengths) > 0
    assert {answer.finish_reason for answer in alone} == {"stop", "length"}
    assert max(counted.widths) == 6
    used = sum(counted.widths) / (6 * len(counted.widths))
    by_batches = sum(lengths) / sum(6 * max(lengths[start : start + 6]) for start in range(0, 48, 6))
    assert used > 0.8 > 0.6 > by_batches, f"{used:.0%} of the places; batch after batch {by_batches:.0%}"
    assert sum(counted.widths) == sum(lengths) - len(lengths), "no row is read after its end"


def test_a_model_whose_cache_cannot_be_taken_apart_answers_the_same(tokenizer_for: ForTemplate) -> None:
    """Sliding windows: one batch after another."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=480, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, head_dim=16, sliding_window=8, max_position_embeddings=96,
                layer_types=["sliding_attention", "full_attention"], initializer_range=0.3,
            )
        ).eval()  # fmt: skip
    tokenizer, sampling = tokenizer_for("chatml"), SamplingConfig(max_new_tokens=12)
    ends, asked = tuple(range(0, 480, 12)), prompts(*WORDS, "d", "e")
    alone = answers(EmbeddedGenerate(model, tokenizer, sampling, end_token_ids=ends, batch_size=1), asked)
    with _Counted(model) as counted:
        together = answers(EmbeddedGenerate(model, tokenizer, sampling, end_token_ids=ends, batch_size=3), asked)
    assert together == alone
    assert len({len(answer.completion_ids or ()) for answer in alone}) > 1
    assert set(counted.widths) == {3, 1}, "rows that ended stay until all have"


def test_prompts_of_like_length_are_read_together_and_none_is_left_behind(
    tokenizer_for: ForTemplate, model: LlamaForCausalLM
) -> None:
    tokenizer, sampling = tokenizer_for("chatml"), SamplingConfig(temperature=0, max_new_tokens=2)
    generate = EmbeddedGenerate(model, tokenizer, sampling, batch_size=2)
    for ticket, prompt in enumerate(prompts("word " * 10, "a", "b", "word " * 9 + "a", "c")):
        generate.start(ticket, prompt)
    order: list[set[int]] = []
    while answered := generate.finished():
        order.append({ticket for ticket, _ in answered})
    assert order == [{0, 3}, {1, 2}, {4}]


def test_an_embedded_regeneration_goes_on_after_a_kill(
    tokenizer_for: ForTemplate, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    chats, tokenizer, sampling = tmp_path / "chats.jsonl", tokenizer_for("chatml"), SamplingConfig(max_new_tokens=20)
    rows = [{"messages": [{"role": "user", "content": f"{WORDS[index % 5]} {index}"}]} for index in range(30)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, ends = RegenerateConfig(sampling=sampling), tuple(range(0, 480, 12))

    class Dying(EmbeddedGenerate):
        lives = 20

        def start(self, ticket: int, prompt: Prompt) -> None:
            Dying.lives -= 1
            if Dying.lives < 0:
                raise KeyboardInterrupt
            super().start(ticket, prompt)

    def generate(kind: type[EmbeddedGenerate]) -> EmbeddedGenerate:
        return kind(model, tokenizer, sampling, end_token_ids=ends, batch_size=2)

    regenerate(chats, tmp_path / "whole.jsonl", generate(EmbeddedGenerate), config)
    with pytest.raises(KeyboardInterrupt):
        regenerate(chats, tmp_path / "own.jsonl", generate(Dying), config)
    kept = len((tmp_path / "own.jsonl.partial").read_text().splitlines()) - 1
    assert 4 <= kept < 20
    regenerate(chats, tmp_path / "own.jsonl", generate(EmbeddedGenerate), config)
    assert (tmp_path / "own.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


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
    given = answer_all(EmbeddedGenerate(model, tokenizer_for("chatml"), sampling), prompts("word " * 100, "a"))
    assert isinstance(given[0], Skip)
    assert "no room" in given[0].reason
    assert isinstance(given[1], Answer)
    system = Prompt(messages=[{"role": "system", "content": "s"}], tools=(), template_kwargs={}, seed=0)
    (refused,) = answer_all(EmbeddedGenerate(model, tokenizer_for("gemma"), sampling), [system])
    assert isinstance(refused, Skip)
    assert "System role" in refused.detail


def test_what_cannot_generate_is_refused(tokenizer_for: ForTemplate, model: LlamaForCausalLM) -> None:
    with pytest.raises(TargetError, match="no chat template"):
        EmbeddedGenerate(model, tokenizer_for(None), SamplingConfig()).start(0, prompts("a")[0])
    with pytest.raises(ConfigError, match="at least 1"):
        EmbeddedGenerate(model, tokenizer_for("chatml"), SamplingConfig(), batch_size=0)


def test_top_p_keeps_the_smallest_set() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = {pick(logits, SamplingConfig(top_p=0.7), generator) for _ in range(200)}
    assert drawn == {0, 1}
    assert {pick(logits, SamplingConfig(), generator) for _ in range(300)} == {0, 1, 2, 3}
    assert pick(logits, SamplingConfig(temperature=0), generator) == 0
