from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from draftsmith.data.conversations import Conversation, Skip
from draftsmith.data.convert import decode_row
from draftsmith.data.sources import Source, content_digest, is_hub_id, parse_sources, read_mixture, read_source
from draftsmith.errors import DataError

ROWS = [
    {"messages": [{"role": "user", "content": f"q{index} 中文 😀 " * 40}, {"role": "gpt", "content": f"a{index}"}]}
    for index in range(60)
]
LINES = "".join(json.dumps(row, ensure_ascii=index % 2 == 0) + "\n" for index, row in enumerate(ROWS)).encode()
ARRAY = json.dumps(ROWS, indent=1).encode()


def answers(source: Path | str) -> list[str]:
    rows = [decode_row(raw) for raw in read_source(Source(str(source)))]
    return [row.messages[-1]["content"] if isinstance(row, Conversation) else f"skip: {row.reason}" for row in rows]


ALL = [f"a{index}" for index in range(60)]


def test_one_bare_list_of_messages_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(ROWS[0]["messages"]) + "\n")
    assert answers(tmp_path / "one.jsonl") == ALL[:1]


def test_bare_lists_are_told_from_an_array_however_long_the_first_is(tmp_path: Path) -> None:
    first = [{"role": "user", "content": "long " * 100_000}, {"role": "gpt", "content": "a0"}]
    lines = [json.dumps(first), *(json.dumps(row["messages"]) for row in ROWS[1:])]
    (tmp_path / "lists.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    assert answers(tmp_path / "lists.jsonl.gz") == ALL


def test_text_behind_an_array_is_accounted_for(tmp_path: Path) -> None:
    pretty = json.dumps(ROWS, indent=1)
    (tmp_path / "two.json").write_text(pretty + "\n" + pretty)
    (tmp_path / "one.json").write_text(pretty + " \n\n")
    assert answers(tmp_path / "two.json") == [*ALL, "skip: text after the end of the JSON array"]
    assert answers(tmp_path / "one.json") == ALL


def test_a_file_name_that_is_no_utf8_reads_like_any(tmp_path: Path) -> None:
    file = tmp_path / "a\udcff.jsonl"
    file.write_bytes(LINES)
    positions = [raw.position for raw in read_source(Source(str(tmp_path)))]
    assert positions[0].encode() == b"a\\udcff.jsonl:1"
    assert content_digest(Source(str(tmp_path)))[1] == 60


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chats.jsonl", LINES),
        ("windows.jsonl", b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\r\n")),
        ("array.json", ARRAY),
        ("compact.json", b"\xef\xbb\xbf" + json.dumps(ROWS, separators=(",", ":")).encode()),
        ("array.json.gz", gzip.compress(ARRAY)),
        ("chats.jsonl.gz", gzip.compress(LINES[:7000]) + gzip.compress(LINES[7000:])),
        ("chats.jsonl.zst", zstandard.compress(LINES[:7000]) + zstandard.compress(LINES[7000:])),
        ("no_suffix_at_all", zstandard.compress(ARRAY)),
        ("lists.jsonl", "".join(json.dumps(row["messages"]) + "\n" for row in ROWS).encode()),
    ],
)
def test_files_are_recognised_by_their_bytes(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert answers(tmp_path / name) == ALL


def test_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "chats.parquet")
    assert answers(tmp_path / "chats.parquet") == ALL


def test_a_folder_is_read_in_name_order_and_other_files_are_left(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no row")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.jsonl").write_bytes(LINES)
    (tmp_path / "a.json").write_bytes(ARRAY)
    assert answers(tmp_path) == ALL + ALL


@pytest.mark.parametrize("as_dict", [False, True])
def test_saved_data_sets(tmp_path: Path, as_dict: bool) -> None:
    saved: Any = datasets.Dataset.from_list(ROWS)
    (datasets.DatasetDict({"train": saved}) if as_dict else saved).save_to_disk(str(tmp_path / "saved"))
    assert answers(tmp_path / "saved") == ALL
    assert len(content_digest(Source(str(tmp_path / "saved")))[0]) == 32


def test_a_broken_line_costs_that_line_alone(tmp_path: Path) -> None:
    lines = LINES.splitlines()
    lines[3] = lines[3][:50]
    lines[5] = b"[" * 100_000
    lines[7] = b"\xff\xfe" + lines[7]
    (tmp_path / "chats.jsonl").write_bytes(b"\n".join(lines))
    found = answers(tmp_path / "chats.jsonl")
    assert [index for index, answer in enumerate(found) if answer == "skip: broken JSON line"] == [3, 5, 7]
    assert len(found) == 60


def test_a_broken_array_keeps_what_comes_before(tmp_path: Path) -> None:
    (tmp_path / "array.json").write_bytes(ARRAY[: len(ARRAY) // 2])
    found = answers(tmp_path / "array.json")
    assert found[:20] == ALL[:20]
    assert found[-1] == "skip: broken JSON: the array ends here"


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.jsonl.zst", "cut.parquet"])
def test_damaged_files_are_explained(tmp_path: Path, name: str) -> None:
    whole = {"cut.jsonl.gz": gzip.compress(LINES), "cut.jsonl.zst": zstandard.compress(LINES), "cut.parquet": b"PAR1xx"}
    (tmp_path / name).write_bytes(whole[name][:-20] if name != "cut.parquet" else whole[name])
    last = [decode_row(raw) for raw in read_source(Source(str(tmp_path / name)))][-1]
    assert isinstance(last, Skip)


def test_a_kind_of_file_that_is_not_known_has_no_usable_row(tmp_path: Path) -> None:
    (tmp_path / "chats.bz2").write_bytes(bz2.compress(LINES))
    assert set(answers(tmp_path / "chats.bz2")) == {"skip: broken JSON line"}


def test_weights(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_bytes(LINES)
    assert parse_sources([f"{file}:0.3", str(file)]) == (Source(str(file), 0.3), Source(str(file), 1.0))
    drawn = list(read_mixture(parse_sources(f"{file}:0.5"), seed=1))
    assert len(drawn) == 60
    kept = [row.position for row in drawn if not isinstance(row.value, Skip)]
    assert 15 < len(kept) < 45
    again = read_mixture(parse_sources(f"{file}:0.5"), 1)
    assert kept == [row.position for row in again if not isinstance(row.value, Skip)]
    assert len(list(read_mixture(parse_sources(f"{file}:2.5"), 1))) in range(130, 171)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        parse_sources(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="weight 0"):
        parse_sources(f"{tmp_path}:0")
    with pytest.raises(DataError, match="no conversation file"):
        answers(tmp_path)


def test_hub_ids() -> None:
    assert is_hub_id("owner/name")
    assert is_hub_id("owner/name@train[:10%]")
    assert not any(map(is_hub_id, ["./name", "a/b/c", "data/chats.jsonl", "name", "~/x"]))


def test_an_unreachable_data_set_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, **options: Any) -> None:
        raise ConnectionError(f"couldn't reach {name}\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"owner/name is no file here .*couldn't reach owner/name\)"):
        list(read_source(Source("owner/name")))


def test_a_hub_data_set_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, **options: Any) -> list[Any]:
        asked.append((name, options))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert answers("owner/name@val") == ALL
    assert asked == [("owner/name", {"split": "val", "streaming": True})]
