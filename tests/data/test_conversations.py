from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from draftsmith.data.conversations import Conversation, Skip, parse_row
from draftsmith.data.convert import Converted, RowConverter
from draftsmith.data.sources import RawRow
from draftsmith.data.tokenize import TokenizeConfig
from tests.data.mutated import HARMFUL, HARMLESS, SEEDS, messages_of, mutated_line

ForTemplate = Callable[[str | None], PreTrainedTokenizerFast]
PAIR = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]


def parsed(row: Any) -> Conversation:
    conversation = parse_row(row, "here")
    assert isinstance(conversation, Conversation), conversation
    return conversation


def roles(row: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in parsed(row).messages]


def refused(row: Any) -> str:
    skip = parse_row(row)
    assert isinstance(skip, Skip)
    return f"{skip.reason}: {skip.detail}"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": PAIR},
        {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
        {"conversation": PAIR},
        PAIR,
        {"messages": json.dumps(PAIR)},
        {"prompt": PAIR[:1], "completion": PAIR[1:]},
        {"prompt": PAIR[:1], "completion": "a"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}, PAIR[1]]},
        {"messages": [{"role": "USER", "content": "u", "name": None, "tool_calls": None}, PAIR[1]]},
        {"request": {"messages": PAIR[:1]}, "response": {"choices": [{"message": PAIR[1], "finish_reason": "stop"}]}},
        {
            "request_body": json.dumps({"messages": PAIR[:1]}),
            "response_body": json.dumps({"choices": [{"message": PAIR[1]}]}),
        },
        {"body": {"messages": PAIR[:1]}, "response": {"status_code": 200, "body": {"choices": [{"message": PAIR[1]}]}}},
    ],
)
def test_every_form_gives_the_same_conversation(row: Any) -> None:
    assert roles(row) == [("user", "u"), ("assistant", "a")]
    assert parsed(row).source == "here"


def test_system_tools_and_arguments_are_carried() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": None}}]
    for given_tools in (tools, json.dumps(tools)):
        row = {
            "system": "s",
            "conversations": PAIR,
            "tools": given_tools,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        conversation = parsed(row)
        assert conversation.messages[0] == {"role": "system", "content": "s"}
        assert conversation.tools == ({"type": "function", "function": {"name": "f"}},)
        assert conversation.template_kwargs == {"enable_thinking": False}
    assert roles({"system": "s", "messages": [{"role": "system", "content": "own"}, *PAIR]})[0] == ("system", "own")


def test_shared_gpt_function_calls() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "u"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "a"},
        ]
    }
    messages = parsed(row).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def test_logs_carry_finish_reason_tools_and_token_ids() -> None:
    choice = {"message": {"role": "assistant", "content": "a"}, "finish_reason": "length", "token_ids": [5, 6]}
    conversation = parsed(
        {"request": {"messages": PAIR[:1], "tools": []}, "response": {"choices": [choice], "prompt_token_ids": [1, 2]}}
    )
    assert conversation.was_cut
    assert (conversation.prompt_ids, conversation.completion_ids) == ((1, 2), (5, 6))
    completions = {"request": {"prompt": "p"}, "response": {"choices": [{"text": "c", "finish_reason": "stop"}]}}
    assert (parsed(completions).text, parsed(completions).completion) == ("p", "c")


def test_labels_stand_for_a_mask() -> None:
    conversation = parsed({"input_ids": [4, 5, 6], "labels": [-100, 5, 6]})
    assert conversation.loss_mask == (False, True, True)


