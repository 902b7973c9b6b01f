"""Answers replaced by the target's own: from OpenAI-compatible servers, or by a function that generates in process.

Finished rows are appended to `OUT.partial` as they come, one JSON line each with the number of its input row, so
that a kill loses at most the answers under way; the next run goes on with the rows that are missing. At the end the
lines are written to `OUT` in input order and renamed into place.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftsmith.data.conversations import CUT_REASONS, Conversation, Message, Skip, encodable
from draftsmith.data.convert import decode_row
from draftsmith.data.sources import content_digest, parse_sources, read_mixture
from draftsmith.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How answers are sampled; recorded in every row."""

    temperature: float = 1.0
    """1 gives the target's own distribution; greedy serving may want 0."""
    top_p: float = 1.0
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
    batch_rows: int = 64
    """Conversations under way at once."""

    def __post_init__(self) -> None:
        if self.batch_rows < 1:
            raise ConfigError(f"--batch-rows {self.batch_rows} must be at least 1")


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


Generate = Callable[[Sequence[Prompt]], Sequence[Answer | Skip]]
"""Answers a batch of prompts, in order; a Skip is a prompt that can't be answered (too long for the model, say)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateReport:
    """What became of the rows."""

    rows_in: int
    rows_out: int
    skipped: Mapping[str, int]
    num_cut: int


def regenerate(
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    generate: Generate,
    config: RegenerateConfig,
    console: Console | None = None,
) -> RegenerateReport:
    """Write `out` (JSON lines) with every answer replaced; goes on where an earlier call with the same arguments
    stopped.

    Raises:
        DataError: nothing there or usable, `out` exists, or its `.partial` belongs to other data or settings.
    """
    sources = parse_sources(source)
    target = Path(out)
    if target.exists():
        raise DataError(f"{target} exists: choose another --out or remove it")
    settings = {
        "sources": [[item.location, item.weight, content_digest(item)[0]] for item in sources],
        "config": asdict(config),
    }
    journal = _Journal(target.with_name(target.name + ".partial"), settings)
    columns = (
        TextColumn("regenerating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    quiet = console is None
    with journal, Progress(*columns, console=console, disable=quiet) as progress:
        rows = enumerate(read_mixture(sources, config.sampling.seed))
        task = progress.add_task("regenerating", total=None)
        while batch := list(islice(rows, config.batch_rows)):
            missing = [(index, decode_row(raw)) for index, raw in batch if index not in journal.done]
            for index, line in _regenerate_batch(missing, generate, config):
                journal.append(index, line)
            progress.advance(task, len(batch))
    return journal.finish(target)


def _regenerate_batch(
    rows: Sequence[tuple[int, Conversation | Skip]], generate: Generate, config: RegenerateConfig
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a batch, turn by turn: the first turns of all together, then the second ones."""
    open_rows: list[_OpenRow] = []
    for index, row in rows:
        opened = row if isinstance(row, Skip) else _OpenRow.of(index, row, config)
        if isinstance(opened, Skip):
            yield index, {"skipped": opened.reason, "detail": opened.detail}
        else:
            open_rows.append(opened)
    while open_rows:
        answers = generate([row.prompt(config) for row in open_rows])
        still_open: list[_OpenRow] = []
        for row, answer in zip(open_rows, answers, strict=True):
            if isinstance(answer, Skip):
                yield row.index, {"skipped": answer.reason, "detail": answer.detail, "asked": True}
            elif row.take(answer):
                still_open.append(row)
            else:
                yield row.index, row.line(answer, config)
        open_rows = still_open


