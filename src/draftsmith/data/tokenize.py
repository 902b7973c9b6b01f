"""A conversation -> token ids and the mask of what the assistant itself would have emitted, right by construction.

Ids are the target's own untouched chat template. What is supervised is found by exact agreement of token prefixes:
for turn j, `render(messages[:j], generation prompt)` must be a token prefix of `render(messages[:j+1])`; what follows,
up to and with the end-of-turn token, is the turn. No text is searched for. A turn for which this can't be shown is left
unsupervised and counted.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import torch

from draftsmith.data.conversations import Conversation, Skip
from draftsmith.data.template import RESERVED_ARGUMENTS, ChatTemplate
from draftsmith.data.turns import Turn, locate_turns
from draftsmith.errors import ConfigError
from draftsmith.records import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_SUPERVISED_RUN = 2
"""An anchor and its next token: a row without two supervised tokens in a row has no label at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeConfig:
    """How conversations become token ids and loss masks."""

    max_length: int = 4096
    """Longest document in tokens; ids and mask are cut together, and no end token is invented at the cut."""
    last_turn_only: bool = False
    """Supervise only the last assistant turn of each conversation."""
    rewritten_history: Literal["split", "refuse"] = "split"
    """Where the template rewrites earlier turns (drops their thinking): one row per turn, or leave the conversation
    out."""
    template_kwargs: Mapping[str, bool | int | str] = field(default_factory=dict[str, "bool | int | str"])
    """Arguments of the chat template, such as `enable_thinking False`; recorded, and checked again at evaluation and
    export."""
    text_rows: Literal["turns", "all"] = "turns"
    """In pre-rendered `text` rows, supervise the assistant's turns, or every token (for targets without a chat
    template)."""
    end_token_ids: tuple[int, ...] = ()
    """Further ids that end an assistant turn, beside the template's own end of turn and the tokenizer's eos."""

    def __post_init__(self) -> None:
        if self.max_length < MIN_SUPERVISED_RUN:
            raise ConfigError(f"--max-length {self.max_length} can't hold a label: give at least {MIN_SUPERVISED_RUN}")
        for name in RESERVED_ARGUMENTS.intersection(self.template_kwargs):
            raise ConfigError(f"--template-kwargs can't set {name!r}: it comes from the target or each conversation")


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Ids and mask of one document, equal lengths."""

    ids: Sequence[int]
    mask: Sequence[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """What one conversation became."""

    rows: tuple[TokenRow, ...]
    turns_left_out: tuple[Skip, ...] = ()
    """Assistant turns that stay context only, each with its reason."""
    whole_tokens: int = 0
    """Tokens of the longest row before cutting: what the conversation would cost as a single row."""
    total_tokens: int = 0
    """Tokens of all rows before cutting."""
    rows_cut: int = 0
    """Rows that `max_length` shortened."""


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, options: TokenizeConfig
) -> list[Document] | Skip:
    """Documents of one conversation (one, or several where the template rewrites history), or why there is none.

    Raises:
        TargetError: messages were given and the tokenizer has no chat template.
    """
    result = ConversationTokenizer(tokenizer, options).tokenize(conversation)
    return result if isinstance(result, Skip) else [as_document(row) for row in result.rows]


def as_document(row: TokenRow) -> Document:
    return Document(
        token_ids=torch.tensor(row.ids, dtype=torch.int64), loss_mask=torch.tensor(row.mask, dtype=torch.bool)
    )


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the chat template (of all of them, where there are several by name), "" where there is none."""
    template = cast("str | dict[str, str] | None", tokenizer.chat_template)
    if not template:
        return ""
    text = template if isinstance(template, str) else repr(sorted(template.items()))
    return hashlib.sha256(text.encode()).hexdigest()