def test_thoughts_in_content_parts() -> None:
    parts = [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}, "b"]
    message = parsed({"messages": [PAIR[0], {"role": "assistant", "content": parts}]}).messages[1]
    assert message == {"role": "assistant", "content": "a\nb", "reasoning_content": "t"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (3, "isn't a JSON object: int"),
        ({}, "no messages, conversations"),
        ({"messages": 3}, "messages aren't a list"),
        ({"messages": []}, "no messages"),
        ({"messages": [3]}, "a message isn't an object"),
        ({"messages": PAIR[:1]}, "no assistant turn"),
        ({"messages": [{"role": "robot", "content": "u"}]}, "unknown role: robot"),
        ({"messages": [{"role": ["user"], "content": "u"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": 3}]}, "neither text nor parts: int"),
        ({"messages": [{"role": "user", "content": [3]}]}, "part isn't an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "can't be drafted for\\): image_url"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "tool call isn't an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}, "without a function name"),
        ({"messages": PAIR, "tools": 3}, "tools aren't a list"),
        ({"messages": PAIR, "chat_template_kwargs": [3]}, "chat_template_kwargs isn't an object"),
        ({"messages": PAIR, "prompt_token_ids": [1], "completion_token_ids": [-1]}, "isn't a token id"),
        ({"messages": [{"role": "user", "content": "\ud800"}, PAIR[1]]}, "surrogate"),
        ({"text": 3}, "`text` isn't a string: int"),
        ({"prompt": 3, "completion": "a"}, "neither strings nor message lists"),
        ({"input_ids": [1]}, "without loss_mask"),
        ({"input_ids": 1, "loss_mask": [1]}, "isn't a list"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "differ in length: 2 and 1"),
        ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, "isn't a token id"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "other than 0 and 1"),
        ({"request": 3, "response": {}}, "isn't an object"),
        ({"request": {}, "response": {"error": "boom"}}, "without choices: boom"),
        ({"request": {}, "response": {"choices": [{"message": 3}]}}, "without a message"),
    ],
)
def test_unusable_rows_say_why(row: Any, reason: str) -> None:
    found = refused(row)
    assert re.search(reason, found), found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["messages", "role", "content", "from", "value", "input_ids", "loss_mask", "text", "prompt", "completion",
         "request", "response", "choices", "message", "tools", "tool_calls", "function", "name", "system", "weight"]
    ), inner, max_size=5),
    max_leaves=25,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(row=JSON)
def test_any_json_value_is_a_conversation_or_a_reason(row: Any) -> None:
    result = parse_row(row)
    assert isinstance(result, Conversation) or result.reason


HALF = "a \ud83d"
CALL = {"function": {"name": "f", "arguments": {"k": 1}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [PAIR[0], {"role": "assistant", "tool_calls": [{"function": {"name": HALF}}]}]},
        {"messages": [PAIR[0], {"role": "assistant", "tool_calls": [{**CALL, "id": HALF}]}]},
        {
            "messages": [
                PAIR[0],
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [HALF]}}]},
            ]
        },
        {"messages": PAIR, "tools": [{"function": {"name": "f", "description": HALF}}]},
        {"messages": PAIR, "chat_template_kwargs": {HALF: 1}},
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_hides(fields: dict[str, Any]) -> None:
    result = parse_row(json.loads(json.dumps(fields)))
    assert isinstance(result, Skip)
    assert result.reason == "text holds half of a surrogate pair"


@pytest.mark.parametrize("place", ["tools", "arguments"])
def test_deep_nesting_is_refused_before_a_template_recurses(place: str) -> None:
    def row(depth: int) -> dict[str, Any]:
        value = json.loads('{"k":' * depth + "1" + "}" * depth)
        call = {"function": {"name": "f", "arguments": value}}
        messages = [PAIR[0], {"role": "assistant", "tool_calls": [call]}] if place == "arguments" else PAIR
        return {"messages": messages, "tools": [value]}

    assert isinstance(parse_row(row(90)), Conversation)
    result = parse_row(row(900))
    assert isinstance(result, Skip)
    assert result.reason == "nested too deep"


def test_a_logged_answer_needs_no_role() -> None:
    answer = {"choices": [{"message": {"content": "a b"}, "finish_reason": "stop"}]}
    logged = parse_row({"request": {"messages": PAIR[:1]}, "response": answer})
    assert isinstance(logged, Conversation)
    assert logged.messages[-1] == {"role": "assistant", "content": "a b"}


