"""FeatureBatch and its capacity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.errors import CapacityError
from draftsmith.records import BatchPlan, BatchShape, Document, FeatureBatch, ForwardPlan, check_capacity

SHAPE = BatchShape(num_tokens=10, num_documents=3, num_taps=2, hidden_size=4, dtype=torch.bfloat16, last_hidden=True)


@pytest.mark.parametrize("lengths", [[], [10], [5, 4, 1], [1]])
def test_documents_that_fit_pass(lengths: list[int]) -> None:
    check_capacity(lengths, SHAPE)


@pytest.mark.parametrize(
    ("lengths", "remedy"),
    [
        ([6, 5], "11 tokens don't fit a batch of 10: raise --token-budget or lower --max-length"),
        ([1, 1, 1, 1], "4 documents don't fit a batch of 3: raise --max-documents"),
        ([3, 0], "a document of 0 tokens can't be placed"),
    ],
)
def test_documents_that_do_not_fit_are_refused_with_both_numbers(lengths: list[int], remedy: str) -> None:
    with pytest.raises(CapacityError, match=remedy):
        check_capacity(lengths, SHAPE)


@pytest.mark.parametrize("last_hidden", [True, False])
def test_buffers_start_as_zeros_of_the_stated_size(last_hidden: bool) -> None:
    shape = replace(SHAPE, last_hidden=last_hidden)
    batch = FeatureBatch.allocate(shape, "cpu")
    tensors = batch.tensors()
    assert all((tensor == 0).all() for tensor in tensors.values())
    assert sum(tensor.nbytes for tensor in tensors.values()) == shape.num_bytes
    assert ("last_hidden_TH" in tensors) == last_hidden
    assert batch.features_TFH.shape == (10, 8)


def test_copy_writes_every_row_of_every_buffer() -> None:
    source, buffers = FeatureBatch.allocate(SHAPE, "cpu"), FeatureBatch.allocate(SHAPE, "cpu")
    for name, tensor in source.tensors().items():
        tensor.fill_(True if tensor.dtype == torch.bool else len(name))
    for tensor in buffers.tensors().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    held = {name: tensor.data_ptr() for name, tensor in buffers.tensors().items()}
    buffers.copy_(source)
    for name, tensor in buffers.tensors().items():
        assert torch.equal(tensor, source.tensors()[name])
        assert tensor.data_ptr() == held[name]


def test_a_batch_of_another_shape_is_not_copied() -> None:
    other = FeatureBatch.allocate(replace(SHAPE, num_tokens=9), "cpu")
    with pytest.raises(CapacityError, match=r"num_tokens=9.*can't be copied into buffers of shape.*num_tokens=10"):
        FeatureBatch.allocate(SHAPE, "cpu").copy_(other)


def test_a_plan_lists_its_documents_in_packing_order() -> None:
    forwards = (ForwardPlan(rows=2, length=8, documents=(4, 1)), ForwardPlan(rows=1, length=16, documents=(3,)))
    assert BatchPlan(number=0, epoch=0, forwards=forwards).documents == (4, 1, 3)


def test_a_document_knows_its_length() -> None:
    assert Document(token_ids=torch.arange(5), loss_mask=torch.ones(5, dtype=torch.bool)).length == 5
