"""Shards of a prepared data set as they are written: each with its account, so that a killed preparation goes on."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.account import Account
from draftsmith.data.arrow import pa
from draftsmith.data.conversations import Skip
from draftsmith.data.convert import Converted, PackedRow
from draftsmith.data.duplicates import NUM_BANDS, SeenRows, Signature
from draftsmith.data.prepared import FEATURES, SCHEMA, record_batch

BATCH_TOKENS = 1 << 22
"""Tokens of a record batch: bounds memory while writing."""
SIGNATURE = struct.Struct(f">16sB{NUM_BANDS}Q")
"""Exact hash, whether band keys follow, band keys."""


class Collected:
    """Rows of a stretch of input, with their account."""

    def __init__(self) -> None:
        self.account = Account()
        self.rows: list[PackedRow] = []
        self.sources: list[str] = []
        self.signatures: list[Signature] = []
        self.seen = SeenRows()
        self._duplicate: Skip | None = None
        """Of the last row that isn't a repeat: its repeats go with it."""

    def add(self, converted: Converted) -> None:
        account, outcome = self.account, converted.outcome
        if not converted.is_repeat:
            signature = None if isinstance(outcome, Skip) else converted.signature
            self._duplicate = None if signature is None else self.seen.check(signature)
        outcome = self._duplicate or outcome
        if isinstance(outcome, Skip):
            account.skip(outcome, converted.position)
            return
        if converted.signature is not None:
            self.signatures.append(converted.signature)
        account.rows_in += 1
        account.rows_kept += 1
        account.documents += len(converted.packed)
        account.documents_cut += outcome.rows_cut
        account.whole_tokens += outcome.whole_tokens
        account.total_tokens += outcome.total_tokens
        account.template_arguments[converted.template_arguments] += 1
        for turn in outcome.turns_left_out:
            account.leave_out_turn(turn, converted.position)
        for row in converted.packed:
            account.tokens += len(row.ids)
            account.supervised_tokens += int(row.mask.sum())
            self.rows.append(row)
            self.sources.append(converted.position)


class ShardWriter:
    """Shards of `shard_rows` input rows: `data-00000.arrow` with its account and signatures in `data-00000.json` /
    `.sig`.

    A shard counts as done once its `.json` is there, which is written last; a new writer goes on behind the last
    done one.
    """

    def __init__(self, folder: Path, shard_rows: int) -> None:
        self._folder = folder
        self._shard_rows = shard_rows
        self._total = Account()
        self._index = 0
        self._seen = SeenRows()
        while (saved := self._name(".json")).is_file():
            self._total.merge(Account.from_json(json.loads(saved.read_text(encoding="utf-8"))))
            for signature in read_signatures(self._name(".sig")):
                self._seen.check(signature)
            self._index += 1
        self.rows_done = self._total.rows_in
        self._current: Collected | None = None
        self._stream: Any = None

    def _name(self, suffix: str) -> Path:
        return self._folder / f"data-{self._index:05d}{suffix}"

    def add(self, converted: Converted) -> None:
        """Take the next row. A shard that is full closes in front of the next row that is no repeat."""
        if self._current and self._current.account.rows_in >= self._shard_rows and not converted.is_repeat:
            self._close(self._current)
        if self._current is None:
            self._current = Collected()
            self._current.seen = self._seen
            self._stream = pa.ipc.new_stream(str(self._name(".arrow")), SCHEMA)
        before = self._current.account.tokens // BATCH_TOKENS
        self._current.add(converted)
        if self._current.account.tokens // BATCH_TOKENS > before:
            self._flush(self._current)

    def _flush(self, current: Collected) -> None:
        self._stream.write_batch(record_batch(current.rows, current.sources))
        current.rows.clear()
        current.sources.clear()

    def _close(self, current: Collected) -> None:
        self._flush(current)
        self._stream.close()
        write_signatures(self._name(".sig"), current.signatures)
        fresh = self._name(".json.new")
        fresh.write_text(json.dumps(current.account.as_json()), encoding="utf-8")
        os.replace(fresh, self._name(".json"))
        self._total.merge(current.account)
        self._index += 1
        self._current = None

    def finish(self) -> Account:
        """Close the last shard, write what `datasets.load_from_disk` reads, remove what only resuming needs."""
        if self._current is not None:
            self._close(self._current)
        files = sorted(self._folder.glob("data-*.arrow"))
        state: dict[str, Any] = {
            "_data_files": [{"filename": file.name} for file in files],
            "_fingerprint": (self._folder / "fingerprint").read_text(encoding="utf-8")[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        info = {"citation": "", "description": "", "features": FEATURES, "homepage": "", "license": ""}
        (self._folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        (self._folder / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")
        for spent in (
            *self._folder.glob("data-*.json"),
            *self._folder.glob("data-*.sig"),
            self._folder / "fingerprint",
        ):
            spent.unlink()
        return self._total


def write_signatures(file: Path, signatures: Sequence[Signature]) -> None:
    nothing = (0,) * NUM_BANDS
    packed = (SIGNATURE.pack(item.exact, bool(item.near), *(item.near or nothing)) for item in signatures)
    file.write_bytes(b"".join(packed))


def read_signatures(file: Path) -> Iterator[Signature]:
    for exact, has_near, *near in SIGNATURE.iter_unpack(file.read_bytes()):
        yield Signature(exact, tuple(near) if has_near else ())
