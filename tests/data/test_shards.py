from __future__ import annotations

from pathlib import Path

import numpy as np

from draftsmith.data.convert import Converted, PackedRow
from draftsmith.data.duplicates import NUM_BANDS, Signature
from draftsmith.data.shards import Collected, ShardWriter, read_signatures, write_signatures
from draftsmith.data.tokenize import Tokenized


def converted(name: str, signature: Signature | None = None, *, is_repeat: bool = False) -> Converted:
    row = PackedRow(np.asarray([1, 2, 3], np.int32), np.asarray([0, 1, 1], np.int8))
    return Converted(
        position=name,
        outcome=Tokenized(rows=(), whole_tokens=3, total_tokens=3),
        packed=(row,),
        signature=signature,
        is_repeat=is_repeat,
    )


def test_signatures_survive_a_file(tmp_path: Path) -> None:
    signatures = [Signature(b"a" * 16, ()), Signature(b"b" * 16, tuple(range(2**64 - NUM_BANDS, 2**64)))]
    write_signatures(tmp_path / "s", signatures)
    assert list(read_signatures(tmp_path / "s")) == signatures


def test_counts_of_a_stretch() -> None:
    collected = Collected()
    collected.add(converted("a", Signature(b"a" * 16, ())))
    collected.add(converted("b", Signature(b"a" * 16, ())))
    account = collected.account
    assert (account.rows_in, account.rows_kept, account.tokens, account.supervised_tokens) == (2, 1, 3, 2)
    assert account.skipped == {"duplicate of an earlier row": 1}


def test_a_new_writer_goes_on_behind_the_last_whole_shard(tmp_path: Path) -> None:
    (tmp_path / "fingerprint").write_text("f")
    first = ShardWriter(tmp_path, 2)
    for index in range(6):
        first.add(converted(str(index), Signature(bytes([index]) * 16, ())))
    second = ShardWriter(tmp_path, 2)
    assert second.rows_done == 4
    second.add(converted("4", Signature(bytes([4]) * 16, ())))
    second.add(converted("5", Signature(bytes([0]) * 16, ())))
    account = second.finish()
    assert (account.rows_in, account.rows_kept) == (6, 5), "signatures of whole shards are remembered"
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["data-00000.arrow", "data-00001.arrow", "data-00002.arrow", "dataset_info.json", "state.json"]


def test_repeats_of_a_duplicate_go_with_it_also_across_shards(tmp_path: Path) -> None:
    (tmp_path / "fingerprint").write_text("f")
    writer = ShardWriter(tmp_path, 2)
    for index in (0, 1, 0):
        for copy in range(3):
            writer.add(converted(str(index), None if copy else Signature(bytes([index]) * 16, ()), is_repeat=copy > 0))
    assert ShardWriter(tmp_path, 2).rows_done == 6, "a shard ends in front of a row, not between its repeats"
    account = writer.finish()
    assert (account.rows_in, account.rows_kept) == (9, 6)
    assert account.skipped == {"duplicate of an earlier row": 3}
