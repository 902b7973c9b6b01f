"""Masks right by construction: named faults of others, over templates in the style of the common families."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from draftsmith.data.conversations import Conversation, Skip, parse_row
from draftsmith.data.tokenize import TokenizeConfig, tokenize_conversation
from draftsmith.errors import ConfigError, TargetError
from draftsmith.records import Document

ForTemplate = Callable[[str | None], PreTrainedTokenizerFast]
END = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "<|endoftext|>",
    "qwen3": "<|im_end|>",
    "qwen35": "<|im_end|>",
    "deepseek": "<|end_of_sentence|>",
    "tagged": "<|im_end|>",
    "upper": "<|end|>",
}
LEAD = {"mistral": " "}
"""What a template puts before an answer that its generation prompt doesn't supply: the assistant emits it."""
SPLITS = ("qwen3", "qwen35")
"""Templates that render the last turn with a thinking block and drop it from history: one row per turn."""


def chat(*pairs: tuple[str, str], **fields: Any) -> Conversation:
    parsed = parse_row({"messages": [{"role": role, "content": text} for role, text in pairs], **fields})
    assert isinstance(parsed, Conversation)
    return parsed


def documents(tokenizer: PreTrainedTokenizerFast, conversation: Conversation, **options: Any) -> list[Document]:
    result = tokenize_conversation(tokenizer, conversation, TokenizeConfig(**options))
    assert not isinstance(result, Skip), result
    return result


def skipped(tokenizer: PreTrainedTokenizerFast, conversation: Conversation, **options: Any) -> Skip:
    result = tokenize_conversation(tokenizer, conversation, TokenizeConfig(**options))
    assert isinstance(result, Skip)
    return result


