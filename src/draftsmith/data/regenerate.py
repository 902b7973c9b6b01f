"""Answers replaced by the target's own: from OpenAI-compatible servers, or generated in this process.

Rows flow: a window of them is open, each with one prompt under way, and the next is opened as soon as one is done, so
that short answers wait for no long one. Every answer goes into the journal as it comes, so that a kill loses only what
was still being said; the next run goes on with that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console

from draftsmith.data.conversations import CUT_REASONS, Conversation, Message, Skip
from draftsmith.data.convert import decode_row
from draftsmith.data.journal import Journal, RegenerateReport
from draftsmith.data.prepare import expected_rows
from draftsmith.data.progress import progress_bar
from draftsmith.data.sources import RawRow, content_digest, parse_sources, read_mixture
from draftsmith.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How answers are sampled; recorded in every row."""

    temperature: float = 1.0
    """1 gives the target's own distribution; greedy serving may want 0."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that hold this share of the probability; 1 leaves none out."""
    max_new_tokens: int = 2048
    """Longest answer in tokens."""
    seed: int = 0
    """Row i is sampled with seed + i."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"--temperature {self.temperature} is below 0: give 0 for greedy answers")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p} must lie above 0 and at most at 1")
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens {self.max_new_tokens} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateConfig:
    """How answers are replaced."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    cut_answers: Literal["mark", "drop"] = "mark"
    """Answers that reached the longest length: keep them with finish_reason "length" (no end token is learnt), or
    drop."""
    every_turn: bool = True
    """Ask again for every assistant turn, each on the new history; otherwise for the last one only."""
    template_kwargs: Mapping[str, bool | int | str] = field(default_factory=dict[str, "bool | int | str"])
    """Chat-template arguments of the request, such as `enable_thinking False`; recorded in every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question to the target: messages up to where it is to answer."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    template_kwargs: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The target's reply; ids only where whoever sampled it returned them."""

    message: Message
    finish_reason: str
    prompt_ids: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None


class Generate(Protocol):
    """Answers prompts, many under way at once, in whatever order they end."""

    @property
    def window(self) -> int:
        """Prompts to hold at once: those under way, and some to choose the next from. At least 1."""
        ...

    def start(self, ticket: int, prompt: Prompt) -> None:
        """Take a prompt, without waiting for its answer."""
        ...

    def finished(self) -> Sequence[tuple[int, Answer | Skip]]:
        """Tickets and answers that came since the last call: waits for one at least.

        A Skip is a prompt that can't be answered (too long for the model, say).

        Raises:
            DataError: no more will come, and all that came has been handed out.
        """
        ...


def answer_all(generate: Generate, prompts: Sequence[Prompt]) -> list[Answer | Skip]:
    """The answers to all prompts, in their order."""
    answers: dict[int, Answer | Skip] = {}
    for ticket, prompt in enumerate(prompts):
        generate.start(ticket, prompt)
        while ticket + 1 - len(answers) >= generate.window:
            answers |= dict(generate.finished())
    while len(answers) < len(prompts):
        answers |= dict(generate.finished())
    return [answers[ticket] for ticket in range(len(prompts))]


def regenerate(
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    generate: Generate,
    config: RegenerateConfig,
    console: Console | None = None,
) -> RegenerateReport:
    """Write `out` (JSON lines, in input order) with every answer replaced, and one added where a row ends with a user
    turn; goes on where an earlier call with the same arguments stopped.

    Raises:
        DataError: nothing there or usable, `out` exists, or its `.partial` belongs to other data or settings.
    """
    sources = parse_sources(source)
    target = Path(out)
    if target.exists():
        raise DataError(f"{target} exists: choose another --out or remove it")
    digests = [content_digest(item) for item in sources]
    num_lines = [lines for _, lines in digests]
    settings = {
        "sources": [[item.location, item.weight, digest] for item, (digest, _) in zip(sources, digests, strict=True)],
        "config": asdict(config),
    }
    with (
        Journal(target.with_name(target.name + ".partial"), settings) as journal,
        progress_bar(console, "regenerating", expected_rows(sources, num_lines, left_out=False)) as advance,
    ):
        rows = enumerate(read_mixture(sources, config.sampling.seed))
        for num_done in _flow(rows, journal, generate, config):
            advance(num_done)
        return journal.finish(target)


