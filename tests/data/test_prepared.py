from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.data.account import Account
from draftsmith.data.convert import PackedRow
from draftsmith.data.prepared import PreparedData, load_prepared, record_batch, record_on_policy
from draftsmith.errors import DataError


def packed(*ids: int) -> PackedRow:
    return PackedRow(np.asarray(ids, np.int32), np.asarray([i % 2 for i in ids], np.int8))


def test_documents_are_found_across_record_batches() -> None:
    empty: list[Any] = []
    batches = [
        record_batch([packed(1, 2), packed(3)], ["a", "b"]),
        record_batch(empty, empty),
        record_batch([packed(4, 5, 6)], ["c"]),
    ]
    data = PreparedData(batches, Account(), {})
    assert data.lengths == [2, 1, 3]
    assert [data.document(index).token_ids.tolist() for index in range(3)] == [[1, 2], [3], [4, 5, 6]]
    assert data.document(2).loss_mask.tolist() == [False, True, False]
    assert [data.source(index) for index in range(3)] == ["a", "b", "c"]
    for index in (-1, 3):
        with pytest.raises(IndexError, match="of 3"):
            data.document(index)


def test_a_damaged_account_names_the_remedy(tmp_path: Path) -> None:
    for text in ("{", "{}", "[]"):
        (tmp_path / "account.json").write_text(text)
        with pytest.raises(DataError, match=r"is damaged .*--overwrite"):
            load_prepared(tmp_path)


def test_a_verdict_on_the_answers_is_kept_in_the_account(tmp_path: Path) -> None:
    facts = {"fingerprint": "f", "account": Account(rows_in=1, rows_kept=1).as_json()}
    (tmp_path / "account.json").write_text(json.dumps(facts))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": []}))
    for mean in (0.7, 0.1):
        record_on_policy(tmp_path, {"mean": mean, "verdict": "whose, \ud800"})
        data = load_prepared(tmp_path)
        assert data.facts["on_policy"]["mean"] == mean
        assert (data.facts["fingerprint"], data.account.rows_kept) == ("f", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["account.json", "state.json"]


def test_a_document_is_a_copy() -> None:
    data = PreparedData([record_batch([packed(1, 2)], ["a"])], Account(), {})
    data.document(0).token_ids.zero_()
    assert data.document(0).token_ids.tolist() == [1, 2]
