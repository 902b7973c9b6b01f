"""Rows of every format with changes: random ones, and kinds that must leave a row as it was, or must be refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

PAIR = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a b"}]
SEEDS: list[Any] = [
    {"messages": [{"role": "system", "content": "s"}, *PAIR, {"role": "user", "content": "中文 😀"}, PAIR[1]]},
    {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a long answer"}], "system": "s"},
    {
        "messages": [
            PAIR[0],
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
            {"role": "assistant", "reasoning_content": "t", "content": "a b"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    {"prompt": "hello", "completion": "there you are"},
    {"text": "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>\n"},
    {"input_ids": [30, 31, 32, 33], "loss_mask": [0, 1, 1, 0]},
    {"request": {"messages": PAIR[:1]}, "response": {"choices": [{"message": PAIR[1], "finish_reason": "length"}]}},
]
ODD: list[Any] = [
    None,
    0,
    -1,
    1.5,
    True,
    "",
    "user",
    "assistant",
    "</think>",
    "<|im_end|>",
    "\n\n",
    [],
    {},
    [[]],
    [{}],
    "{",
    "\x00",
    "\ud800",
    json.loads('{"k":' * 400 + "1" + "}" * 400),
]


def mutate(value: Any, generator: np.random.Generator) -> Any:
    """One random change somewhere inside: a value replaced, a key or item dropped, doubled or moved."""
    if isinstance(value, dict) and value and generator.random() < 0.8:
        key = list(value)[generator.integers(len(value))]
        changed = dict(value)
        draw = generator.random()
        if draw < 0.15:
            del changed[key]
        elif draw < 0.25:
            changed[str(ODD[generator.integers(len(ODD))])] = changed.pop(key)
        else:
            changed[key] = mutate(value[key], generator)
        return changed
    if isinstance(value, list) and value and generator.random() < 0.8:
        place = int(generator.integers(len(value)))
        draw = generator.random()
        if draw < 0.15:
            return value[:place] + value[place + 1 :]
        if draw < 0.3:
            return [*value, value[place]]
        return [mutate(item, generator) if index == place else item for index, item in enumerate(value)]
    if isinstance(value, str) and value and generator.random() < 0.5:
        cut = int(generator.integers(len(value) + 1))
        return value[:cut] + str(ODD[generator.integers(len(ODD))]) + value[cut:]
    return ODD[generator.integers(len(ODD))]


def mutated_line(index: int, generator: np.random.Generator) -> bytes:
    """A row of one of the formats after one to three changes, as a line of JSON; one in ten is cut or has a broken
    byte."""
    row = SEEDS[index % len(SEEDS)]
    for _ in range(int(generator.integers(1, 4))):
        row = mutate(row, generator)
    line = json.dumps(row).encode()
    if generator.random() < 0.1:
        line = line[: int(generator.integers(len(line) + 1))] + b"\xff" * int(generator.integers(2))
    return line


Change = Callable[[Any, np.random.Generator], Any]
FILLING = [" x ", "\n\n", "中文", "😀", "e\u0301", "\t", "{", "\\", '"']
"""Put into a question, each leaves a question."""
MESSAGE_LISTS = ("messages", "conversations")


def messages_of(row: Any) -> list[dict[str, Any]]:
    """The list of messages inside a row, to be changed; [] where it has none."""
    found = next((row[key] for key in MESSAGE_LISTS if key in row), None)
    return row["request"]["messages"] if found is None and "request" in row else found or []


def _copied(change: Callable[[Any, np.random.Generator], None]) -> Change:
    def changed(row: Any, generator: np.random.Generator) -> Any:
        copy = json.loads(json.dumps(row))
        change(copy, generator)
        return copy

    return changed


def _any_of(generator: np.random.Generator, values: list[Any]) -> Any:
    return values[generator.integers(len(values))]


def _holders(row: Any) -> list[dict[str, Any]]:
    """Objects whose unknown keys mean nothing: the row and its messages."""
    return [row, *messages_of(row)]


def _unknown_key(row: Any, generator: np.random.Generator) -> None:
    value = _any_of(generator, [item for item in ODD if item != "\ud800"])
    _any_of(generator, _holders(row))["nobody knows this"] = value


def _null_key(row: Any, generator: np.random.Generator) -> None:
    row.setdefault(
        str(_any_of(generator, ["metadata", "tools", "finish_reason", "chat_template_kwargs", "labels"])), None
    )
    for message in messages_of(row):  # as columnar files give every message every key
        for key in ("role", "from", "content", "value", "tool_calls", "name"):
            message.setdefault(key, None)


def _other_order(row: Any, generator: np.random.Generator) -> None:
    for holder in _holders(row):
        items = list(holder.items())
        holder.clear()
        holder.update(items[place] for place in generator.permutation(len(items)))


def _other_names(row: Any, generator: np.random.Generator) -> None:
    names = {"role": "from", "content": "value", "from": "role", "value": "content"}
    for message in messages_of(row):
        items = [(names.get(key, key), value) for key, value in message.items()]
        message.clear()
        message.update(items)


def _text_parts(row: Any, generator: np.random.Generator) -> None:
    for message in messages_of(row):
        for key in ("content", "value"):
            if isinstance(message.get(key), str) and message.get("role") != "tool":
                message[key] = [{"type": "text", "text": message[key]}]


def _none_left_out(row: Any, generator: np.random.Generator) -> None:
    for message in messages_of(row):
        if message.get("content", "") is None:
            del message["content"]


def _filled_question(row: Any, generator: np.random.Generator) -> None:
    for message in messages_of(row):
        if message.get("role", message.get("from")) in ("user", "human"):
            key = "content" if "content" in message else "value"
            cut = int(generator.integers(len(message[key]) + 1))
            message[key] = message[key][:cut] + _any_of(generator, FILLING) + message[key][cut:]


HARMLESS: dict[str, Change] = {
    "an unknown key": _copied(_unknown_key),
    "a key that is null": _copied(_null_key),
    "keys in another order": _copied(_other_order),
    "from and value for role and content": _copied(_other_names),
    "content in parts": _copied(_text_parts),
    "no content for content null": _copied(_none_left_out),
    "another question": _copied(_filled_question),
}
"""Rows stay as good as they were, and what is supervised stays the same."""


def _half_a_pair(row: Any, generator: np.random.Generator) -> None:
    message = _any_of(generator, messages_of(row))
    message["value" if "value" in message else "content"] = "a \ud800"


def _no_answer(row: Any, generator: np.random.Generator) -> None:
    messages = messages_of(row)
    messages[:] = [
        message for message in messages if message.get("role", message.get("from")) in ("system", "user", "human")
    ]


def _unknown_role(row: Any, generator: np.random.Generator) -> None:
    message = _any_of(generator, messages_of(row))
    message["from" if "from" in message else "role"] = "narrator"


def _an_image(row: Any, generator: np.random.Generator) -> None:
    message = _any_of(generator, messages_of(row))
    message["value" if "value" in message else "content"] = [{"type": "image", "url": "x"}]


HARMFUL: dict[str, tuple[Change, str]] = {
    "half a surrogate pair": (_copied(_half_a_pair), "text holds half of a surrogate pair"),
    "no answer": (_copied(_no_answer), "no assistant turn"),
    "an unknown role": (_copied(_unknown_role), "unknown role"),
    "an image": (_copied(_an_image), "a content part isn't text (images and audio can't be drafted for)"),
}
"""Rows that must be refused, and why."""
