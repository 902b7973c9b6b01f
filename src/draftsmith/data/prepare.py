"""Conversations -> a prepared data set with an account of every row: streamed, in shards, resumable, atomic.

Shards are written into `OUT.partial` and the folder is renamed when all are there, so that an output folder is whole
or absent. The fingerprint covers the data's bytes, the template, the tokenizer and every option; a second run with
the same fingerprint reuses the output, one with another refuses to overwrite it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from draftsmith.data.account import Account
from draftsmith.data.convert import RowConverter, convert_rows
from draftsmith.data.duplicates import Duplicates
from draftsmith.data.prepared import ACCOUNT_FILE, PreparedData, load_prepared, record_batch
from draftsmith.data.progress import progress_bar
from draftsmith.data.shards import Collected, ShardWriter
from draftsmith.data.sources import Source, content_digest, parse_sources, read_mixture
from draftsmith.data.tokenize import TokenizeConfig, template_hash
from draftsmith.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 2
"""Raised when what a prepared folder holds changes meaning: part of the fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """How a data set is prepared."""

    tokenize: TokenizeConfig = field(default_factory=TokenizeConfig)
    duplicates: Duplicates = "keep"
    """Drop rows that repeat an earlier one: exactly, or nearly (a few words differ)."""
    workers: int = 1
    """Processes that tokenise; 0 takes all cores (worth it from some ten thousand rows on)."""
    shard_rows: int = 20_000
    """Rows of input per shard: what a killed preparation loses at most."""
    mixture_seed: int = 0
    """Chooses which rows a weight below 1 keeps."""
    overwrite: bool = False
    """Replace an output folder that holds something else."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"--workers {self.workers} is below 0: give 0 for all cores")
        if self.shard_rows < 1:
            raise ConfigError(f"--shard-rows {self.shard_rows} must be at least 1")


def prepare(
    source: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    out: str | Path | None,
    config: PrepareConfig,
    console: Console | None = None,
) -> PreparedData:
    """Prepare conversations; `out=None` keeps them in memory (for a few thousand rows at most).

    With a console, shows a progress bar and prints the account.

    Raises:
        DataError: nothing there, nothing usable, or `out` holds something else. TargetError: no chat template.
    """
    sources = parse_sources(source)
    digests = [content_digest(item) for item in sources]
    facts = _facts(sources, [digest for digest, _ in digests], tokenizer, config)
    converter = RowConverter(tokenizer, config.tokenize, config.duplicates)
    total = expected_rows(sources, [lines for _, lines in digests])
    shown = _Shown(console, total)
    if out is None:
        return _prepare_in_memory(sources, converter, config, facts, shown)
    folder = Path(out)
    if ready := _reusable(folder, facts["fingerprint"], config.overwrite):
        shown.account(ready.account, f"{folder} is up to date")
        return ready
    partial = _partial_folder(folder, facts["fingerprint"])
    writer = ShardWriter(partial, config.shard_rows)
    started = time.perf_counter()
    rows = islice(read_mixture(sources, config.mixture_seed), writer.rows_done, None)
    with shown.bar(writer.rows_done) as advance:
        for converted in convert_rows(rows, converter, config.workers):
            writer.add(converted)
            advance(1)
    account = writer.finish()
    seconds = time.perf_counter() - started
    _refuse_nothing(account, sources, partial)
    facts |= {"account": account.as_json(), "rows_per_second": round(account.rows_in / max(seconds, 1e-9), 1)}
    saved = json.dumps(facts, indent=2, ensure_ascii=False)
    (partial / ACCOUNT_FILE).write_text(saved, encoding="utf-8", errors="backslashreplace")
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)
    shown.account(account, f"{folder}: {facts['rows_per_second']:,.0f} rows/s")
    return load_prepared(folder)


def _prepare_in_memory(
    sources: Sequence[Source], converter: RowConverter, config: PrepareConfig, facts: dict[str, Any], shown: _Shown
) -> PreparedData:
    collected = Collected()
    with shown.bar(0) as advance:
        for converted in convert_rows(read_mixture(sources, config.mixture_seed), converter, config.workers):
            collected.add(converted)
            advance(1)
    _refuse_nothing(collected.account, sources, None)
    shown.account(collected.account, "rows")
    facts |= {"account": collected.account.as_json()}
    return PreparedData([record_batch(collected.rows, collected.sources)], collected.account, facts)


def expected_rows(sources: Sequence[Source], num_lines: Sequence[int | None], *, left_out: bool = True) -> int | None:
    """Rows that a mixture brings, with those that its weights leave out or without; None where a source can't tell."""
    if any(lines is None for lines in num_lines):
        return None
    least = 1.0 if left_out else 0.0
    return sum(round((lines or 0) * max(least, item.weight)) for item, lines in zip(sources, num_lines, strict=True))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that decides ids; padding and truncation, which calls leave behind, are not part of it."""
    if tokenizer.is_fast:
        state = json.loads(cast(Any, tokenizer).backend_tokenizer.to_str())
        state.pop("padding", None)
        state.pop("truncation", None)
    else:
        state = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


def _facts(
    sources: Sequence[Source], digests: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: PrepareConfig
) -> dict[str, Any]:
    """What decides the output. Workers, shard size and overwriting don't, so they stand outside the fingerprint."""
    facts: dict[str, Any] = {
        "format": FORMAT,
        "sources": [
            {"location": source.location, "weight": source.weight, "digest": digest}
            for source, digest in zip(sources, digests, strict=True)
        ],
        "tokenizer": tokenizer_digest(tokenizer),
        "tokenizer_name": tokenizer.name_or_path,
        "template_hash": template_hash(tokenizer),
        "options": {**asdict(config.tokenize), "duplicates": config.duplicates, "seed": config.mixture_seed},
    }
    decisive = {key: value for key, value in facts.items() if key != "tokenizer_name"}
    text = json.dumps(decisive, sort_keys=True, default=str)
    return {"fingerprint": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), **facts}