class _OpenRow:
    """A conversation while its answers are being replaced."""

    def __init__(self, index: int, conversation: Conversation, turns: list[int]) -> None:
        self.index = index
        self._conversation = conversation
        self._turns = turns
        self._messages: list[Message] = list(conversation.messages[: turns[0]])

    @classmethod
    def of(cls, index: int, conversation: Conversation, config: RegenerateConfig) -> _OpenRow | Skip:
        messages = conversation.messages
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not messages:
            return Skip("no messages to answer (pre-rendered text and token ids can't be regenerated)")
        if any("tool_calls" in message or message["role"] == "tool" for message in messages):
            return Skip("tool calls: a new call would have no result to answer to")
        turns = [place for place in turns if place > 0][0 if config.every_turn else -1 :]
        return cls(index, conversation, turns) if turns else Skip("an assistant turn with nothing before it")

    def prompt(self, config: RegenerateConfig) -> Prompt:
        return Prompt(
            messages=list(self._messages),
            tools=self._conversation.tools,
            template_kwargs={**self._conversation.template_kwargs, **config.template_kwargs},
            seed=config.sampling.seed + self.index,
        )

    def take(self, answer: Answer) -> bool:
        """Add the answer and the messages up to the next turn; whether there is one. A cut answer ends the
        conversation, and so does a tool call, which has no result here."""
        place, *later = self._turns
        self._messages.append(answer.message)
        self._turns = later
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


class _Journal:
    """`OUT.partial`: a first line with the settings, then one line a finished row, in the order they finished.

    A half-written last line, as a kill leaves it, is cut off and its row asked for again; so are rows that a server
    refused, since the next run may ask it better (another model's name, a longer context).
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._offsets: dict[int, int] = {}
        mark = json.dumps({"settings": settings}, sort_keys=True, default=str).encode() + b"\n"
        if path.exists():
            self._read(mark)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(mark)
        self._file = path.open("r+b")
        self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def done(self) -> Mapping[int, int]:
        return self._offsets

    def _read(self, mark: bytes) -> None:
        whole = 0
        with self._path.open("rb") as file:
            if file.readline() != mark:
                raise DataError(
                    f"{self._path} was begun with other data or settings: give the same ones to go on, or remove it"
                )
            whole = file.tell()
            while (line := file.readline()).endswith(b"\n"):
                entry = cast(dict[str, Any], json.loads(line))
                if not entry.get("asked"):
                    self._offsets[int(entry["index"])] = whole
                whole = file.tell()
        os.truncate(self._path, whole)

    def append(self, index: int, line: Mapping[str, Any]) -> None:
        self._offsets[index] = self._file.tell()
        text = json.dumps({"index": index, **line}, ensure_ascii=False)
        self._file.write(text.encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()

    def finish(self, target: Path) -> RegenerateReport:
        """Rows in input order into `target`, settings and counts beside it; the journal goes."""
        skipped: Counter[str] = Counter()
        examples: dict[str, str] = {}
        num_out = num_cut = 0
        fresh = target.with_name(target.name + ".new")
        with self._path.open("rb") as journal, fresh.open("wb") as output:
            settings = json.loads(journal.readline())["settings"]
            for index in sorted(self._offsets):
                journal.seek(self._offsets[index])
                entry = cast(dict[str, Any], json.loads(journal.readline()))
                if "row" not in entry:
                    skipped[entry["skipped"]] += 1
                    examples.setdefault(entry["skipped"], encodable(entry.get("detail", "")))
                    continue
                num_out += 1
                num_cut += entry["row"]["finish_reason"] in CUT_REASONS
                output.write(json.dumps(entry["row"], ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        report = RegenerateReport(
            rows_in=len(self._offsets), rows_out=num_out, skipped=dict(skipped.most_common()), num_cut=num_cut
        )
        if not num_out:
            fresh.unlink()
            reasons = "; ".join(f"{reason} ({count}) {examples[reason]}" for reason, count in skipped.most_common(3))
            raise DataError(f"no row could be regenerated: {reasons or 'the source is empty'} (see {self._path})")
        account = target.with_name(target.name + ".account.json")
        account.write_text(json.dumps({**asdict(report), "settings": settings}, indent=2), encoding="utf-8")
        os.replace(fresh, target)
        self._path.unlink()
        return report
