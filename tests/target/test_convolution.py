"""The shifted form gives the grouped convolution's numbers, and stands where hybrid layers call that."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from draftsmith.target import convolution
from draftsmith.target.capture import get_hidden_states_packed
from draftsmith.target.convolution import fuse_convolutions, shifted_convolution
from tests.families import documents_of, tiny_target

TAPS = (1, 2, 4)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replaced for the process comes back after each test."""
    monkeypatch.setattr(modeling, "causal_conv1d_fn", modeling.causal_conv1d_fn)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("length", [1, 3, 17])
def test_equals_the_grouped_convolution(length: int, has_bias: bool, activation: str | None) -> None:
    inputs = torch.randn(2, length, 6).transpose(1, 2)  # as layers give it: a transposed view
    weight, bias = torch.randn(6, 4), torch.randn(6) if has_bias else None
    expected = modeling.causal_conv1d_fn(inputs, weight, bias, activation=activation)
    got = shifted_convolution(inputs, weight, bias, activation=activation, seq_idx=None)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_half_precision_convolution_rounds_once() -> None:
    inputs, weight = torch.randn(2, 6, 40).bfloat16(), torch.randn(6, 4).bfloat16()
    exact = modeling.causal_conv1d_fn(inputs.double(), weight.double())
    got = shifted_convolution(inputs, weight)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.bfloat16())


def test_it_compiles_as_one_graph_with_its_activation() -> None:
    inputs, weight = torch.randn(2, 6, 40), torch.randn(6, 4)
    compiled = torch.compile(shifted_convolution, fullgraph=True, dynamic=False, backend="eager")
    got = compiled(inputs, weight, activation="silu")
    torch.testing.assert_close(got, shifted_convolution(inputs, weight, activation="silu"))


def test_a_hybrid_target_reads_the_same_with_it() -> None:
    target, documents = tiny_target("qwen3_5"), documents_of([40, 5, 23])
    plain = get_hidden_states_packed(target, documents, TAPS, pad_to=120).features_TFH.clone()
    assert fuse_convolutions(target) == 1
    assert modeling.causal_conv1d_fn is shifted_convolution
    fused = get_hidden_states_packed(target, documents, TAPS, pad_to=120).features_TFH
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


def test_other_targets_and_machines_with_the_package_keep_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuse_convolutions(tiny_target("qwen3")) == 0
    monkeypatch.setattr(convolution.importlib.util, "find_spec", lambda _name: object())
    assert fuse_convolutions(tiny_target("qwen3_5")) == 0
    assert modeling.causal_conv1d_fn is not shifted_convolution
