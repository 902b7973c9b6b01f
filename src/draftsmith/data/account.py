"""The account of a preparation: every row kept, or skipped and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftsmith.data.conversations import Skip

MAX_EXAMPLES = 3
"""Examples kept of each reason."""


@dataclass(slots=True, kw_only=True)
class Account:
    """Counts that add up: `rows_in == rows_kept + sum(skipped.values())`. Shards' accounts merge."""

    rows_in: int = 0
    """Rows read, repeats by weight included."""
    rows_kept: int = 0
    documents: int = 0
    """Documents written: more than `rows_kept` where the template rewrites history."""
    documents_cut: int = 0
    """Documents that `max_length` shortened."""
    tokens: int = 0
    supervised_tokens: int = 0
    whole_tokens: int = 0
    """Tokens before cutting if every conversation were one document."""
    total_tokens: int = 0
    """Tokens before cutting of the documents made of them."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    turns_left_out: Counter[str] = field(default_factory=Counter[str])
    """Assistant turns of kept rows that stay context only, by reason."""
    template_arguments: Counter[str] = field(default_factory=Counter[str])
    """Kept rows by the template arguments they were rendered with, as JSON; whoever serves must use the same."""
    examples: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Places of a few rows for each reason."""

    @property
    def token_multiplier(self) -> float:
        """Tokens of all documents over those of the conversations as single rows: what splitting rewritten history
        costs."""
        return self.total_tokens / self.whole_tokens if self.whole_tokens else 1.0

    def skip(self, skip: Skip, position: str) -> None:
        self.rows_in += 1
        self.skipped[skip.reason] += 1
        self._remember(skip, position)

    def leave_out_turn(self, skip: Skip, position: str) -> None:
        self.turns_left_out[skip.reason] += 1
        self._remember(skip, position)

    def _remember(self, skip: Skip, position: str) -> None:
        places = self.examples.setdefault(skip.reason, [])
        if len(places) < MAX_EXAMPLES:
            places.append(f"{position}: {skip.example}" if skip.detail else position)

    def merge(self, other: Account) -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped.update(other.skipped)
        self.turns_left_out.update(other.turns_left_out)
        self.template_arguments.update(other.template_arguments)
        for reason, places in other.examples.items():
            mine = self.examples.setdefault(reason, [])
            mine.extend(places[: MAX_EXAMPLES - len(mine)])

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in COUNTS},
            "token_multiplier": round(self.token_multiplier, 4),
            "skipped": dict(self.skipped.most_common()),
            "turns_left_out": dict(self.turns_left_out.most_common()),
            "template_arguments": dict(self.template_arguments.most_common()),
            "examples": self.examples,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Account:
        return cls(
            **{name: int(saved[name]) for name in COUNTS},
            skipped=Counter(saved["skipped"]),
            turns_left_out=Counter(saved["turns_left_out"]),
            template_arguments=Counter(saved["template_arguments"]),
            examples=dict(saved["examples"]),
        )

    def _example(self, reason: str) -> str:
        return self.examples.get(reason, [""])[0]

    def print(self, console: Console, title: str = "Rows") -> None:
        """A table of what became of every row."""
        table = Table("what", "count", "for example", title=escape(title), title_justify="left")
        table.add_row("rows in", f"{self.rows_in:,}")
        table.add_row("kept", f"{self.rows_kept:,}")
        for reason, count in self.skipped.most_common():
            table.add_row(escape(f"skipped: {reason}"), f"{count:,}", escape(self._example(reason)))
        for reason, count in self.turns_left_out.most_common():
            table.add_row(escape(f"turns not learnt: {reason}"), f"{count:,}", escape(self._example(reason)))
        table.add_row("documents", f"{self.documents:,}", f"{self.documents_cut:,} cut at the longest length")
        share = self.supervised_tokens / self.tokens if self.tokens else 0.0
        table.add_row("tokens", f"{self.tokens:,}", f"{share:.0%} supervised")
        if self.token_multiplier > 1.0005:
            table.add_row(
                "token multiplier",
                f"{self.token_multiplier:.2f}x",
                "the template rewrites earlier turns: one document per turn (--last-turn-only makes it one per row)",
            )
        console.print(table)


COUNTS = (
    "rows_in",
    "rows_kept",
    "documents",
    "documents_cut",
    "tokens",
    "supervised_tokens",
    "whole_tokens",
    "total_tokens",
)
"""The plain counts of an account, in the order they are saved and shown."""
