"""One row of any common conversation format -> a `Conversation`, or the reason why it can't be one.

Recognised without options, in this order: `input_ids` with `loss_mask` (or `labels`), request logs of OpenAI-compatible
servers (`request` and `response` bodies), `messages` / `conversations` / `conversation` (role/content or from/value),
`prompt` with `completion`, pre-rendered `text`, `prompt` alone (a question). A bare list is taken for a list of
messages. Nothing here knows of a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "ai", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    "system": "system",
    "developer": "developer",
}
CALL_ROLES = ("function_call", "tool_call")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
MESSAGE_KEYS = ("messages", "conversations", "conversation")
REQUEST_KEYS = ("request", "request_body", "body")
RESPONSE_KEYS = ("response", "response_body")
CUT_REASONS = ("length", "max_tokens", "content_filter", "abort")
MAX_DEPTH = 100
"""Levels of tools, tool calls and template arguments; templates and encoders recurse, and give up at some hundreds."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Skip:
    """A row left out: `reason` is one of a few dozen, to be counted; `detail` is of this row, to be shown as an
    example."""

    reason: str
    detail: str = ""

    @property
    def example(self) -> str:
        """`detail` as any file and terminal takes it."""
        return encodable(self.detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A normalised row. Exactly one of `messages`, `text` and `token_ids` is filled."""

    messages: tuple[Message, ...] = ()
    """`role` (system, developer, user, assistant, tool), `content` (text), and where given `reasoning_content`,
    `tool_calls` (arguments parsed), `tool_call_id`, `name`, `weight` (0: this turn isn't to be learnt)."""
    tools: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str | None = None
    """Of the last assistant turn; one of `CUT_REASONS` means that it never emitted its end of turn."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Chat-template arguments the row was made with."""
    text: str | None = None
    """Already rendered by the target's template; with `completion`, the part before it."""
    completion: str | None = None
    token_ids: tuple[int, ...] | None = None
    loss_mask: tuple[bool, ...] | None = None
    completion_ids: tuple[int, ...] | None = None
    """The last turn's own tokens as a server returned them, beside `messages`."""
    prompt_ids: tuple[int, ...] | None = None
    """The prompt's tokens as that server had them; given with `completion_ids`."""
    source: str = ""
    """Where the row stood: file and line."""

    @property
    def was_cut(self) -> bool:
        return self.finish_reason in CUT_REASONS


class _UnusableError(Exception):
    """Internal: carries a Skip out of nested parsing."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.skip = Skip(reason, detail)


def parse_row(row: object, source: str = "", *, unanswered: bool = False) -> Conversation | Skip:
    """Normalise one row (a decoded JSON value). Never raises on any JSON value; of several `choices` in a log the
    first is taken. Messages without any assistant turn are refused, unless `unanswered` ones are wanted."""
    if isinstance(row, list):
        row = {"messages": cast(list[Any], row)}
    if not isinstance(row, dict):
        return Skip("row isn't a JSON object", type(row).__name__)
    fields = {key: value for key, value in cast(dict[str, Any], row).items() if value is not None}
    try:
        parsed = replace(_parse_fields(fields), source=source)
    except _UnusableError as refusal:
        return refusal.skip
    if parsed.messages and not unanswered and all(message["role"] != "assistant" for message in parsed.messages):
        return Skip("no assistant turn")
    return parsed


def _parse_fields(fields: dict[str, Any]) -> Conversation:
    if "input_ids" in fields:
        return _parse_token_row(fields)
    if any(key in fields for key in RESPONSE_KEYS) and any(key in fields for key in REQUEST_KEYS):
        return _parse_log(fields)
    for key in MESSAGE_KEYS:
        if key in fields:
            return _parse_chat(fields, _decoded(fields[key]))
    if "prompt" in fields and "completion" in fields:
        return _parse_pair(fields)
    if "text" in fields:
        if not isinstance(fields["text"], str):
            raise _UnusableError("`text` isn't a string", type(fields["text"]).__name__)
        return Conversation(text=_clean(fields["text"]), finish_reason=_finish_reason(fields))
    if isinstance(fields.get("prompt"), (str, list)):
        prompt = cast("str | list[Any]", fields["prompt"])
        return _parse_chat(fields, prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])
    raise _UnusableError(
        "no messages, conversations, prompt and completion, text or input_ids in the row",
        "keys: " + ", ".join(sorted(map(str, fields)))[:120],
    )


def _parse_token_row(fields: dict[str, Any]) -> Conversation:
    ids = fields["input_ids"]
    if "loss_mask" in fields:
        mask = fields["loss_mask"]
    elif isinstance(fields.get("labels"), list):
        mask = [label != -100 for label in cast(list[Any], fields["labels"])]
    else:
        raise _UnusableError("input_ids without loss_mask or labels")
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise _UnusableError("input_ids or loss_mask isn't a list")
    ids, mask = cast(list[Any], ids), cast(list[Any], mask)
    if len(ids) != len(mask):
        raise _UnusableError("input_ids and loss_mask differ in length", f"{len(ids)} and {len(mask)}")
    if not _are_token_ids(ids):
        raise _UnusableError("input_ids holds something that isn't a token id")
    if any(value not in (0, 1) for value in mask):
        raise _UnusableError("loss_mask holds something other than 0 and 1")
    return Conversation(token_ids=tuple(ids), loss_mask=tuple(bool(value) for value in mask))


def _are_token_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**31 for value in values)


def _parse_log(fields: dict[str, Any]) -> Conversation:
    request, response = _body(fields, REQUEST_KEYS), _body(fields, RESPONSE_KEYS)
    choices: Any = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise _UnusableError("logged response without choices", str(response.get("error", ""))[:120])
    choice = cast("list[dict[str, Any]]", choices)[0]
    merged = {**fields, **request, "finish_reason": choice.get("finish_reason")}
    if isinstance(choice.get("text"), str) and isinstance(request.get("prompt"), str):
        return _parse_pair({**merged, "completion": choice["text"]})
    messages, answer = request.get("messages"), cast(object, choice.get("message"))
    if not isinstance(messages, list) or not isinstance(answer, dict):
        raise _UnusableError("logged request without messages, or response without a message")
    answer = {"role": "assistant", **cast(dict[str, Any], answer)}
    for theirs, ours in (("prompt_token_ids", "prompt_token_ids"), ("token_ids", "completion_token_ids")):
        merged[ours] = choice.get(theirs, response.get(theirs))
    return _parse_chat(merged, [*cast(list[Any], messages), answer])


def _body(fields: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    body = _decoded(next(fields[key] for key in keys if key in fields))
    if isinstance(body, dict) and "body" in body:
        body = _decoded(cast(dict[str, Any], body)["body"])
    if not isinstance(body, dict):
        raise _UnusableError("logged request or response isn't an object")
    return cast(dict[str, Any], body)


def _parse_pair(fields: dict[str, Any]) -> Conversation:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return _parse_chat(fields, [*cast(list[Any], prompt), *cast(list[Any], completion)])
    if isinstance(prompt, list) and isinstance(completion, str):
        return _parse_chat(fields, [*cast(list[Any], prompt), {"role": "assistant", "content": completion}])
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise _UnusableError("prompt and completion are neither strings nor message lists")
    return Conversation(
        text=_clean(prompt),
        completion=_clean(completion),
        finish_reason=_finish_reason(fields),
        template_kwargs=_template_kwargs(fields),
    )


def _parse_chat(fields: dict[str, Any], raw: object) -> Conversation:
    if not isinstance(raw, list):
        raise _UnusableError("messages aren't a list", type(raw).__name__)
    messages = [_parse_message(message) for message in cast(list[Any], raw)]
    system = fields.get("system")
    if isinstance(system, str) and system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": _clean(system)})
    if not messages:
        raise _UnusableError("no messages")
    completion_ids, prompt_ids = _sampled_ids(fields)
    return Conversation(
        messages=tuple(messages),
        tools=_tools(fields.get("tools")),
        finish_reason=_finish_reason(fields),
        template_kwargs=_template_kwargs(fields),
        completion_ids=completion_ids,
        prompt_ids=prompt_ids,
    )


def _sampled_ids(fields: dict[str, Any]) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """(completion, prompt) tokens of a server; without the prompt's they can't be checked and aren't used."""
    pair = fields.get("completion_token_ids"), fields.get("prompt_token_ids")
    if not all(isinstance(ids, list) and len(cast(list[Any], ids)) for ids in pair):
        return None, None
    completion, prompt = cast(tuple[list[Any], list[Any]], pair)
    if not _are_token_ids(completion) or not _are_token_ids(prompt):
        raise _UnusableError("completion_token_ids or prompt_token_ids holds something that isn't a token id")
    return tuple(completion), tuple(prompt)


def _parse_message(raw: object) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise _UnusableError("a message isn't an object", type(raw).__name__)
    fields = {key: value for key, value in cast(dict[str, Any], raw).items() if value is not None}
    given = fields.get("role", fields.get("from"))
    if not isinstance(given, str) or given.lower() not in ROLES:
        raise _UnusableError("unknown role", str(given)[:60])
    role = ROLES[given.lower()]
    content, thoughts = _content(fields.get("content", fields.get("value")))
    message: dict[str, Any] = {"role": role, "content": content}
    if given.lower() in CALL_ROLES:
        message |= {"content": "", "tool_calls": [_tool_call(_decoded(content))]}
    if isinstance(fields.get("tool_calls"), list) and fields["tool_calls"] and role == "assistant":
        message["tool_calls"] = [_tool_call(call) for call in fields["tool_calls"]]
    reasoning = next((fields[key] for key in REASONING_KEYS if isinstance(fields.get(key), str)), None)
    if role == "assistant" and (reasoning or thoughts):
        message["reasoning_content"] = _clean(reasoning or thoughts)
    for key in ("tool_call_id", "name"):
        if isinstance(fields.get(key), str):
            message[key] = _clean(fields[key])
    if fields.get("weight") == 0:
        message["weight"] = 0
    return message


def _content(raw: object) -> tuple[str, str]:
    """(text, thoughts). Parts join with a new line, as engines do before a template that wants strings."""
    if raw is None:
        return "", ""
    if isinstance(raw, str):
        return _clean(raw), ""
    if not isinstance(raw, list):
        raise _UnusableError("content is neither text nor parts", type(raw).__name__)
    texts: list[str] = []
    thoughts: list[str] = []
    for part in cast(list[Any], raw):
        if not isinstance(part, (str, dict)):
            raise _UnusableError("a content part isn't an object", type(part).__name__)
        fields = {"type": "text", "text": part} if isinstance(part, str) else cast(dict[str, Any], part)
        kind = fields.get("type", "text")
        if kind in ("thinking", "reasoning"):
            thoughts.append(str(fields.get("thinking") or fields.get("text") or ""))
        elif kind in ("text", "input_text", "output_text") and isinstance(fields.get("text"), str):
            texts.append(fields["text"])
        else:
            raise _UnusableError("a content part isn't text (images and audio can't be drafted for)", str(kind)[:60])
    return _clean("\n".join(texts)), "\n".join(thoughts)


def _tool_call(raw: object) -> dict[str, Any]:
    """A call as templates want it: `function.arguments` an object (logs hold it as a JSON string, which renders
    escaped)."""
    if not isinstance(raw, dict):
        raise _UnusableError("a tool call isn't an object")
    call = cast(dict[str, Any], raw)
    given: Any = call.get("function", call)
    function = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    if not isinstance(function.get("name"), str):
        raise _UnusableError("a tool call without a function name")
    arguments = _encodable_value(_decoded(function.get("arguments", {})))
    named = {key: _clean(call[key]) for key in ("id",) if isinstance(call.get(key), str)}
    return {**named, "type": "function", "function": {"name": _clean(function["name"]), "arguments": arguments}}


def _tools(raw: object) -> tuple[Mapping[str, Any], ...]:
    raw = _decoded(raw)
    if raw is None or raw == "":
        return ()
    if not isinstance(raw, list) or not all(isinstance(tool, dict) for tool in cast(list[Any], raw)):
        raise _UnusableError("tools aren't a list of objects")
    return tuple(_without_nones(_encodable_value(tool)) for tool in cast(list[dict[str, Any]], raw))


def _without_nones(value: Any) -> Any:
    """Columnar files give every struct all keys; a null there means that the key wasn't in the row."""
    if isinstance(value, dict):
        return {key: _without_nones(item) for key, item in cast(dict[str, Any], value).items() if item is not None}
    return [_without_nones(item) for item in cast(list[Any], value)] if isinstance(value, list) else value


def _finish_reason(fields: dict[str, Any]) -> str | None:
    metadata = fields.get("metadata")
    nested = cast(dict[str, Any], metadata).get("finish_reason") if isinstance(metadata, dict) else None
    reason = fields.get("finish_reason") or nested
    return reason if isinstance(reason, str) else None


def _template_kwargs(fields: dict[str, Any]) -> Mapping[str, Any]:
    kwargs = _decoded(fields.get("chat_template_kwargs") or fields.get("template_kwargs") or {})
    if not isinstance(kwargs, dict):
        raise _UnusableError("chat_template_kwargs isn't an object")
    return cast(Mapping[str, Any], _without_nones(_encodable_value(kwargs)))


def _decoded(value: object) -> object:
    """A JSON object or list kept as a string, decoded; anything else as it is."""
    if isinstance(value, str) and value[:1] in "[{" and value:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _encodable_value(value: Any, depth: int = 0) -> Any:
    """The value itself; refuses text that no tokenizer can read, anywhere inside, and nesting past `MAX_DEPTH`."""
    if depth > MAX_DEPTH:
        raise _UnusableError("nested too deep")
    if isinstance(value, str):
        _clean(value)
    elif isinstance(value, dict):
        for key, item in cast(dict[str, Any], value).items():
            _clean(key)
            _encodable_value(item, depth + 1)
    elif isinstance(value, list):
        for item in cast(list[Any], value):
            _encodable_value(item, depth + 1)
    return cast(Any, value)


def encodable(text: str) -> str:
    """Text with halves of surrogate pairs written out (`\\ud800`), so that any file and terminal takes it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _clean(text: str) -> str:
    """Refuse text that no tokenizer can read (half of a surrogate pair, left by a cut in UTF-16)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _UnusableError("text holds half of a surrogate pair") from None
    return text