class ConversationTokenizer:
    """The tokenizer, its template and the options, with what was probed of the template kept between conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TokenizeConfig) -> None:
        self.options = options
        self.template = ChatTemplate(tokenizer, options.end_token_ids)

    def tokenize(self, conversation: Conversation) -> Tokenized | Skip:
        if conversation.token_ids is not None and conversation.loss_mask is not None:
            return self._given_ids(conversation.token_ids, conversation.loss_mask)
        if conversation.text is not None:
            return self._given_text(conversation.text, conversation)
        return self._chat(conversation)

    def _chat(self, conversation: Conversation) -> Tokenized | Skip:
        for name, value in conversation.template_kwargs.items():
            if name in RESERVED_ARGUMENTS:
                return Skip("the row's template arguments would replace the template or its input", name)
            if self.options.template_kwargs.get(name, value) != value:
                return Skip("the row was made with other template arguments", f"{name}={value!r}")
        kwargs = {**conversation.template_kwargs, **self.options.template_kwargs}
        located = locate_turns(self.template, conversation, kwargs, last_only=self.options.last_turn_only)
        if not located.turns:
            return located.left_out[0] if located.left_out else Skip("no assistant turn to learn from")
        rows = _rows_of_turns(located.turns)
        if len(rows) > 1 and self.options.rewritten_history == "refuse":
            return Skip("the template rewrites earlier turns (--rewritten-history split keeps the row)")
        return self._finish(rows, located.left_out)

    def _given_ids(self, ids: Sequence[int], mask: Sequence[bool]) -> Tokenized | Skip:
        size = self.template.num_tokens
        if any(token >= size for token in ids):
            return Skip("input_ids beyond the target's vocabulary", f"{max(ids)} of {size}")
        kept = _last_run(mask) if self.options.last_turn_only else list(mask)
        return self._finish([TokenRow(ids, kept)], ())

    def _given_text(self, text: str, conversation: Conversation) -> Tokenized | Skip:
        template, completion = self.template, conversation.completion
        if completion is not None:
            if template.has_template and not template.holds_special(template.encode([text])[0]):
                pair = ({"role": "user", "content": text}, {"role": "assistant", "content": completion})
                return self._chat(
                    Conversation(
                        messages=pair,
                        finish_reason=conversation.finish_reason,
                        template_kwargs=conversation.template_kwargs,
                    )
                )
            before, ids = template.encode_raw([text, text + completion])
            if ids[: len(before)] != before:
                return Skip("the completion's first characters merge with the prompt's last token")
            return self._finish([TokenRow(ids, [place >= len(before) for place in range(len(ids))])], ())
        ids = template.encode_raw([text])[0]
        if self.options.text_rows == "all":
            return self._finish([TokenRow(ids, [True] * len(ids))], ())
        spans = template.assistant_spans(ids, self.options.template_kwargs)
        if isinstance(spans, Skip):
            return spans
        start, end = spans[-1]
        if conversation.was_cut and end > start and ids[end - 1] in template.end_ids(self.options.template_kwargs):
            spans[-1] = start, end - 1
        kept = spans[-1:] if self.options.last_turn_only else spans
        return self._finish([TokenRow(ids, _mask(len(ids), kept))], ())

    def _finish(self, rows: list[TokenRow], left_out: tuple[Skip, ...]) -> Tokenized | Skip:
        """Cut ids and mask together, then drop rows that hold no label: on every route, after the cut."""
        limit = self.options.max_length
        cut = [TokenRow(row.ids[:limit], row.mask[:limit]) for row in rows]
        kept = tuple(row for row in cut if _has_label(row.mask))
        if not kept:
            had_label = any(_has_label(row.mask) for row in rows)
            return Skip(
                f"no two supervised tokens in a row within {limit} tokens (raise --max-length)"
                if had_label
                else "no two supervised tokens in a row"
            )
        return Tokenized(
            rows=kept,
            turns_left_out=left_out,
            whole_tokens=max(len(row.ids) for row in rows),
            total_tokens=sum(len(row.ids) for row in rows),
            rows_cut=sum(len(row.ids) > limit for row in rows),
        )


def _rows_of_turns(turns: Sequence[Turn]) -> list[TokenRow]:
    """As few rows as hold every turn: a turn joins a later turn's row if its own render is a token prefix of that
    row."""
    rows: list[TokenRow] = []
    remaining = list(turns)
    while remaining:
        ids = remaining[-1].ids
        joined = [turn for turn in remaining if ids[: turn.end] == turn.ids[: turn.end]]
        rows.insert(0, TokenRow(ids, _mask(len(ids), [(turn.start, turn.end) for turn in joined])))
        remaining = [turn for turn in remaining if ids[: turn.end] != turn.ids[: turn.end]]
    return rows


def _mask(length: int, spans: Sequence[tuple[int, int]]) -> list[bool]:
    mask = [False] * length
    for start, end in spans:
        mask[start:end] = [True] * (end - start)
    return mask


def _last_run(mask: Sequence[bool]) -> list[bool]:
    """Only the last unbroken run of supervised tokens."""
    end = next((place + 1 for place in reversed(range(len(mask))) if mask[place]), 0)
    start = next((place + 1 for place in reversed(range(end)) if not mask[place]), 0)
    return _mask(len(mask), [(start, end)])


def _has_label(mask: Sequence[bool]) -> bool:
    return any(this and following for this, following in itertools.pairwise(mask))
