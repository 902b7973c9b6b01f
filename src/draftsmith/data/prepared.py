"""A prepared data set: Arrow record batches of token ids and loss masks, in memory or mapped from a folder.

The folder is a saved data set of the `datasets` library (`load_from_disk` reads it) with `account.json` beside the
shards.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from draftsmith.data.account import Account
from draftsmith.data.arrow import ArrowError, RecordBatch, pa
from draftsmith.data.convert import PackedRow
from draftsmith.errors import DataError
from draftsmith.records import Document

COLUMNS = {"input_ids": "int32", "loss_mask": "int8", "source": "string"}
FEATURES = {
    name: {"dtype": kind, "_type": "Value"}
    if kind == "string"
    else {"feature": {"dtype": kind, "_type": "Value"}, "_type": "List"}
    for name, kind in COLUMNS.items()
}
SCHEMA: Any = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.int8())),
        pa.field("source", pa.string()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": FEATURES}})},
)
ACCOUNT_FILE = "account.json"


def record_batch(rows: Sequence[PackedRow], sources: Sequence[str]) -> RecordBatch:
    """Documents as one Arrow record batch."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row.ids) for row in rows], out=offsets[1:])
    ids = np.concatenate([row.ids for row in rows]) if rows else np.zeros(0, dtype=np.int32)
    masks = np.concatenate([row.mask for row in rows]) if rows else np.zeros(0, dtype=np.int8)
    columns = [
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids)),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(masks)),
        pa.array(list(sources), pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


class PreparedData:
    """Documents by index, with their lengths; token ids stay in Arrow buffers (mapped from disk where there is a
    folder)."""

    def __init__(self, batches: Sequence[RecordBatch], account: Account, facts: dict[str, Any]) -> None:
        self.account = account
        self.facts = facts
        """Fingerprint, template hash, options, sources and where known the off-policy alarm's verdict, as saved in
        `account.json`."""
        self._batches = [batch for batch in batches if batch.num_rows]
        self._starts = [0]
        self.lengths: list[int] = []
        for batch in self._batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
            offsets = batch.column(0).offsets.to_numpy()
            self.lengths.extend(cast(list[int], np.diff(offsets).tolist()))

    def __len__(self) -> int:
        return len(self.lengths)

    def _place(self, index: int) -> tuple[RecordBatch, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        which = bisect.bisect_right(self._starts, index) - 1
        return self._batches[which], index - self._starts[which]

    def document(self, index: int) -> Document:
        """Document `index`, copied out as int64 ids and bool mask."""
        batch, row = self._place(index)
        ids: Any = batch.column(0)[row].values.to_numpy()
        mask: Any = batch.column(1)[row].values.to_numpy()
        return Document(
            token_ids=torch.from_numpy(ids.astype(np.int64)), loss_mask=torch.from_numpy(mask.astype(np.bool_))
        )

    def source(self, index: int) -> str:
        """File and line that document `index` came from."""
        batch, row = self._place(index)
        return str(batch.column(2)[row].as_py())


def record_on_policy(folder: Path, found: Mapping[str, Any]) -> None:
    """Write what the off-policy alarm found into the account of a prepared data set, as `on_policy`."""
    saved = folder / ACCOUNT_FILE
    facts = json.loads(saved.read_text(encoding="utf-8")) | {"on_policy": dict(found)}
    fresh = folder / f"{ACCOUNT_FILE}.new"
    fresh.write_text(json.dumps(facts, indent=2, ensure_ascii=False), encoding="utf-8", errors="backslashreplace")
    os.replace(fresh, saved)


def load_prepared(path: str | Path) -> PreparedData:
    """Open a folder written by `prepare`.

    Raises:
        DataError: no such folder, or one that `prepare` didn't finish.
    """
    folder = Path(path)
    saved = folder / ACCOUNT_FILE
    if not saved.is_file():
        raise DataError(f"{folder} is no prepared data set (no {ACCOUNT_FILE}): write one with draftsmith prepare")
    batches: list[RecordBatch] = []
    try:
        facts = cast(dict[str, Any], json.loads(saved.read_text(encoding="utf-8")))
        account = Account.from_json(facts["account"])
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        for entry in state["_data_files"]:
            batches.extend(read_batches(folder / entry["filename"]))
    except (OSError, ArrowError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} is damaged ({type(error).__name__}: {error}): prepare the data again with --overwrite"
        ) from error
    return PreparedData(batches, account, facts)


def read_batches(file: Path) -> list[RecordBatch]:
    """Record batches of one shard, mapped, not copied."""
    return list(pa.ipc.open_stream(pa.memory_map(str(file))))