def _reusable(folder: Path, fingerprint: str, overwrite: bool) -> PreparedData | None:
    """The data set already in `folder`, if it is the one that would be written."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if (folder / ACCOUNT_FILE).is_file():
        ready = load_prepared(folder)
        if ready.facts["fingerprint"] == fingerprint:
            return ready
        if overwrite:
            return None
        raise DataError(
            f"{folder} holds data prepared from other rows or with other options: choose another --out or give "
            "--overwrite"
        )
    raise DataError(f"{folder} exists and is no prepared data set: choose another --out (it is left as it is)")


def _partial_folder(folder: Path, fingerprint: str) -> Path:
    """`OUT.partial`, with the shards of an interrupted preparation if that was the same one."""
    partial = folder.with_name(folder.name + ".partial")
    mark = partial / "fingerprint"
    if partial.exists() and not (mark.is_file() and mark.read_text(encoding="utf-8") == fingerprint):
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    mark.write_text(fingerprint, encoding="utf-8")
    return partial


def _refuse_nothing(account: Account, sources: Sequence[Source], partial: Path | None) -> None:
    if account.rows_kept:
        return
    if partial is not None:
        shutil.rmtree(partial)
    names = ", ".join(source.location for source in sources)
    reasons = "; ".join(f"{reason} ({count})" for reason, count in account.skipped.most_common(3))
    raise DataError(
        f"no usable conversation in {names}: {account.rows_in} rows, {reasons or 'all empty'}; each row needs messages "
        "with an assistant turn, prompt and completion, text, or input_ids and loss_mask"
    )


class _Shown:
    """What a person sees of a preparation; nothing without a console."""

    def __init__(self, console: Console | None, total: int | None) -> None:
        self._console = console
        self._total = total

    def bar(self, done: int) -> AbstractContextManager[Callable[[int], None]]:
        return progress_bar(self._console, "preparing", self._total, done)

    def account(self, account: Account, title: str) -> None:
        if self._console is not None:
            account.print(self._console, title)