def fuzz(tokenizer_for: ForTemplate, num_rows: int, seed: int) -> Counter[str]:
    generator = np.random.Generator(np.random.PCG64(seed))
    converters = [
        RowConverter(tokenizer_for(name), TokenizeConfig(max_length=60), "drop-near")
        for name in ("chatml", "gemma", "mistral", "qwen3", "deepseek", "tagged")
    ]
    outcomes: Counter[str] = Counter()
    for index in range(num_rows):
        line = mutated_line(index, generator)
        converted = converters[index % len(converters)].convert(RawRow(f"fuzz:{index}", line))
        if isinstance(converted.outcome, Skip):
            assert converted.outcome.reason
            outcomes[converted.outcome.reason] += 1
        else:
            outcomes["kept"] += 1
            for packed in converted.packed:
                assert 2 <= len(packed.ids) == len(packed.mask) <= 60
                assert np.any(packed.mask[:-1] & packed.mask[1:])
    assert outcomes.total() == num_rows
    return outcomes


def test_mutated_rows_are_kept_or_explained(tokenizer_for: ForTemplate) -> None:
    outcomes = fuzz(tokenizer_for, 600, seed=0)
    assert len(outcomes) > 10


@pytest.mark.long
def test_ten_thousand_mutated_rows_are_kept_or_explained(tokenizer_for: ForTemplate) -> None:
    outcomes = fuzz(tokenizer_for, 10_000, seed=1)
    assert len(outcomes) < 60, "reasons stay countable"


NOT_TAKEN = "the template doesn't take the conversation"
REFUSED_SEEDS: dict[str, dict[int, str]] = {
    "gemma": {
        0: NOT_TAKEN, 1: NOT_TAKEN, 2: "no two supervised tokens in a row",
        4: "no assistant turn in the pre-rendered text",
    },
    "mistral": {
        0: NOT_TAKEN, 1: NOT_TAKEN,
        4: "pre-rendered text, and the template's generation prompt has no token of its own to go by",
    },
    "deepseek": {4: "no assistant turn in the pre-rendered text"},
}  # fmt: skip
"""By template, places in `SEEDS`: system turns that it raises on, calls that it doesn't render, text of another."""
TEMPLATE_NAMES = ("chatml", "gemma", "mistral", "qwen3", "deepseek", "tagged")


def converted(tokenizer_for: ForTemplate, template: str, row: Any) -> Converted:
    converter = RowConverter(tokenizer_for(template), TokenizeConfig(max_length=512), "keep")
    return converter.convert(RawRow("row:1", json.dumps(row).encode()))


def supervised(outcome: Converted) -> list[list[int]]:
    """Of each document, the tokens that are learnt."""
    return [packed.ids[packed.mask.astype(bool)].tolist() for packed in outcome.packed]


@pytest.mark.parametrize("template", TEMPLATE_NAMES)
def test_unchanged_rows_are_kept_but_what_the_template_itself_refuses(
    tokenizer_for: ForTemplate, template: str
) -> None:
    refused = {
        place: outcome.outcome.reason
        for place, row in enumerate(SEEDS)
        if isinstance((outcome := converted(tokenizer_for, template, row)).outcome, Skip)
    }
    assert refused == REFUSED_SEEDS.get(template, {})


@pytest.mark.parametrize("template", TEMPLATE_NAMES)
@pytest.mark.parametrize("kind", HARMLESS)
def test_rows_changed_without_harm_are_all_kept_and_teach_the_same(
    tokenizer_for: ForTemplate, kind: str, template: str
) -> None:
    """Every row of every format that the template takes, changed in ten ways of each kind: 100% kept."""
    for place, row in enumerate(SEEDS):
        before = converted(tokenizer_for, template, row)
        for draw in range(10 if before.packed else 0):
            changed = HARMLESS[kind](row, np.random.Generator(np.random.PCG64([place, draw])))
            after = converted(tokenizer_for, template, changed)
            assert supervised(after) == supervised(before) != [], f"{changed}: {after.outcome}"


@pytest.mark.parametrize("kind", HARMFUL)
def test_rows_changed_with_harm_are_all_refused_for_that(tokenizer_for: ForTemplate, kind: str) -> None:
    change, reason = HARMFUL[kind]
    for place, row in enumerate(row for row in SEEDS if messages_of(row)):
        if kind == "no answer" and "response" in row:
            continue  # its answer stands in the response
        for draw in range(10):
            changed = change(row, np.random.Generator(np.random.PCG64([place, draw])))
            outcome = converted(tokenizer_for, "chatml", changed).outcome
            assert isinstance(outcome, Skip), f"{changed} was kept"
            assert outcome.reason == reason
