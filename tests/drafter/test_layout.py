"""Documents from lengths, against `repeat_interleave`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.drafter.layout import document_layout


def reference(lengths: list[int], num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, starts and positions, the dynamic way."""
    lengths_D = torch.tensor(lengths, dtype=torch.int64)
    tail = num_tokens - sum(lengths)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths_D)
    starts = torch.repeat_interleave(lengths_D.cumsum(0) - lengths_D, lengths_D)
    positions = torch.cat([torch.arange(length) for length in lengths])
    zeros = torch.zeros(tail, dtype=torch.int64)
    return torch.cat([ids, zeros - 1]), torch.cat([starts, zeros]), torch.cat([positions, zeros])


def check(lengths: list[int], num_tokens: int) -> None:
    layout = document_layout(torch.tensor(lengths, dtype=torch.int64), num_tokens)
    ids, starts, positions = reference(lengths, num_tokens)
    assert torch.equal(layout.document_ids_T, ids)
    assert torch.equal(layout.starts_T, starts)
    assert torch.equal(layout.positions_T, positions)


def test_the_worked_example() -> None:
    ids = document_layout(torch.tensor([1024, 2048, 512, 0, 0]), 49_152).document_ids_T
    values, counts = ids.unique(return_counts=True)
    assert values.tolist() == [-1, 0, 1, 2]
    assert counts.tolist() == [45_568, 1024, 2048, 512]
    assert torch.equal(ids[:3584], ids[:3584].sort().values)
    assert (ids[3584:] == -1).all()


@pytest.mark.parametrize(
    "lengths",
    [[1024, 2048, 512, 0, 0], [0, 0, 0], [1], [1, 0, 0], [4096], [4095, 1], [3, 0, 0, 5, 0, 1, 0], [0, 7, 0, 2]],
    ids=["example", "empty", "one token", "one and slots", "full", "full of two", "empty in the middle", "empty first"],
)
def test_equals_repeat_interleave(lengths: list[int]) -> None:
    check(lengths, 4096)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), tail=st.integers(0, 50))
def test_equals_repeat_interleave_on_random_lengths(lengths: list[int], tail: int) -> None:
    check(lengths, max(1, sum(lengths) + tail))
