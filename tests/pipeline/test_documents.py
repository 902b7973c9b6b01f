"""Documents by index, those held out, and what a prompt is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
import torch

from draftsmith.data.prepared import PreparedData
from draftsmith.pipeline.documents import Documents, hold_out, prompt_of
from draftsmith.records import Document
from tests.families import documents_of


@dataclass(frozen=True)
class Rows:
    """As much of a prepared data set as Documents reads."""

    rows: list[Document]

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def document(self, index: int) -> Document:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


def data_of(count: int) -> PreparedData:
    return cast(PreparedData, Rows(documents_of([4 + i for i in range(count)])))


def test_documents_follow_their_indices() -> None:
    documents = Documents(data_of(5), [3, 1])
    assert documents.lengths == [7, 5]
    assert [document.length for document in documents] == [7, 5]
    assert [document.length for document in documents[1:]] == [5]
    assert documents.num_supervised() == 4 + 3


@pytest.mark.parametrize(("rows", "count", "held"), [(100, 8, 8), (100, 0, 0), (30, 8, 3), (9, 8, 0), (10, 1, 1)])
def test_held_out_and_trained_on_share_nothing_and_lose_nothing(rows: int, count: int, held: int) -> None:
    train, held_out = hold_out(data_of(rows), count)
    assert len(held_out) == held
    assert sorted(train.lengths + held_out.lengths) == [4 + i for i in range(rows)]


def test_held_out_rows_are_spread_over_the_file() -> None:
    _, held_out = hold_out(data_of(100), 4)
    assert held_out.lengths == [4 + 24, 4 + 49, 4 + 74, 4 + 99]


def test_a_prompt_ends_where_supervision_begins() -> None:
    mask = torch.tensor([False, False, True, False, True])
    document = Document(token_ids=torch.arange(5), loss_mask=mask)
    assert prompt_of(document) == [0, 1]
    assert prompt_of(Document(token_ids=torch.arange(3), loss_mask=torch.zeros(3, dtype=torch.bool))) == [0, 1, 2]
