"""Compiled linear-attention layers call the fast delta rule as one operation, and a convolution that fuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.integrations import hub_kernels
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from draftsmith.target import linear_attention
from draftsmith.target.capture import get_hidden_states_packed
from draftsmith.target.compute import compile_layers, warm_up
from draftsmith.target.linear_attention import (
    EXPORTING,
    fuse_convolutions,
    keep_rules_whole,
    shifted_convolution,
    take_packages,
)
from tests.families import documents_of, fresh_target, tiny_target

TAPS = (1, 2, 4)
RULE = "torch_chunk_gated_delta_rule"


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is replaced for the process comes back after each test."""
    for name in (RULE, "causal_conv1d_fn"):
        monkeypatch.setattr(modeling, name, getattr(modeling, name))
    monkeypatch.setattr(hub_kernels, EXPORTING, getattr(hub_kernels, EXPORTING))
    monkeypatch.setattr(linear_attention, "rules", {})
    monkeypatch.setattr(linear_attention, "fused", set())
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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


def operations(target: Any) -> set[str]:
    """Names of what the compiled layers' graphs call."""
    seen: set[str] = set()

    def note(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    warm_up(target, TAPS[-1], [(2, 70)], backend=note)  # type: ignore[arg-type]
    return seen


def test_a_compiled_hybrid_calls_its_rule_whole_and_no_grouped_convolution() -> None:
    called: list[tuple[int, ...]] = []
    original = getattr(modeling, RULE)

    def counted(query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        assert not torch.compiler.is_compiling(), "traced instead of called"
        called.append(tuple(query.shape))
        return original(query, *arguments, **options)

    setattr(modeling, RULE, counted)
    target = fresh_target("qwen3_5")
    called.clear()  # its probe
    assert fuse_convolutions(target) == 1
    seen = operations(target)
    assert called == [(2, 70, 4, 16)] * 4  # two linear layers in three, cut after the fifth
    assert any("draftsmith.delta_rule" in name for name in seen)
    assert not any("conv1d" in name for name in seen)


def test_a_compiled_hybrid_reads_what_an_uncompiled_one_reads() -> None:
    target, documents = fresh_target("qwen3_5"), documents_of([40, 5, 23])
    plain = get_hidden_states_packed(target, documents, TAPS, pad_to=120).features_TFH.clone()
    for _ in range(2):  # a second target of the family finds everything in place
        assert keep_rules_whole(target) == 1
        assert fuse_convolutions(target) == 1
    same = get_hidden_states_packed(target, documents, TAPS, pad_to=120).features_TFH.clone()
    assert torch.equal(same, plain), "an uncompiled layer keeps what it had"
    compile_layers(target, backend="eager")
    compiled = get_hidden_states_packed(target, documents, TAPS, pad_to=120).features_TFH
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


def test_a_rule_that_ends_in_a_state_keeps_it_when_compiled() -> None:
    original = getattr(modeling, RULE)
    query, key, value = torch.randn(3, 1, 70, 2, 16)
    g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
    options = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, expected_state = original(query, key, value, **options)
    compiled = torch.compile(linear_attention.opaque_rule(original, modeling.__name__), backend="eager")
    output, state = compiled(query, key, value, **options)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(state, expected_state)


def test_other_targets_keep_what_they_have() -> None:
    assert keep_rules_whole(tiny_target("qwen3")) == 0
    assert fuse_convolutions(tiny_target("qwen3")) == 0


def test_a_traced_function_takes_its_package_where_torch_calls_every_trace_an_export(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package: Any = ModuleType("quick_scans")
    package.scan = lambda x: x + 1
    monkeypatch.setitem(sys.modules, "quick_scans", package)

    def scan(x: torch.Tensor) -> torch.Tensor:
        return x - 1

    dispatched = hub_kernels.use_kernel_func_from_hub_with_fallback("scan", "quick_scans")(scan)

    def traced() -> float:
        torch.compiler.reset()
        return float(torch.compile(dispatched, backend="eager", fullgraph=True)(torch.zeros(())))

    monkeypatch.setattr(hub_kernels, EXPORTING, lambda: True)  # what torch 2.11 answers inside a trace
    assert traced() == -1, "transformers no longer takes its reference there: drop take_packages"
    assert take_packages()
    assert traced() == 1
    assert float(dispatched(torch.zeros(()))) == 1