def spans(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[str]:
    """Text of each unbroken run of supervised tokens."""
    runs: list[list[int]] = []
    previous = False
    for token, supervised in zip(document.token_ids.tolist(), document.loss_mask.tolist(), strict=True):
        if supervised and not previous:
            runs.append([])
        if supervised:
            runs[-1].append(token)
        previous = supervised
    return [tokenizer.decode(run) for run in runs]


def template_ids(tokenizer: PreTrainedTokenizerFast, messages: Any, **kwargs: Any) -> list[int]:
    return tokenizer.apply_chat_template(messages, return_dict=False, **kwargs)


TWO_TURNS = (
    ("user", "Hello there"),
    ("assistant", "I am fine."),
    ("user", "你好 😀 ⭢ e\u0301?"),
    ("assistant", "中文 👩‍👩‍👧 x = é"),
)


def test_A04_A34_every_turn_and_its_end_are_supervised_and_nothing_else(
    tokenizer_for: ForTemplate, template_name: str
) -> None:
    tokenizer = tokenizer_for(template_name)
    rows = documents(tokenizer, chat(*TWO_TURNS))
    assert len(rows) == (2 if template_name in SPLITS else 1)
    lead, end = LEAD.get(template_name, ""), END[template_name]
    found = [text for row in rows for text in spans(tokenizer, row)]
    assert found == [f"{lead}I am fine.{end}", f"{lead}中文 👩‍👩‍👧 x = é{end}"]
    messages = [{"role": role, "content": text} for role, text in TWO_TURNS]
    assert rows[-1].token_ids.tolist() == template_ids(tokenizer, messages)


def test_A05_template_that_changes_the_users_text(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("upper")
    (document,) = documents(
        tokenizer, chat(("user", "  msg two "), ("assistant", "msg two"), ("user", "a"), ("assistant", "b"))
    )
    assert "MSG TWO" in tokenizer.decode(document.token_ids)
    assert spans(tokenizer, document) == ["msg two<|end|>", "b<|end|>"]


@pytest.mark.parametrize("name", ["llama3", "gemma", "deepseek"])
def test_A06_role_marker_comes_from_the_template(tokenizer_for: ForTemplate, name: str) -> None:
    tokenizer = tokenizer_for(name)
    (document,) = documents(tokenizer, chat(*TWO_TURNS))
    assert all("assistant" not in text.lower().replace("<|assistant|>", "!") for text in spans(tokenizer, document))
    assert len(spans(tokenizer, document)) == 2


def test_A07_reasoning_stays_inside_the_assistants_span(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("qwen3")
    row = parse_row(
        {
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "reasoning_content": "r s", "content": "a"},
            ]
        }
    )
    assert isinstance(row, Conversation)
    (document,) = documents(tokenizer, row)
    assert spans(tokenizer, document) == ["<think>\nr s\n</think>\n\na<|im_end|>"]


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3"])
def test_A08_A09_template_without_generation_tags_is_neither_all_zero_nor_all_one(
    tokenizer_for: ForTemplate, name: str
) -> None:
    document = documents(tokenizer_for(name), chat(*TWO_TURNS))[-1]
    assert document.loss_mask.any()
    assert not document.loss_mask.all()


def test_A13_a_chinese_chat_under_a_template_without_generation_tags(tokenizer_for: ForTemplate) -> None:
    turns = (("user", "你好"), ("assistant", "你好。我可以帮你什么"), ("user", "世界"), ("assistant", "好的。"))
    tokenizer = tokenizer_for("chatml")
    (document,) = documents(tokenizer, chat(*turns))
    assert spans(tokenizer, document) == ["你好。我可以帮你什么<|im_end|>", "好的。<|im_end|>"]


def test_A10_unlocatable_turns_never_fall_back_to_all_tokens(tokenizer_for: ForTemplate) -> None:
    result = skipped(tokenizer_for("chatml"), chat(("user", "u"), ("assistant", "\n\nHello")))
    assert "merge with the generation prompt" in result.reason


def test_A11_ids_are_those_of_the_untouched_template(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("chatml")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [
        {"role": "system", "content": "one"},
        {"role": "system", "content": "two"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a b"},
    ]
    row = parse_row({"messages": messages, "tools": tools})
    assert isinstance(row, Conversation)
    (document,) = documents(tokenizer, row)
    assert document.token_ids.tolist() == template_ids(tokenizer, messages, tools=tools)


@pytest.mark.parametrize("name", ["chatml", "tagged"])
def test_A12_cut_assistant_turn_stays_supervised(tokenizer_for: ForTemplate, name: str) -> None:
    tokenizer = tokenizer_for(name)
    conversation = chat(("user", "u"), ("assistant", "The quick brown fox jumps over the lazy dog. " * 20))
    (whole,) = documents(tokenizer, conversation)
    (cut,) = documents(tokenizer, conversation, max_length=40)
    assert cut.loss_mask.tolist() == whole.loss_mask[:40].tolist()
    assert cut.loss_mask[-1]


@pytest.mark.parametrize("name", ["chatml", "tagged", "llama3"])
def test_A14_ids_and_mask_are_cut_at_the_same_place(tokenizer_for: ForTemplate, name: str) -> None:
    tokenizer = tokenizer_for(name)
    conversation = chat(("user", "u"), ("assistant", "Paris is the capital of France. " * 30))
    for limit in (30, 31, 57):
        (document,) = documents(tokenizer, conversation, max_length=limit)
        assert document.token_ids.shape == document.loss_mask.shape == (limit,)


def test_A16_filter_runs_after_the_cut_on_pretokenised_rows(tokenizer_for: ForTemplate) -> None:
    row = parse_row({"input_ids": list(range(30)), "loss_mask": [0] * 20 + [1] * 10})
    assert isinstance(row, Conversation)
    assert "within 20 tokens" in skipped(tokenizer_for("chatml"), row, max_length=20).reason
    (document,) = documents(tokenizer_for("chatml"), row, max_length=22)
    assert document.loss_mask.tolist() == [False] * 20 + [True] * 2


def test_A17_no_end_token_is_invented_at_a_cut(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("chatml")
    text = "The quick brown fox jumps over the lazy dog. " * 20
    (document,) = documents(tokenizer, chat(("user", "u"), ("assistant", text)), max_length=50)
    (whole,) = documents(tokenizer, chat(("user", "u"), ("assistant", text)))
    assert document.token_ids.tolist() == whole.token_ids[:50].tolist()
    assert not spans(tokenizer, document)[-1].endswith("<|im_end|>")
    assert spans(tokenizer, whole)[-1].endswith("<|im_end|>")


def test_finish_reason_length_supervises_no_end_token(tokenizer_for: ForTemplate, template_name: str) -> None:
    tokenizer = tokenizer_for(template_name)
    rows = documents(tokenizer, chat(*TWO_TURNS, finish_reason="length"))
    lead, end = LEAD.get(template_name, ""), END[template_name]
    assert [text for row in rows for text in spans(tokenizer, row)] == [
        f"{lead}I am fine.{end}",
        f"{lead}中文 👩‍👩‍👧 x = é",
    ]


def test_A18_conversation_without_a_user_turn_first(tokenizer_for: ForTemplate) -> None:
    assert isinstance(parse_row({"messages": []}), Skip)
    tokenizer = tokenizer_for("chatml")
    (document,) = documents(tokenizer, chat(("system", "s"), ("assistant", "Hello there")))
    assert spans(tokenizer, document) == ["Hello there<|im_end|>"]
    assert "nothing before it" in skipped(tokenizer, chat(("assistant", "Hello there"))).reason


def test_A20_tool_turns_with_null_content_are_kept(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("qwen3")
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = parse_row(
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
                {"role": "assistant", "content": "It is 2."},
            ]
        }
    )
    assert isinstance(row, Conversation)
    assert [set(message) for message in row.messages] == [
        {"role", "content"},
        {"role", "content"},
        {"role", "content", "tool_calls"},
        {"role", "content", "tool_call_id"},
        {"role", "content"},
    ]
    found = [text for document in documents(tokenizer, row) for text in spans(tokenizer, document)]
    assert found == [
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
        "It is 2.<|im_end|>",
    ]


def test_A21_reasoning_reaches_the_template(tokenizer_for: ForTemplate) -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        row = parse_row(
            {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", key: "why", "content": "a"}]}
        )
        assert isinstance(row, Conversation)
        (document,) = documents(tokenizer_for("qwen3"), row)
        assert "why" in spans(tokenizer_for("qwen3"), document)[0]


def test_A22_rows_without_metadata_are_kept(tokenizer_for: ForTemplate) -> None:
    for extra in ({}, {"metadata": None}, {"metadata": {"finish_reason": "stop"}}):
        assert documents(tokenizer_for("chatml"), chat(("user", "u"), ("assistant", "Hello"), **extra))


def test_A23_completion_after_an_opened_thinking_block(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("qwen35")
    completion = "2+2 equals 4.\n</think>\n\nThe answer is 4."
    (document,) = documents(tokenizer, chat(("user", "2+2"), ("assistant", completion)))
    prompt = template_ids(tokenizer, [{"role": "user", "content": "2+2"}], add_generation_prompt=True)
    sampled = tokenizer(completion + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert document.token_ids.tolist()[: len(prompt) + len(sampled)] == prompt + sampled
    assert spans(tokenizer, document) == [completion + "<|im_end|>"]


def test_A24_template_arguments_of_the_row_are_used_and_contradictions_refused(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("qwen3")
    conversation = chat(("user", "u"), ("assistant", "Hello"), chat_template_kwargs={"enable_thinking": False})
    (document,) = documents(tokenizer, conversation)
    assert spans(tokenizer, document) == ["Hello<|im_end|>"]
    refused = skipped(tokenizer, conversation, template_kwargs={"enable_thinking": True})
    assert "other template arguments" in refused.reason


def test_A24_token_ids_of_the_server_are_kept_and_checked(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("chatml")
    prompt = template_ids(tokenizer, [{"role": "user", "content": "u"}], add_generation_prompt=True)
    odd = [tokenizer.convert_tokens_to_ids(letter) for letter in "Hello"]
    fields = {"prompt_token_ids": prompt, "completion_token_ids": odd}
    (document,) = documents(tokenizer, chat(("user", "u"), ("assistant", "Hello"), **fields))
    assert document.token_ids.tolist() == prompt + odd
    assert spans(tokenizer, document) == ["Hello"]
    other = chat(("user", "v"), ("assistant", "Hello"), **fields)
    assert "saved prompt tokens" in skipped(tokenizer, other).reason
    beyond = chat(("user", "u"), ("assistant", "Hello"), prompt_token_ids=prompt, completion_token_ids=[10**6, 1])
    assert "beyond the target's vocabulary" in skipped(tokenizer, beyond).reason


REASONED = {
    "messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "reasoning_content": "first thought", "content": "answer one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "reasoning_content": "second thought", "content": "answer two"},
    ]
}


def test_A25_rewritten_history_gives_one_row_per_turn(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("qwen3")
    row = parse_row(REASONED)
    assert isinstance(row, Conversation)
    first, second = documents(tokenizer, row)
    assert spans(tokenizer, first) == ["<think>\nfirst thought\n</think>\n\nanswer one<|im_end|>"]
    assert spans(tokenizer, second) == ["<think>\nsecond thought\n</think>\n\nanswer two<|im_end|>"]
    assert first.token_ids.tolist() == template_ids(tokenizer, REASONED["messages"][:2])
    assert second.token_ids.tolist() == template_ids(tokenizer, REASONED["messages"])
    assert "rewrites earlier turns" in skipped(tokenizer, row, rewritten_history="refuse").reason


def test_A25_reasoning_dropped_from_history_in_deepseek_style(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("deepseek")
    rows = documents(
        tokenizer,
        chat(("user", "u"), ("assistant", "<think>t</think>one"), ("user", "v"), ("assistant", "<think>t</think>two")),
    )
    end = "<|end_of_sentence|>"
    assert [spans(tokenizer, row) for row in rows] == [[f"<think>t</think>one{end}"], [f"<think>t</think>two{end}"]]


def test_A26_last_turn_only_holds_on_every_path(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("chatml")
    (document,) = documents(tokenizer, chat(*TWO_TURNS), last_turn_only=True)
    assert len(spans(tokenizer, document)) == 1
    rendered = tokenizer.decode(document.token_ids)
    for row in (
        {"text": rendered},
        {"input_ids": list(range(60, 80)), "loss_mask": [1] * 5 + [0] * 5 + [1] * 5 + [0] * 5},
    ):
        parsed = parse_row(row)
        assert isinstance(parsed, Conversation)
        (document,) = documents(tokenizer, parsed, last_turn_only=True)
        assert len(spans(tokenizer, document)) == 1
    reasoned = parse_row(REASONED)
    assert isinstance(reasoned, Conversation)
    (document,) = documents(tokenizer_for("qwen3"), reasoned, last_turn_only=True)
    assert "second thought" in spans(tokenizer_for("qwen3"), document)[0]


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_A27_empty_thinking_block_and_role_header_get_no_loss(tokenizer_for: ForTemplate, name: str) -> None:
    tokenizer = tokenizer_for(name)
    (document,) = documents(tokenizer, chat(("user", "u"), ("assistant", "Hello there")))
    assert "<think>\n\n</think>\n\nHello there" in tokenizer.decode(document.token_ids)
    assert spans(tokenizer, document) == ["Hello there<|im_end|>"]


def test_A27_end_of_turn_that_is_not_eos(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("gemma")
    assert tokenizer.eos_token != "<end_of_turn>"
    (document,) = documents(tokenizer, chat(*TWO_TURNS))
    assert [text.count("<end_of_turn>") for text in spans(tokenizer, document)] == [1, 1]


def test_A31_tokenizer_without_a_template_names_the_remedy(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for(None)
    with pytest.raises(TargetError, match="no chat template: use the instruct"):
        documents(tokenizer, chat(*TWO_TURNS))
    text = parse_row({"text": "Hello there, how are you"})
    assert isinstance(text, Conversation)
    with pytest.raises(TargetError, match="--text-rows all"):
        documents(tokenizer, text)
    (document,) = documents(tokenizer, text, text_rows="all")
    assert document.loss_mask.all()


@pytest.mark.parametrize("text", ["i ⭢ j", "中 文", "e\u0301\u0301 🇫🇷🇩🇪", "👩‍👩‍👧\u200d", "\uff21\uff22"])
def test_A32_multi_byte_text_keeps_exact_borders(tokenizer_for: ForTemplate, template_name: str, text: str) -> None:
    tokenizer = tokenizer_for(template_name)
    (document,) = documents(tokenizer, chat(("user", text), ("assistant", text)))
    assert spans(tokenizer, document) == [LEAD.get(template_name, "") + text + END[template_name]]


def test_A33_interior_zeros_of_a_given_mask_stay_where_they_are(tokenizer_for: ForTemplate) -> None:
    row = parse_row({"input_ids": [70, 71, 72, 73, 74, 75], "loss_mask": [1, 1, 0, 0, 1, 1]})
    assert isinstance(row, Conversation)
    (document,) = documents(tokenizer_for("chatml"), row)
    assert document.loss_mask.tolist() == [True, True, False, False, True, True]


def test_strict_templates_refuse_with_their_own_words(tokenizer_for: ForTemplate) -> None:
    wrong_order = chat(("user", "a"), ("user", "b"), ("assistant", "Hello"))
    for name in ("gemma", "mistral"):
        refused = skipped(tokenizer_for(name), wrong_order)
        assert refused.reason == "the template doesn't take the conversation"
        assert "alternate" in refused.detail
    assert (
        "System role"
        in skipped(tokenizer_for("gemma"), chat(("system", "s"), ("user", "u"), ("assistant", "a"))).detail
    )


def test_generation_tags_locate_a_turn_that_the_prefix_cannot(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("tagged")
    (document,) = documents(tokenizer, chat(("user", "u"), ("assistant", "Hello")))
    assert spans(tokenizer, document) == ["Hello<|im_end|>"]
    refused = skipped(tokenizer, chat(("user", "u"), ("assistant", "\n\nHello")))
    assert "merge" in refused.reason, "a tag inside a token is no border"


def test_generation_tags_are_used_where_the_prompt_is_not_a_prefix(tokenizer_for: ForTemplate) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"
    )
    tokenizer = tokenizer_for("chatml").__class__(tokenizer_object=tokenizer_for("chatml").backend_tokenizer)
    tokenizer.chat_template = template
    (document,) = documents(tokenizer, chat(*TWO_TURNS))
    assert spans(tokenizer, document) == ["I am fine.<|im_end|>", "中文 👩‍👩‍👧 x = é<|im_end|>"]
    tokenizer.chat_template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert "drops or rewrites" in skipped(tokenizer, chat(*TWO_TURNS)).reason


def test_text_after_the_end_token_is_not_supervised(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("chatml")
    (document,) = documents(tokenizer, chat(("user", "u"), ("assistant", "Hello")))
    assert tokenizer.decode(document.token_ids).endswith("<|im_end|>\n")
    assert not document.loss_mask[-1]
    assert document.loss_mask[-2]


def test_template_that_ends_the_whole_with_eos(tokenizer_for: ForTemplate) -> None:
    """Phi style: eos after the last turn's own end; the assistant emits only its own end."""
    (document,) = documents(tokenizer_for("upper"), chat(*TWO_TURNS))
    assert not document.loss_mask[-1]


def test_prompt_and_completion(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("chatml")
    plain = parse_row({"prompt": "Hello", "completion": "I am fine."})
    rendered = parse_row(
        {"prompt": "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "completion": "I am fine."}
    )
    assert isinstance(plain, Conversation)
    assert isinstance(rendered, Conversation)
    assert spans(tokenizer, documents(tokenizer, plain)[0]) == ["I am fine.<|im_end|>"]
    assert spans(tokenizer, documents(tokenizer, rendered)[0]) == ["I am fine."]
    merged = parse_row({"prompt": "<|im_start|>a\n", "completion": "\nb c"})
    assert isinstance(merged, Conversation)
    assert "merge" in skipped(tokenizer, merged).reason


def test_rendered_text_is_supervised_by_the_generation_prompts_tokens(
    tokenizer_for: ForTemplate, template_name: str
) -> None:
    tokenizer = tokenizer_for(template_name)
    document = documents(tokenizer, chat(*TWO_TURNS))[-1]
    row = parse_row({"text": tokenizer.decode(document.token_ids)})
    assert isinstance(row, Conversation)
    if template_name == "mistral":
        assert "no token of its own" in skipped(tokenizer, row).reason
        return
    (again,) = documents(tokenizer, row)
    assert spans(tokenizer, again)[-1] == spans(tokenizer, document)[-1]
    if template_name not in SPLITS:
        assert again.loss_mask.tolist() == document.loss_mask.tolist()
    plain = parse_row({"text": "Hello there"})
    assert isinstance(plain, Conversation)
    assert "no assistant turn" in skipped(tokenizer, plain).reason


def test_answer_that_holds_an_end_token_is_refused(tokenizer_for: ForTemplate) -> None:
    refused = skipped(tokenizer_for("chatml"), chat(("user", "u"), ("assistant", "a<|im_end|>\nb")))
    assert "end-of-turn token inside" in refused.reason


def test_turn_of_weight_zero_is_context_only(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("chatml")
    row = parse_row({"messages": [{"role": r, "content": t, "weight": int(t != "I am fine.")} for r, t in TWO_TURNS]})
    assert isinstance(row, Conversation)
    assert len(spans(tokenizer, documents(tokenizer, row)[0])) == 1


def test_empty_answer_and_far_ids_are_skipped(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("chatml")
    assert skipped(tokenizer, chat(("user", "u"), ("assistant", ""))).reason == "no two supervised tokens in a row"
    far = parse_row({"input_ids": [1, 2, 10**6], "loss_mask": [1, 1, 1]})
    assert isinstance(far, Conversation)
    assert "beyond the target's vocabulary" in skipped(tokenizer, far).reason


def test_options_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-length"):
        TokenizeConfig(max_length=1)
    with pytest.raises(ConfigError, match="--template-kwargs"):
        TokenizeConfig(template_kwargs={"tools": "x"})


WORDS = st.text(st.sampled_from(list("ab \n\t.é中文😀e\u0301\u200d?<>|/")), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(WORDS, min_size=2, max_size=6),
    name=st.sampled_from(sorted(END)),
    limit=st.integers(2, 80),
    cut=st.booleans(),
)
def test_supervised_text_is_the_assistants_own_or_the_row_is_refused(
    tokenizer_for: ForTemplate, texts: list[str], name: str, limit: int, cut: bool
) -> None:
    tokenizer = tokenizer_for(name)
    texts = texts[: len(texts) // 2 * 2]
    pairs = [("user" if index % 2 == 0 else "assistant", text) for index, text in enumerate(texts)]
    conversation = chat(*pairs, finish_reason="length" if cut else "stop")
    result = tokenize_conversation(tokenizer, conversation, TokenizeConfig())
    if isinstance(result, Skip):
        assert result.reason
        return
    strip = str.strip if name in ("llama3", "gemma") else str
    expected = [LEAD.get(name, "") + strip(text) + END[name] for text in texts[1::2]]
    if cut:
        expected[-1] = expected[-1].removesuffix(END[name])
    messages = [{"role": role, "content": text} for role, text in pairs]
    prefixes = [template_ids(tokenizer, messages[: size + 1]) for size in range(1, len(messages), 2)]
    for document in result:
        assert document.token_ids.tolist() in prefixes
        assert set(spans(tokenizer, document)) <= set(expected)
    shorter = tokenize_conversation(tokenizer, conversation, TokenizeConfig(max_length=limit))
    if not isinstance(shorter, Skip):
        for document in shorter:
            whole = next(d for d in result if d.token_ids[:limit].equal(document.token_ids))
            assert document.loss_mask.equal(whole.loss_mask[:limit])


def test_a_cut_rendered_text_learns_no_end_token(tokenizer_for: ForTemplate) -> None:
    tokenizer = tokenizer_for("chatml")
    text = "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>\n"
    runs: list[list[str]] = []
    for reason in ("stop", "length"):
        conversation = parse_row({"text": text, "finish_reason": reason})
        assert isinstance(conversation, Conversation)
        runs.append(spans(tokenizer, documents(tokenizer, conversation)[0]))
    assert runs == [["Hello there<|im_end|>"], ["Hello there"]]


@pytest.mark.parametrize("name", ["chat_template", "messages", "continue_final_message", "tokenizer_kwargs"])
def test_no_row_and_no_option_replaces_the_template(tokenizer_for: ForTemplate, name: str) -> None:
    conversation = chat(*TWO_TURNS, chat_template_kwargs={name: "x"})
    assert "replace the template" in skipped(tokenizer_for("chatml"), conversation).reason
    with pytest.raises(ConfigError, match=f"can't set '{name}'"):
        TokenizeConfig(template_kwargs={name: "x"})


def test_bare_text_begins_as_a_server_would_begin_it(tokenizer_for: ForTemplate) -> None:
    """A Llama-like tokenizer puts its first token before a bare prompt, once, and templates bring their own."""
    bare = tokenizer_for(None)
    tokenizer = copy.deepcopy(bare)
    begin = "<|begin|>"
    first = tokenizer.convert_tokens_to_ids(begin)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, first)]
    )
    for text, completion in (("Hello there", " how are you"), (begin + "Hello there", " how are you")):
        pair = Conversation(text=text, completion=completion)
        ids = documents(tokenizer, pair)[0].token_ids.tolist()
        assert ids == tokenizer("Hello there how are you")["input_ids"]
        assert ids[:2].count(first) == 1
        plain = documents(tokenizer, Conversation(text=text), text_rows="all")[0]
        assert plain.token_ids.tolist()[:2].count(first) == 1
    assert first not in documents(bare, Conversation(text="Hello", completion=" there how"))[0].token_ids.tolist()


LONG = "word and \u4e2d\u6587 " * 4_000
ODD_CHATS = {
    "two system messages": (("system", "first"), ("system", "second"), ("user", "u"), ("assistant", "Fine then.")),
    "empty question": (("user", ""), ("assistant", "Fine then.")),
    "empty answer before another": (("user", "u"), ("assistant", ""), ("user", "v"), ("assistant", "Fine then.")),
    "very long turns": (("user", LONG), ("assistant", LONG.strip()), ("user", "v"), ("assistant", "Fine then.")),
    "combining and joined characters": (("user", "e\u0301\u0323"), ("assistant", "n\u0303 👨‍👩‍👧‍👦 🏳️‍🌈 ﷽")),
    "A13 Chinese": (("user", "你好吗?"), ("assistant", "我很好。"), ("user", "谢谢"), ("assistant", "不客气。")),
}


@pytest.mark.parametrize("case", ODD_CHATS)
def test_odd_conversations_are_exact_or_refused(tokenizer_for: ForTemplate, template_name: str, case: str) -> None:
    tokenizer, turns = tokenizer_for(template_name), ODD_CHATS[case]
    conversation = chat(*turns)
    result = tokenize_conversation(tokenizer, conversation, TokenizeConfig(max_length=200_000))
    if isinstance(result, Skip):
        assert "template" in result.reason
        assert case == "two system messages"
        return
    lead, end = LEAD.get(template_name, ""), END[template_name]
    own = [f"{lead}{text}{end}" for role, text in turns if role == "assistant" and text]
    found = [text for row in result for text in spans(tokenizer, row)]
    assert [text for text in found if text not in (end, lead + end)] == own
    messages = [{"role": role, "content": text} for role, text in turns]
    assert result[-1].token_ids.tolist() == template_ids(tokenizer, messages)


def test_A15_a_row_with_an_image_is_refused_not_cut() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": LONG}]
    row = parse_row({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "a b"}]})
    assert isinstance(row, Skip)
    assert "images and audio can't be drafted for" in row.reason
