"""Packed weights multiply blocks of rows as the usual product does, and everything is as before afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.target import packed
from draftsmith.target.packed import linear, packed_products


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 40, bias=False)).to(dtype)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each packed product that ran."""
    rows: list[int] = []
    usual = packed.F.linear

    def watched(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows.append(-inputs.shape[-2])
        return usual(inputs, weight, bias)

    monkeypatch.setattr(packed.F, "linear", watched)
    return rows


@pytest.mark.parametrize("rows", [2, 8, 64])
@torch.no_grad()
def test_blocks_of_rows_go_through_packed_weights_and_equal_the_usual_product(rows: int, products: list[int]) -> None:
    model, inputs = layers(), torch.randn(1, rows, 48)
    expected = model.double()(inputs.double()).float()
    model.float()
    products.clear()
    with packed_products(model) as count:
        assert count == 2
        found = model(inputs)
        assert products == []
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 65])
@torch.no_grad()
def test_single_rows_and_prompts_keep_the_usual_product(rows: int, products: list[int]) -> None:
    model, inputs = layers(), torch.randn(1, rows, 48)
    expected = model(inputs)
    products.clear()
    with packed_products(model):
        assert torch.equal(model(inputs), expected)
    assert products == [-rows] * 2


@torch.no_grad()
def test_a_bare_weight_matrix_is_known_by_its_layer() -> None:
    """The drafter multiplies by the target's head, which is the weight of a layer."""
    model, inputs = layers(), torch.randn(8, 96)
    head = model[2].weight
    with packed_products(model):
        found = linear(inputs, head)
    torch.testing.assert_close(found, F.linear(inputs, head), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_layers_are_as_they_were_afterwards_and_an_inner_call_changes_nothing() -> None:
    model, inputs = layers(), torch.randn(8, 48)
    before = model(inputs)
    with packed_products(model) as outer:
        with packed_products(model) as inner:
            pass
        assert (outer, inner) == (2, 0)
        assert "forward" in vars(model[0])
    assert "forward" not in vars(model[0])
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert not torch.equal(model(inputs), before)
    assert torch.equal(linear(inputs, model[0].weight), F.linear(inputs, model[0].weight))


def test_gradients_go_the_usual_way() -> None:
    model, inputs = layers(), torch.randn(8, 48, requires_grad=True)
    with packed_products(model):
        model(inputs).sum().backward()
    assert inputs.grad is not None
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("why", ["dtype", "memory", "torch"])
def test_nothing_is_packed_where_it_can_not_be(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers(torch.bfloat16 if why == "dtype" else torch.float32)
    if why == "memory":
        monkeypatch.setattr(packed, "MEMORY_SHARE", 0.0)
    if why == "torch":
        monkeypatch.setattr(packed, "is_available", lambda: False)
    with packed_products(model) as count:
        assert count == 0
        assert "forward" not in vars(model[0])
