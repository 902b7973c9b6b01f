"""A target's chat template as a function, and what probing tells of it: how a turn ends, what the generation prompt
supplies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jinja2

from draftsmith.data.conversations import REASONING_KEYS, Message, Skip
from draftsmith.errors import TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDER_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError),
    RecursionError,
)
"""What a template may raise on a conversation that it doesn't take."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Template arguments that, set to False, may make the generation prompt supply an empty thinking block."""
RESERVED_ARGUMENTS = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
"""Template arguments that would change what is rendered or returned, not how: no row and no option may set them."""
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Ending:
    """What the template writes after an assistant's text: `ids`, of which the first `emitted` come from the
    assistant itself."""

    ids: tuple[int, ...]
    emitted: int


class ChatTemplate:
    """Renders with the tokenizer's own template and encodes as `apply_chat_template` does (no special tokens added)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        template = cast("str | dict[str, str] | None", tokenizer.chat_template)
        self.has_template = bool(template)
        self.num_tokens = len(tokenizer)
        by_name = template if isinstance(template, dict) else {"default": template or ""}
        self._source = "\n".join(by_name.values())
        self.reasoning_keys = tuple(key for key in REASONING_KEYS if re.search(rf"\b{key}\b", self._source))
        self.switches = tuple(name for name in THINKING_SWITCHES if re.search(rf"\b{name}\b", self._source))
        self.has_tags = GENERATION_TAG.search(self._source) is not None
        self._special = frozenset(cast(dict[int, Any], tokenizer.added_tokens_decoder))
        eos = tokenizer.eos_token_id
        self._given_ends = frozenset(end_token_ids) | (frozenset((eos,)) if isinstance(eos, int) else frozenset[int]())
        self._endings: dict[str, Ending] = {}
        opening = cast(list[int], tokenizer("")["input_ids"])
        self._opening = opening[:1] if opening[:1] == [tokenizer.bos_token_id] else []

    def require(self) -> None:
        """Refuse a tokenizer without a template.

        Raises:
            TargetError: it has none.
        """
        if not self.has_template:
            raise TargetError(
                f"the tokenizer of {self._tokenizer.name_or_path or 'the target'} has no chat template: use the "
                "instruct version of the model, save a chat_template.jinja beside it, or give rows of prompt and "
                "completion, or pre-rendered text with --text-rows all"
            )

    def render(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = False,
    ) -> str:
        """The template's text. Raises any of `RENDER_ERRORS` where the template doesn't take the conversation."""
        return cast(
            str,
            self._tokenizer.apply_chat_template(
                cast(Any, list(messages)),
                tools=cast(Any, list(tools) or None),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **kwargs,
            ),
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        return cast(list[list[int]], encoded["input_ids"])

    def encode_raw(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts that no template rendered here: with the beginning-of-text token where the tokenizer puts one, as a
        server does with a bare prompt, and the text doesn't bring it."""
        encoded = self.encode(texts)
        return [ids if ids[:1] == self._opening else [*self._opening, *ids] for ids in encoded]

    def tagged_spans(
        self, messages: Sequence[Message], kwargs: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """(text, character spans inside the template's own generation tags)."""
        from transformers.utils import chat_template_utils  # heavy

        render = cast(Any, chat_template_utils).render_jinja_template
        texts, spans = cast(
            tuple[list[str], list[list[tuple[int, int]]]],
            render(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self._tokenizer.get_chat_template(None, cast(Any, list(tools) or None)),
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **kwargs},
            ),
        )
        return texts[0], spans[0]

    def holds_special(self, ids: Sequence[int]) -> bool:
        return not self._special.isdisjoint(ids)

    def ending(self, kwargs: Mapping[str, Any]) -> Ending:
        """What follows an assistant's text, from two probes that differ in that text alone: their common token
        suffix."""
        key = repr(sorted(kwargs.items()))
        if key not in self._endings:
            self._endings[key] = self._probe_ending(kwargs)
        return self._endings[key]

    def _probe_ending(self, kwargs: Mapping[str, Any]) -> Ending:
        user = {"role": "user", "content": "x"}
        try:
            texts = [self.render([user, {"role": "assistant", "content": text}], kwargs) for text in ("a", "b")]
        except RENDER_ERRORS:
            return Ending((), 0)
        one, other = self.encode(texts)
        length = _num_common(one[::-1], other[::-1])
        tail = tuple(one[len(one) - length :])
        stops = [place + 1 for place, token in enumerate(tail) if token in self._special]
        return Ending(tail, stops[0] if stops else 0)

    def end_ids(self, kwargs: Mapping[str, Any]) -> frozenset[int]:
        """Tokens that end a turn: the template's own, the tokenizer's eos and those given."""
        ending = self.ending(kwargs)
        return self._given_ends | frozenset(ending.ids[ending.emitted - 1 : ending.emitted])

    def turn_end(self, ids: Sequence[int], start: int, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """(end of the assistant's text, end of what it emits) in a render that ends with its turn, which begins at
        `start`."""
        ending = self.ending(kwargs)
        text_end = len(ids) - len(ending.ids)
        if ending.ids and text_end >= start and tuple(ids[text_end:]) == ending.ids:
            return text_end, text_end + ending.emitted
        ends = self.end_ids(kwargs)
        last = next((place for place in reversed(range(start, len(ids))) if ids[place] in ends), None)
        return (len(ids), len(ids)) if last is None else (last, last + 1)

    def prompts(
        self, messages: Sequence[Message], kwargs: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        """The generation prompt as asked for, and as it is with thinking switched off (it then supplies an empty
        block)."""
        variants = [dict(kwargs), *({**kwargs, name: False} for name in self.switches if kwargs.get(name) is not False)]
        texts = [self.render(messages, variant, tools, generation_prompt=True) for variant in variants]
        return list(dict.fromkeys(texts))

    def assistant_spans(self, ids: Sequence[int], kwargs: Mapping[str, Any]) -> list[tuple[int, int]] | Skip:
        """Assistant turns in an already rendered text: from the generation prompt's own tokens to the end of turn.

        Only where that prompt holds a special token, which no user's text can imitate once it is tokens.
        """
        self.require()
        headers = self._headers(kwargs)
        if not headers:
            return Skip("pre-rendered text, and the template's generation prompt has no token of its own to go by")
        ends = self.end_ids(kwargs)
        spans: list[tuple[int, int]] = []
        place = 0
        while place < len(ids):
            header = next((h for h in headers if tuple(ids[place : place + len(h)]) == h), None)
            if header is None:
                place += 1
                continue
            start = place + len(header)
            end = next((after + 1 for after in range(start, len(ids)) if ids[after] in ends), len(ids))
            spans.append((start, end))
            place = max(end, start)
        return spans or Skip("no assistant turn in the pre-rendered text")

    def _headers(self, kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Generation prompts as token runs, the longest first."""
        user = [{"role": "user", "content": "x"}]
        try:
            texts = [self.render(user, kwargs), *self.prompts(user, kwargs)]
        except RENDER_ERRORS:
            return []
        plain, *prompts = self.encode(texts)
        headers = [tuple(ids[_num_common(plain, ids) :]) for ids in prompts]
        return sorted((header for header in headers if self.holds_special(header)), key=len, reverse=True)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)
