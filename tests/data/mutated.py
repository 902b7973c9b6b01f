"""Rows of every format with random changes: what a fuzz test feeds to the data side."""

from __future__ import annotations

import json
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
