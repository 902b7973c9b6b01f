"""Look at prepared data: rows with supervised tokens coloured, lengths, bucket plan; in the terminal or as an HTML
page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.data.buckets import OrderConfig, bucket_of, choose_buckets, fill_share, padding_waste, plan_epoch
from draftsmith.data.prepared import PreparedData
from draftsmith.errors import ConfigError
from draftsmith.records import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_BARS = 16
BAR_WIDTH = 40
STYLE = "bold green"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectConfig:
    """What is shown of a prepared data set."""

    rows: int = 3
    """Rows shown, spread evenly over the data."""
    start: int | None = None
    """First row shown, then those behind it; left out, rows are spread over the data."""
    num_buckets: int = 6
    """Buckets of the plan."""
    html: Path | None = None
    """Write a page instead of printing."""

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ConfigError(f"--rows {self.rows} is below 0")
        if self.start is not None and self.start < 0:
            raise ConfigError(f"--start {self.start} is below 0: rows count from 0")


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a document's text, all supervised or all not."""

    text: str
    supervised: bool


@dataclass(frozen=True, slots=True)
class BucketLine:
    """One bucket of the plan."""

    length: int
    num_documents: int
    waste: float


def pieces_of(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """The document's text in stretches; a character whose tokens lie on both sides of a border shows as replacement
    marks."""
    ids = cast(list[int], document.token_ids.tolist())
    mask = cast(list[bool], document.loss_mask.tolist())
    return [
        Piece(cast(str, tokenizer.decode([ids[place] for place in group])), supervised)
        for supervised, group in groupby(range(len(ids)), key=mask.__getitem__)
    ]


def length_histogram(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(upper edge, documents up to it) in `NUM_BARS` equal steps."""
    step = max(1, -(-max(lengths) // NUM_BARS))
    counts = [0] * (-(-max(lengths) // step))
    for length in lengths:
        counts[(length - 1) // step] += 1
    return [((index + 1) * step, count) for index, count in enumerate(counts)]


def bucket_lines(lengths: Sequence[int], buckets: Sequence[int]) -> list[BucketLine]:
    members: list[list[int]] = [[] for _ in buckets]
    for length in lengths:
        members[bucket_of(length, buckets)].append(length)
    return [
        BucketLine(bucket, len(group), 1 - sum(group) / (bucket * len(group)) if group else 0.0)
        for bucket, group in zip(buckets, members, strict=True)
    ]


def shown_indices(num_documents: int, config: InspectConfig) -> list[int]:
    """Which rows are shown."""
    if config.start is not None:
        return list(range(min(config.start, num_documents), min(config.start + config.rows, num_documents)))
    count = min(config.rows, num_documents)
    return [place * num_documents // count for place in range(count)]


def inspect_data(
    data: PreparedData,
    tokenizer: PreTrainedTokenizerBase,
    config: InspectConfig,
    order: OrderConfig,
    console: Console,
) -> None:
    """Print rows, lengths, the bucket plan and the account, or write them to `config.html`."""
    buckets = choose_buckets(data.lengths, config.num_buckets)
    plans = plan_epoch(data.lengths, buckets, order, epoch=0)
    summary = (
        f"{len(data):,} documents, {sum(data.lengths):,} tokens, {len(plans):,} batches an epoch of "
        f"{order.token_budget:,} tokens, {fill_share(plans, data.lengths, order):.1%} full; the target's forwards are "
        f"{padding_waste(data.lengths, buckets):.1%} padding"
    )
    lines = bucket_lines(data.lengths, buckets)
    if config.html is not None:
        config.html.parent.mkdir(parents=True, exist_ok=True)
        config.html.write_text(_page(data, tokenizer, config, summary, lines), encoding="utf-8")
        console.print(f"wrote {config.html}")
        return
    for index in shown_indices(len(data), config):
        document = data.document(index)
        console.rule(Text(f"document {index} · {data.source(index)} · {_counts(document)}"))
        for piece in pieces_of(document, tokenizer):
            console.print(Text(piece.text, style=STYLE if piece.supervised else "dim"), end="")
        console.print()
    console.rule("lengths")
    bars = length_histogram(data.lengths)
    widest = max(count for _, count in bars)
    for edge, count in bars:
        console.print(f"{edge:>8,} {'█' * round(BAR_WIDTH * count / widest)} {count:,}", highlight=False)
    table = Table("length", "documents", "padding", title="buckets", title_justify="left")
    for line in lines:
        table.add_row(f"{line.length:,}", f"{line.num_documents:,}", f"{line.waste:.1%}")
    console.print(table)
    console.print(summary, highlight=False)
    data.account.print(console, "rows of the source")


def _counts(document: Document) -> str:
    supervised = int(torch.count_nonzero(document.loss_mask))
    return f"{document.length:,} tokens, {supervised:,} supervised"


def _page(
    data: PreparedData,
    tokenizer: PreTrainedTokenizerBase,
    config: InspectConfig,
    summary: str,
    lines: Sequence[BucketLine],
) -> str:
    bars = length_histogram(data.lengths)
    widest = max(count for _, count in bars)
    rows: list[str] = []
    for index in shown_indices(len(data), config):
        document = data.document(index)
        text = "".join(
            f"<mark>{html.escape(piece.text)}</mark>" if piece.supervised else html.escape(piece.text)
            for piece in pieces_of(document, tokenizer)
        )
        title = html.escape(f"document {index} · {data.source(index)} · {_counts(document)}")
        rows.append(f"<h3>{title}</h3><pre>{text}</pre>")
    lengths = "".join(
        f'<tr><td>{edge:,}</td><td><div class="bar" style="width:{400 * count / widest:.0f}px"></div></td>'
        f"<td>{count:,}</td></tr>"
        for edge, count in bars
    )
    buckets = "".join(
        f"<tr><td>{line.length:,}</td><td>{line.num_documents:,}</td><td>{line.waste:.1%}</td></tr>" for line in lines
    )
    account = data.account
    reasons = "".join(
        f"<tr><td>{html.escape(reason)}</td><td>{count:,}</td>"
        f"<td>{html.escape('; '.join(account.examples.get(reason, [])))}</td></tr>"
        for reason, count in [*account.skipped.most_common(), *account.turns_left_out.most_common()]
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>draftsmith inspect</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f4; padding: 1rem; color: #666; }}
mark {{ background: #c9f2d0; color: #063; }} td {{ padding: 0 1rem 0 0; text-align: right; }}
.bar {{ background: #4a8; height: .9em; }}
</style></head><body>
<h1>Prepared data</h1><p>{html.escape(summary)}</p>
<p>Supervised tokens are <mark>marked</mark>: what the assistant itself would emit, its end of turn included.</p>
<h2>Lengths</h2><table>{lengths}</table>
<h2>Buckets</h2><table><tr><td>length</td><td>documents</td><td>padding</td></tr>{buckets}</table>
<h2>Rows of the source</h2>
<p>{account.rows_in:,} in, {account.rows_kept:,} kept</p><table>{reasons}</table>
<h2>Documents</h2>{"".join(rows)}
</body></html>
"""
