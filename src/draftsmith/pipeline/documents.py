"""Prepared data as the workers index it, and the few conversations held out to measure on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, overload

from draftsmith.data.prepared import PreparedData
from draftsmith.records import Document


class Documents(Sequence[Document]):
    """Some documents of a prepared data set, in a fixed order."""

    def __init__(self, data: PreparedData, indices: Sequence[int]) -> None:
        self._data = data
        self._indices = list(indices)
        self.lengths = [data.lengths[index] for index in self._indices]

    @overload
    def __getitem__(self, index: int) -> Document: ...

    @overload
    def __getitem__(self, index: slice) -> Documents: ...

    def __getitem__(self, index: int | slice) -> Document | Documents:
        if isinstance(index, slice):
            return Documents(self._data, self._indices[index])
        return self._data.document(self._indices[index])

    def __len__(self) -> int:
        return len(self._indices)

    def num_supervised(self) -> int:
        """Supervised tokens of all documents."""
        return sum(int(document.loss_mask.sum().item()) for document in self)


def hold_out(data: PreparedData, count: int) -> tuple[Documents, Documents]:
    """All documents but every n-th, and those: up to `count`, at most a tenth, spread over the file."""
    count = min(count, len(data) // 10)
    if count == 0:
        return Documents(data, range(len(data))), Documents(data, [])
    stride = len(data) // count
    held = set(range(stride - 1, len(data), stride)[:count])
    return Documents(data, [i for i in range(len(data)) if i not in held]), Documents(data, sorted(held))


def prompt_of(document: Document) -> list[int]:
    """Its tokens up to the first supervised one: what the target was asked."""
    supervised = document.loss_mask.nonzero()
    end = int(supervised[0, 0].item()) if supervised.numel() else document.length
    return cast(list[int], document.token_ids[:end].tolist())
