from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import pytest
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftsmith.data.convert import RowConverter
from draftsmith.data.prepare import PrepareConfig, expected_rows, prepare, tokenizer_digest
from draftsmith.data.prepared import load_prepared
from draftsmith.data.shards import ShardWriter
from draftsmith.data.sources import Source, read_mixture
from draftsmith.data.tokenize import TokenizeConfig
from draftsmith.errors import ConfigError, DataError
from tests.data.mutated import mutated_line

ForTemplate = Callable[[str | None], PreTrainedTokenizerFast]
WORDS = [f"word{index}" for index in range(20)]


def row(index: int, **fields: Any) -> dict[str, Any]:
    answer = " ".join(WORDS[: 3 + index % 17]) + f" {index}."
    return {"messages": [{"role": "user", "content": f"q {index}"}, {"role": "assistant", "content": answer}], **fields}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in rows))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write(tmp_path / "chats.jsonl", [row(index) for index in range(40)])


def test_documents_and_account_survive_the_folder(tokenizer_for: ForTemplate, chats: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_for("chatml")
    held = prepare(chats, tokenizer, None, PrepareConfig())
    stored = prepare(chats, tokenizer, tmp_path / "out", PrepareConfig(shard_rows=7))
    again = load_prepared(tmp_path / "out")
    assert len(held) == len(stored) == len(again) == 40
    assert held.lengths == stored.lengths == again.lengths
    for index in (0, 6, 7, 39):
        assert held.document(index).token_ids.equal(again.document(index).token_ids)
        assert held.document(index).loss_mask.equal(again.document(index).loss_mask)
        assert again.source(index) == f"chats.jsonl:{index + 1}"
    assert held.account.as_json() == again.account.as_json()
    with pytest.raises(IndexError):
        again.document(40)


def test_the_folder_is_a_data_set_of_the_datasets_library(
    tokenizer_for: ForTemplate, chats: Path, tmp_path: Path
) -> None:
    prepared = prepare(chats, tokenizer_for("chatml"), tmp_path / "out", PrepareConfig(shard_rows=16))
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    assert loaded.column_names == ["input_ids", "loss_mask", "source"]
    assert loaded[20]["input_ids"] == prepared.document(20).token_ids.tolist()


def test_every_row_is_kept_or_skipped_with_a_reason(tokenizer_for: ForTemplate, tmp_path: Path) -> None:
    file = write(
        tmp_path / "mixed.jsonl",
        [row(0), "{broken", {"messages": []}, 7, row(1), {"messages": [{"role": "user", "content": "u"}]}, {"a": 1}],
    )
    screen = io.StringIO()
    prepared = prepare(
        file, tokenizer_for("chatml"), tmp_path / "out", PrepareConfig(), Console(file=screen, width=160)
    )
    account = json.loads((tmp_path / "out" / "account.json").read_text())["account"]
    assert account["rows_in"] == 7
    assert account["rows_kept"] == len(prepared) == 2
    assert sum(account["skipped"].values()) == 5
    assert account["examples"]["broken JSON line"][0].startswith("mixed.jsonl:2: ")
    assert "broken JSON line" in screen.getvalue()
    assert "rows/s" in screen.getvalue()


def test_A19_rows_of_every_kind_come_out_as_many_as_went_in(tokenizer_for: ForTemplate, tmp_path: Path) -> None:
    text = "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>\n"
    file = write(tmp_path / "text.jsonl", [{"text": text} for _ in range(130)])
    prepared = prepare(file, tokenizer_for("chatml"), None, PrepareConfig())
    assert len(prepared) == 130


@pytest.mark.parametrize(
    "change",
    [
        {"tokenize": TokenizeConfig(max_length=30)},
        {"tokenize": TokenizeConfig(last_turn_only=True)},
        {"tokenize": TokenizeConfig(template_kwargs={"enable_thinking": False})},
        {"duplicates": "drop-exact"},
        {"mixture_seed": 1},
    ],
)
def test_A30_every_option_is_in_the_cache_key(
    tokenizer_for: ForTemplate, chats: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    tokenizer = tokenizer_for("chatml")
    out = tmp_path / "out"
    first = prepare(chats, tokenizer, out, PrepareConfig())
    assert prepare(chats, tokenizer, out, PrepareConfig(shard_rows=3)).facts == first.facts, "reused"
    with pytest.raises(DataError, match="--overwrite"):
        prepare(chats, tokenizer, out, PrepareConfig(**change))
    changed = prepare(chats, tokenizer, out, PrepareConfig(**change, overwrite=True))
    assert changed.facts["fingerprint"] != first.facts["fingerprint"]


def test_A30_data_template_and_tokenizer_are_in_the_cache_key(
    tokenizer_for: ForTemplate, chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare(chats, tokenizer_for("chatml"), out, PrepareConfig())
    with pytest.raises(DataError, match="other rows or with other options"):
        prepare(chats, tokenizer_for("qwen3"), out, PrepareConfig())
    write(chats, [row(index) for index in range(41)])
    with pytest.raises(DataError, match="other rows"):
        prepare(chats, tokenizer_for("chatml"), out, PrepareConfig())
    used = tokenizer_for("chatml")
    digest = tokenizer_digest(used)
    used(["a", "b c d"], padding=False, truncation=True, max_length=2)
    assert tokenizer_digest(used) == digest


class _KilledError(Exception):
    pass


def test_a_killed_preparation_goes_on_where_it_was(
    tokenizer_for: ForTemplate, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_for("chatml")
    write(chats, [row(index % 25) for index in range(40)])
    config = PrepareConfig(shard_rows=6, duplicates="drop-near")
    whole = prepare(chats, tokenizer, tmp_path / "whole", config)
    converted: list[str] = []
    convert = RowConverter.convert

    def dying(self: RowConverter, raw: Any) -> Any:
        converted.append(raw.position)
        if len(converted) == 21:
            raise _KilledError
        return convert(self, raw)

    monkeypatch.setattr(RowConverter, "convert", dying)
    with pytest.raises(_KilledError):
        prepare(chats, tokenizer, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()
    resumed = prepare(chats, tokenizer, tmp_path / "out", config)
    assert converted[21] == "chats.jsonl:19", "three shards of six were done"
    assert resumed.account.as_json() == whole.account.as_json()
    assert resumed.lengths == whole.lengths
    assert not (tmp_path / "out.partial").exists()
    assert sorted(file.name for file in (tmp_path / "out").iterdir())[:1] == ["account.json"]


PREPARING = """
import sys
from transformers import AutoTokenizer
from draftsmith.data.prepare import PrepareConfig, prepare
if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    prepare(sys.argv[2], tokenizer, sys.argv[3], PrepareConfig(workers=2, shard_rows=200, duplicates="drop-exact"))
"""


def _descendants(process: int) -> list[psutil.Process]:
    try:
        return psutil.Process(process).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.long
def test_a_preparation_killed_by_the_system_leaves_no_process_and_goes_on(
    tokenizer_for: ForTemplate, chats: Path, tmp_path: Path
) -> None:
    """SIGKILL once two shards are there; then the same files, byte for byte, as without."""
    tokenizer_for("chatml").save_pretrained(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    write(chats, [row(index % 1800) for index in range(2000)])
    (tmp_path / "run.py").write_text(PREPARING)
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare(chats, tokenizer, whole, PrepareConfig(shard_rows=200, duplicates="drop-exact"))
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "tokenizer"), str(chats)]
    with subprocess.Popen([*command, str(out)]) as process:
        while not (tmp_path / "out.partial" / "data-00001.json").exists():
            assert process.poll() is None
            time.sleep(0.001)
        helpers = _descendants(process.pid)
        process.kill()
    assert not out.exists()
    assert len(helpers) >= 2
    assert psutil.wait_procs(helpers, timeout=20)[1] == [], "still there after their parent's end"
    subprocess.run([*command, str(out)], check=True)
    for file in ("data-00000.arrow", "data-00004.arrow", "data-00009.arrow", "state.json", "dataset_info.json"):
        assert (out / file).read_bytes() == (whole / file).read_bytes()
    ready, wanted = load_prepared(out), load_prepared(whole)
    assert ready.account.as_json() == wanted.account.as_json()
    assert ready.account.skipped.total() == 200


def test_leftovers_of_another_preparation_are_not_mixed_in(
    tokenizer_for: ForTemplate, chats: Path, tmp_path: Path
) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "fingerprint").write_text("another")
    converter = RowConverter(tokenizer_for("chatml"), TokenizeConfig(), "keep")
    writer = ShardWriter(partial, 5)
    for raw in read_mixture([Source(str(chats))], 0):
        writer.add(converter.convert(raw))
    assert len(prepare(chats, tokenizer_for("chatml"), tmp_path / "out", PrepareConfig())) == 40


@pytest.mark.long
def test_worker_processes_give_the_same_data_set(tokenizer_for: ForTemplate, chats: Path, tmp_path: Path) -> None:
    write(chats, [row(index) for index in range(700)])
    alone = prepare(chats, tokenizer_for("chatml"), tmp_path / "one", PrepareConfig())
    several = prepare(chats, tokenizer_for("chatml"), tmp_path / "two", PrepareConfig(workers=2, shard_rows=100))
    assert alone.account.as_json() == several.account.as_json()
    assert all(alone.document(i).token_ids.equal(several.document(i).token_ids) for i in range(700))


def test_duplicates_are_dropped_on_request(tokenizer_for: ForTemplate, tmp_path: Path) -> None:
    long = " ".join(f"word{index}" for index in range(150))
    near = long.replace("word70 ", "another ")
    rows = [
        row(1),
        row(1),
        *({"messages": [row(0)["messages"][0], {"role": "assistant", "content": t}]} for t in (long, near)),
    ]
    file = write(tmp_path / "double.jsonl", rows)
    tokenizer = tokenizer_for("chatml")
    assert len(prepare(file, tokenizer, None, PrepareConfig())) == 4
    assert len(prepare(file, tokenizer, None, PrepareConfig(duplicates="drop-exact"))) == 3
    dropped = prepare(file, tokenizer, None, PrepareConfig(duplicates="drop-near"))
    assert dict(dropped.account.skipped) == {
        "duplicate of an earlier row": 1,
        "near duplicate of an earlier row": 1,
    }


def test_mixtures_weigh_their_sources(tokenizer_for: ForTemplate, tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [row(index) for index in range(400)])
    second = write(tmp_path / "b.jsonl", [row(index) for index in range(10)])
    config = PrepareConfig(duplicates="drop-exact")
    prepared = prepare([f"{first}:0.25", f"{second}:2"], tokenizer_for("chatml"), None, config)
    sources = [prepared.source(index).split(":")[0] for index in range(len(prepared))]
    assert 70 < sources.count("a.jsonl") < 130
    assert prepared.account.rows_in == 420
    assert prepared.account.rows_kept + prepared.account.skipped.total() == 420
    repeated = prepare(f"{second}:2", tokenizer_for("chatml"), None, config)
    assert len(repeated) == 20, "repeats asked for by a weight are no duplicates"


def test_the_token_multiplier_of_split_history_is_counted(tokenizer_for: ForTemplate, tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "Hello there"), ("user", "b"), ("assistant", "I am fine")]
    file = write(tmp_path / "turns.jsonl", [{"messages": [{"role": r, "content": c} for r, c in turns]}])
    prepared = prepare(file, tokenizer_for("qwen3"), None, PrepareConfig())
    assert prepared.account.documents == 2
    assert prepared.account.token_multiplier == pytest.approx(sum(prepared.lengths) / max(prepared.lengths))
    screen = io.StringIO()
    prepared.account.print(Console(file=screen, width=200))
    assert "token multiplier" in screen.getvalue()


def test_template_arguments_are_recorded(tokenizer_for: ForTemplate, tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", [row(0), row(1, chat_template_kwargs={"enable_thinking": False})])
    prepared = prepare(file, tokenizer_for("qwen3"), None, PrepareConfig())
    assert prepared.account.template_arguments == {"{}": 1, '{"enable_thinking": false}': 1}
    assert len(prepared.facts["template_hash"]) == 64


def test_nothing_usable_is_one_line_with_the_remedy(tokenizer_for: ForTemplate, tmp_path: Path) -> None:
    tokenizer = tokenizer_for("chatml")
    config = PrepareConfig()
    with pytest.raises(DataError, match="no such file or folder"):
        prepare(tmp_path / "none.jsonl", tokenizer, None, config)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="is empty"):
        prepare(tmp_path / "empty.jsonl", tokenizer, None, config)
    bad = write(tmp_path / "bad.jsonl", ["{", {"messages": []}])
    for out in (None, tmp_path / "out"):
        with pytest.raises(DataError, match=r"no usable conversation .*2 rows, .*broken JSON line \(1\)"):
            prepare(bad, tokenizer, out, config)
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(DataError, match="no conversations given"):
        prepare([], tokenizer, None, config)


def test_an_output_that_is_something_else_is_left_alone(
    tokenizer_for: ForTemplate, chats: Path, tmp_path: Path
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    with pytest.raises(DataError, match="choose another --out"):
        prepare(chats, tokenizer_for("chatml"), tmp_path / "thesis", PrepareConfig(overwrite=True))
    assert (tmp_path / "thesis" / "chapter.tex").exists()
    with pytest.raises(DataError, match="draftsmith prepare"):
        load_prepared(tmp_path / "thesis")
    out = tmp_path / "out"
    prepare(chats, tokenizer_for("chatml"), out, PrepareConfig())
    (out / "data-00000.arrow").unlink()
    with pytest.raises(DataError, match="damaged"):
        load_prepared(out)


def test_a_truncated_gzip_keeps_what_could_be_read(tokenizer_for: ForTemplate, tmp_path: Path) -> None:
    whole = gzip.compress("".join(json.dumps(row(index)) + "\n" for index in range(900)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    prepared = prepare(tmp_path / "cut.jsonl.gz", tokenizer_for("chatml"), None, PrepareConfig())
    assert 0 < len(prepared) < 900
    assert prepared.account.skipped["the rest of the file can't be read"] == 1


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="--workers"):
        PrepareConfig(workers=-1)
    with pytest.raises(ConfigError, match="--shard-rows"):
        PrepareConfig(shard_rows=0)


def test_odd_characters_in_a_refused_row_dont_spoil_the_account(tokenizer_for: ForTemplate, tmp_path: Path) -> None:
    odd = {"messages": [{"role": "\ud800", "content": "x"}, {"role": "assistant", "content": "y"}]}
    chats = write(tmp_path / "chats.jsonl", [row(0), odd])
    ready = prepare(chats, tokenizer_for("chatml"), tmp_path / "out", PrepareConfig())
    assert ready.account.skipped == {"unknown role": 1}


def test_a_weight_repeats_no_duplicate(tokenizer_for: ForTemplate, tmp_path: Path) -> None:
    chats = write(tmp_path / "chats.jsonl", [row(0), row(0), row(1)])
    ready = prepare(f"{chats}:2", tokenizer_for("chatml"), None, PrepareConfig(duplicates="drop-exact"))
    assert (ready.account.rows_in, ready.account.rows_kept) == (6, 4)
    assert ready.account.skipped == {"duplicate of an earlier row": 2}


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 2.0), (0.1, 2.5)])
def test_the_expected_rows_are_those_that_come(chats: Path, weights: tuple[float, ...]) -> None:
    sources = [Source(str(chats), weight) for weight in weights]
    expected = expected_rows(sources, [40, 40])
    assert expected is not None
    num_rows = sum(1 for _ in read_mixture(sources, 0))
    assert num_rows == pytest.approx(expected, abs=12 if 2.5 in weights else 0)
    assert expected_rows(sources, [40, None]) is None


@pytest.mark.long
def test_every_line_of_a_mutated_file_is_kept_or_skipped_with_a_reason(
    tokenizer_for: ForTemplate, tmp_path: Path
) -> None:
    lines = [mutated_line(index, np.random.Generator(np.random.PCG64([2, index]))) for index in range(10_000)]
    (tmp_path / "chats.jsonl").write_bytes(b"\n".join(lines))
    config = PrepareConfig(tokenize=TokenizeConfig(max_length=60), duplicates="drop-near", workers=2, shard_rows=900)
    ready = prepare(tmp_path / "chats.jsonl", tokenizer_for("qwen3"), tmp_path / "out", config)
    account = ready.account
    assert account.rows_in == sum(bool(line.strip()) for line in lines)
    assert account.rows_in == account.rows_kept + account.skipped.total()
    assert account.rows_kept > 300
    assert all(account.examples[reason] for reason in account.skipped)
    assert len(ready) == account.documents >= account.rows_kept
