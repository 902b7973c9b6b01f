"""Where each assistant turn lies in the target's own render, by token-prefix agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.data.conversations import Conversation, Message, Skip
from draftsmith.data.template import RENDER_ERRORS, ChatTemplate


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: `ids` is the render that ends with it, `[start, end)` what the assistant emitted."""

    ids: list[int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Located:
    turns: tuple[Turn, ...]
    left_out: tuple[Skip, ...]
    """Turns whose place can't be shown, in order."""


@dataclass(frozen=True, slots=True)
class _Renders:
    """Texts of one turn: the candidates for what stands before it, and what ends with it."""

    index: int
    prompts: list[str]
    upto: str


def locate_turns(
    template: ChatTemplate, conversation: Conversation, kwargs: Mapping[str, Any], *, last_only: bool
) -> Located:
    """Every assistant turn that is to be learnt, or the last alone.

    Messages after the last assistant turn have no answer and aren't rendered.

    Raises:
        TargetError: the tokenizer has no chat template.
    """
    template.require()
    messages = messages_for(template, conversation.messages)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = [index for index in turns if conversation.messages[index].get("weight") != 0]
    if last_only:
        chosen = [index for index in chosen if index == turns[-1]]
    renders = [_render_turn(template, messages, index, kwargs, conversation.tools) for index in chosen]
    texts = list(dict.fromkeys(t for r in renders if isinstance(r, _Renders) for t in (*r.prompts, r.upto)))
    ids = dict(zip(texts, template.encode(texts), strict=True))
    found: list[Turn] = []
    left_out: list[Skip] = []
    for render in renders:
        turn = render if isinstance(render, Skip) else _locate(template, conversation, render, ids, kwargs)
        if isinstance(turn, Skip):
            left_out.append(turn)
        else:
            found.append(turn)
    return Located(tuple(found), tuple(left_out))


def messages_for(template: ChatTemplate, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages under the names that this template reads: thoughts under its own key, and no key of ours."""
    return [_message_for(template, message) for message in messages]


def _message_for(template: ChatTemplate, message: Message) -> dict[str, Any]:
    shaped = {key: value for key, value in message.items() if key not in ("weight", "reasoning_content")}
    thoughts = message.get("reasoning_content")
    content = message["content"]
    if message["role"] == "assistant" and thoughts is None and template.reasoning_keys and "</think>" in content:
        # A completion sampled after a generation prompt that opens the block has only its closing mark.
        thoughts, _, rest = content.partition("</think>")
        thoughts = thoughts.strip("\n").removeprefix("<think>").strip("\n")
        shaped["content"] = rest.lstrip("\n")
    if thoughts is not None:
        shaped |= dict.fromkeys(template.reasoning_keys, thoughts)
    return shaped


def _render_turn(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    index: int,
    kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
) -> _Renders | Skip:
    if index == 0:
        return Skip("an assistant turn with nothing before it")
    try:
        upto = template.render(messages[: index + 1], kwargs, tools)
    except RENDER_ERRORS as error:
        return Skip("the template doesn't take the conversation", f"{type(error).__name__}: {error}"[:160])
    try:
        prompts = template.prompts(messages[:index], kwargs, tools)
    except RENDER_ERRORS as error:
        return Skip("the template gives no generation prompt before a turn", f"{type(error).__name__}: {error}"[:160])
    return _Renders(index, prompts, upto)


def _locate(
    template: ChatTemplate,
    conversation: Conversation,
    renders: _Renders,
    ids: Mapping[str, list[int]],
    kwargs: Mapping[str, Any],
) -> Turn | Skip:
    upto = ids[renders.upto]
    prompts = [ids[text] for text in renders.prompts]
    is_last = renders.index == len(conversation.messages) - 1 or not any(
        message["role"] == "assistant" for message in conversation.messages[renders.index + 1 :]
    )
    if is_last and conversation.completion_ids is not None:
        return _sampled_turn(prompts[0], conversation, template.num_tokens)
    fitting = [prompt for prompt in prompts if upto[: len(prompt)] == prompt]
    if fitting:
        start = max(map(len, fitting))
    else:
        tagged = _tagged_start(template, conversation, renders, upto, kwargs)
        if tagged is None:
            if any(renders.upto.startswith(text) for text in renders.prompts):
                return Skip("a turn's first characters merge with the generation prompt's last token")
            return Skip("the template renders a turn other than it prompts for it (drops or rewrites its beginning)")
        start = tagged
    text_end, end = template.turn_end(upto, start, kwargs)
    if not template.end_ids(kwargs).isdisjoint(upto[start:text_end]):
        return Skip("an assistant turn holds an end-of-turn token inside its text")
    return Turn(upto, start, text_end if is_last and conversation.was_cut else end)


def _sampled_turn(prompt: list[int], conversation: Conversation, num_tokens: int) -> Turn | Skip:
    """The tokens that a server returned, behind the prompt that it was given: nothing is encoded again."""
    completion = conversation.completion_ids or ()
    if tuple(prompt) != conversation.prompt_ids:
        return Skip("the saved prompt tokens aren't those of the target's template (another target or other arguments)")
    if any(token >= num_tokens for token in completion):
        return Skip("completion_token_ids beyond the target's vocabulary", f"{max(completion)} of {num_tokens}")
    return Turn([*prompt, *completion], len(prompt), len(prompt) + len(completion))


def _tagged_start(
    template: ChatTemplate,
    conversation: Conversation,
    renders: _Renders,
    upto: list[int],
    kwargs: Mapping[str, Any],
) -> int | None:
    """Start of the turn by the template's generation tags, verified: one span a turn, on token borders, not the
    whole row."""
    if not template.has_tags:
        return None
    messages = messages_for(template, conversation.messages[: renders.index + 1])
    text, spans = template.tagged_spans(messages, kwargs, conversation.tools)
    num_turns = sum(message["role"] == "assistant" for message in messages)
    if text != renders.upto or len(spans) != num_turns or spans[-1][0] == 0:
        return None
    before, through = template.encode([text[: spans[-1][0]], text[: spans[-1][1]]])
    on_borders = upto[: len(before)] == before and upto[: len(through)] == through
    return len(before) if on_borders and len(before) < len(through) else None
