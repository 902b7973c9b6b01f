from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.data.conversations import Skip
from draftsmith.data.convert import Converted, RowConverter, convert_rows, decode_row
from draftsmith.data.sources import RawRow
from draftsmith.data.tokenize import TokenizeConfig, Tokenized
from draftsmith.errors import WorkerError

ForTemplate = Callable[[str | None], PreTrainedTokenizerFast]
LINE = b'{"prompt": "hello", "completion": "there you are", "chat_template_kwargs": {"k": 1}}'


def test_a_line_that_is_no_json_says_where_it_breaks() -> None:
    broken = decode_row(RawRow("f:1", b'{"a": '))
    assert isinstance(broken, Skip)
    assert broken.reason == "broken JSON line"
    assert "char" in broken.detail
    assert decode_row(RawRow("f:1", Skip("why"))) == Skip("why")


def test_rows_are_packed_with_their_signature_and_arguments(tokenizer_for: ForTemplate) -> None:
    converter = RowConverter(tokenizer_for("chatml"), TokenizeConfig(template_kwargs={"j": 2}), "drop-exact")
    first, repeat = (converter.convert(RawRow("f:1", LINE, is_repeat=again)) for again in (False, True))
    assert isinstance(first.outcome, Tokenized)
    assert first.packed[0].ids.dtype.name == "int32"
    assert first.packed[0].mask.dtype.name == "int8"
    assert first.template_arguments == '{"j": 2, "k": 1}'
    assert first.signature is not None
    assert repeat.signature is None


def test_rows_are_read_no_further_than_needed(tokenizer_for: ForTemplate) -> None:
    read: list[int] = []

    def rows() -> Iterator[RawRow]:
        for index in range(10):
            read.append(index)
            yield RawRow(f"f:{index}", LINE)

    converted = convert_rows(rows(), RowConverter(tokenizer_for("chatml"), TokenizeConfig(), "keep"), 1)
    assert next(converted).position == "f:0"
    assert read == [0]


class _Killed(RowConverter):
    """Stands for a process that the system kills for memory."""

    def convert_all(self, rows: list[RawRow]) -> list[Converted]:
        os._exit(9)


@pytest.mark.long
def test_a_killed_process_ends_the_preparation_with_a_remedy(tokenizer_for: ForTemplate) -> None:
    converter = _Killed(tokenizer_for("chatml"), TokenizeConfig(), "keep")
    with pytest.raises(WorkerError, match="fewer --workers"):
        list(convert_rows([RawRow("f:0", LINE)], converter, 2))


@pytest.mark.long
def test_processes_keep_the_order(tokenizer_for: ForTemplate) -> None:
    rows = [RawRow(f"f:{index}", LINE) for index in range(1000)]
    converter = RowConverter(tokenizer_for("chatml"), TokenizeConfig(), "keep")
    assert [row.position for row in convert_rows(rows, converter, 2)] == [row.position for row in rows]