def _flow(
    rows: Iterator[tuple[int, RawRow]], journal: Journal, generate: Generate, config: RegenerateConfig
) -> Iterator[int]:
    """All rows through `generate` into the journal; yields how many more are done."""
    open_rows: dict[int, _OpenRow] = {}
    for index, raw in rows:
        row = None if journal.is_done(index) else _open(index, raw, journal, config)
        if row is None:
            yield 0 if isinstance(raw.value, Skip) else 1  # what a weight leaves out isn't waited for
            continue
        open_rows[index] = row
        generate.start(index, row.prompt(config))
        while len(open_rows) >= generate.window:
            yield _advance(open_rows, journal, generate, config)
    while open_rows:
        yield _advance(open_rows, journal, generate, config)


def _open(index: int, raw: RawRow, journal: Journal, config: RegenerateConfig) -> _OpenRow | None:
    """The row, with what an earlier run had of it; None where it needs no (more) asking, which the journal now says."""
    conversation = decode_row(raw, unanswered=True)
    row = conversation if isinstance(conversation, Skip) else _OpenRow.of(index, conversation, config)
    if isinstance(row, Skip):
        journal.add_row(index, {"skipped": row.reason, "detail": row.detail})
        return None
    for saved in journal.answers(index):
        row.take(Answer(**saved))
    return row


def _advance(open_rows: dict[int, _OpenRow], journal: Journal, generate: Generate, config: RegenerateConfig) -> int:
    """Wait for answers and journal them; rows with more turns ask again. Returns the rows that are done."""
    num_before = len(open_rows)
    for index, answer in generate.finished():
        row = open_rows[index]
        if isinstance(answer, Skip):
            journal.add_row(index, {"skipped": answer.reason, "detail": answer.detail, "asked": True})
        elif row.take(answer):
            journal.add_answer(index, row.num_answers - 1, asdict(answer))
            generate.start(index, row.prompt(config))
            continue
        else:
            journal.add_row(index, row.line(answer, config))
        del open_rows[index]
    return num_before - len(open_rows)


class _OpenRow:
    """A conversation while its answers are being replaced."""

    def __init__(self, index: int, conversation: Conversation, turns: list[int]) -> None:
        self._index = index
        self._conversation = conversation
        self._turns = turns
        self._messages: list[Message] = list(conversation.messages[: turns[0]])
        self.num_answers = 0

    @classmethod
    def of(cls, index: int, conversation: Conversation, config: RegenerateConfig) -> _OpenRow | Skip:
        messages = conversation.messages
        if not messages:
            return Skip("no messages to answer (pre-rendered text and token ids can't be regenerated)")
        if any("tool_calls" in message or message["role"] == "tool" for message in messages):
            return Skip("tool calls: a new call would have no result to answer to")
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place > 0]
        if messages[-1]["role"] == "user":
            turns.append(len(messages))
        if not turns:
            return Skip("nothing to answer: no user turn at the end, nor an assistant turn with something before it")
        return cls(index, conversation, turns if config.every_turn else turns[-1:])

    def prompt(self, config: RegenerateConfig) -> Prompt:
        return Prompt(
            messages=list(self._messages),
            tools=self._conversation.tools,
            template_kwargs={**self._conversation.template_kwargs, **config.template_kwargs},
            seed=config.sampling.seed + self._index,
        )

    def take(self, answer: Answer) -> bool:
        """Add the answer and the messages up to the next turn; whether there is one. A cut answer ends the
        conversation, and so does a tool call, which has no result here."""
        place, *later = self._turns
        self._messages.append(answer.message)
        self._turns = later
        self.num_answers += 1
        if not later or answer.finish_reason in CUT_REASONS or "tool_calls" in answer.message:
            return False
        self._messages.extend(self._conversation.messages[place + 1 : later[0]])
        return True

    def line(self, answer: Answer, config: RegenerateConfig) -> dict[str, Any]:
        if answer.finish_reason in CUT_REASONS and config.cut_answers == "drop":
            return {"skipped": "the answer reached the longest length"}
        fields: dict[str, Any] = {
            "messages": [dict(message) for message in self._messages],
            "finish_reason": answer.finish_reason,
            "sampling": asdict(config.sampling),
            "source": self._conversation.source,
        }
        kwargs = {**self._conversation.template_kwargs, **config.template_kwargs}
        if kwargs:
            fields["chat_template_kwargs"] = kwargs
        if self._conversation.tools:
            fields["tools"] = [dict(tool) for tool in self._conversation.tools]
        if answer.completion_ids is not None and answer.prompt_ids is not None:
            fields["prompt_token_ids"] = list(answer.prompt_ids)
            fields["completion_token_ids"] = list(answer.completion_ids)
        return {"row": fields}
