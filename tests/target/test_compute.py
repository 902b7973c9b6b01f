"""Compiled layers compute what plain ones do and never outgrow their graphs in silence; 8-bit products stay close."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.errors import TargetError
from draftsmith.target import compute
from draftsmith.target.capture import get_hidden_states_packed, run_backbone
from draftsmith.target.compute import (
    RowwiseFp8Linear,
    allow_graphs,
    check_fp8_device,
    compile_layers,
    compiled_graphs,
    layer_kinds,
    quantise_rowwise,
    slow_fallback,
    to_fp8,
    warm_up,
)
from tests.families import documents_of, fresh_target, tiny_target

TAPS = (1, 2, 4)


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    """Each test starts without graphs and leaves torch's compiler settings as it found them."""
    torch.compiler.reset()
    config = torch._dynamo.config
    names = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    before = {name: getattr(config, name) for name in names}
    yield
    for name, value in before.items():
        setattr(config, name, value)
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3"])
def test_compiled_layers_give_the_same_features_with_one_graph_per_shape_and_kind(family: str) -> None:
    target, documents = fresh_target(family), documents_of([7, 12, 4])
    plain = get_hidden_states_packed(target, documents, TAPS, pad_to=24).features_TFH
    shapes = [(3, 12), (2, 16)]
    allow_graphs(shapes=len(shapes), layer_kinds=layer_kinds(target), devices=1)
    start = compiled_graphs()
    report = warm_up(target, TAPS[-1], shapes, backend="eager")
    assert report.graph_breaks == ""
    assert set(report.seconds) == set(shapes)
    assert compiled_graphs() - start == len(shapes) * layer_kinds(target)
    compiled = get_hidden_states_packed(target, documents, TAPS, pad_to=24).features_TFH
    assert compiled_graphs() - start == len(shapes) * layer_kinds(target), "a shape compiled again after warm-up"
    torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("whole_graph", [True, False])
def test_D05_one_graph_more_than_allowed_is_an_error_not_an_uncompiled_run(whole_graph: bool) -> None:
    target = fresh_target("qwen3")
    allow_graphs(shapes=1, layer_kinds=1, devices=1)
    compile_layers(target, whole_graph=whole_graph, backend="eager")
    for length in range(4, 12):
        run_backbone(target, torch.zeros(1, length, dtype=torch.int64))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        run_backbone(target, torch.zeros(1, 12, dtype=torch.int64))


def test_more_than_eight_shapes_compile_when_allowed() -> None:
    target, start = fresh_target("qwen3"), compiled_graphs()
    allow_graphs(shapes=10, layer_kinds=1, devices=1)
    warm_up(target, TAPS[-1], [(1, 4 + i) for i in range(10)], backend="eager")
    assert compiled_graphs() - start == 10


def test_graph_limits_hold_for_the_thread_that_sets_them() -> None:
    """Why every worker calls `allow_graphs`: torch keeps these settings per thread."""
    allow_graphs(shapes=64, layer_kinds=2, devices=4)
    seen: list[int] = []

    def work() -> None:
        seen.append(torch._dynamo.config.recompile_limit)
        allow_graphs(shapes=64, layer_kinds=2, devices=4)
        seen.append(torch._dynamo.config.recompile_limit)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [8, 512]


def test_a_worker_thread_reuses_the_graphs_of_the_warm_up() -> None:
    target, documents = fresh_target("qwen3"), documents_of([7, 12])
    allow_graphs(shapes=10, layer_kinds=1, devices=1)
    warm_up(target, TAPS[-1], [(2, 4 + i) for i in range(10)], backend="eager")
    start = compiled_graphs()

    def work() -> None:
        allow_graphs(shapes=10, layer_kinds=1, devices=1)
        get_hidden_states_packed(target, documents, TAPS, pad_to=19)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert compiled_graphs() == start


def test_layers_that_break_graphs_run_in_pieces_and_say_why() -> None:
    target = fresh_target("qwen3")
    plain = get_hidden_states_packed(target, documents_of([5]), TAPS, pad_to=5).features_TFH

    class Breaking(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            torch._dynamo.graph_break()
            return self.inner(*args, **kwargs)

    for layer in target.layers:
        layer.mlp = Breaking(layer.mlp)
    report = warm_up(target, TAPS[-1], [(1, 5)], backend="eager")
    assert "graph_break" in report.graph_breaks
    broken = get_hidden_states_packed(target, documents_of([5]), TAPS, pad_to=5).features_TFH
    torch.testing.assert_close(broken, plain)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on importing inductor
def test_inductor_compiles_a_layer_on_the_cpu() -> None:
    target, documents = fresh_target("qwen3"), documents_of([7, 12])
    plain = get_hidden_states_packed(target, documents, TAPS, pad_to=19).features_TFH
    warm_up(target, TAPS[-1], [(2, 12)])
    got = get_hidden_states_packed(target, documents, TAPS, pad_to=19).features_TFH
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4)


def test_slow_fallback_names_the_package_of_a_hybrid_target() -> None:
    hybrid, dense = tiny_target("qwen3_5").facts, tiny_target("qwen3").facts
    assert "pip install flash-linear-attention" in slow_fallback(hybrid, lambda _name: False)
    assert slow_fallback(hybrid, lambda name: name == "fla") == ""
    assert slow_fallback(dense, lambda _name: False) == ""
    mamba = replace(hybrid, model_type="falcon_h1")
    assert "pip install mamba-ssm" in slow_fallback(mamba, lambda _name: False)
    assert "flash-linear-attention" in slow_fallback(hybrid) or compute.is_installed("fla")


class Tuner:
    """The face of Triton's Autotuner that matters."""

    def __init__(self, **chosen: str) -> None:
        self.cache = dict(chosen)
        self.cache_results = True


class Wrapper:
    """Triton's Heuristics around a kernel."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn


def test_kernels_forget_what_they_tuned_on_the_probe() -> None:
    bare, wrapped, twice, fresh = Tuner(a="x"), Tuner(b="y", c="z"), Tuner(d="w"), Tuner()
    one, other = ModuleType("fla.one"), ModuleType("fla.other")
    vars(one).update(bare=bare, wrapped=Wrapper(wrapped), twice=Wrapper(Wrapper(twice)), number=3)
    vars(other).update(again=bare, fresh=fresh)
    assert compute.forget_tuning([one, other], Tuner, Wrapper) == 3
    assert [tuner.cache for tuner in (bare, wrapped, twice, fresh)] == [{}] * 4
    # What it remembers on the disk would come back otherwise.
    assert [tuner.cache_results for tuner in (bare, wrapped, twice, fresh)] == [False, False, False, True]
    assert compute.forget_tuning([one, other], Tuner, Wrapper) == 0


def test_warm_up_begins_with_the_largest_shape() -> None:
    """Linear-attention kernels tune at their first call and keep that choice for every size."""
    report = warm_up(fresh_target("qwen3"), TAPS[-1], [(1, 6), (4, 8), (2, 9)], backend="eager")
    assert list(report.seconds) == [(4, 8), (2, 9), (1, 6)]


def test_rowwise_quantisation_scales_each_row_to_the_full_range() -> None:
    values = torch.randn(16, 64) * torch.logspace(-3, 3, 16)[:, None]
    values[3] = 0
    quantised, scale = quantise_rowwise(values)
    assert quantised.dtype == torch.float8_e4m3fn
    assert quantised.float().abs().amax(1).tolist() == [448.0] * 3 + [0.0] + [448.0] * 12
    restored = quantised.float() * scale
    # e4m3 has 3 mantissa bits: half a step is 1/16 of the value, or half the smallest step near zero.
    bound = torch.maximum(values.abs() / 16, scale * 2**-10)
    assert ((restored - values).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("bias", [False, True])
def test_fp8_linear_is_close_to_the_linear_it_replaces(bias: bool) -> None:
    linear = nn.Linear(128, 64, bias=bias).requires_grad_(False)
    inputs = torch.randn(2, 9, 128)
    inputs[0, 0] *= 1e4
    got = RowwiseFp8Linear(linear)(inputs)
    assert got.shape == (2, 9, 64)
    assert got.dtype == inputs.dtype
    expected = linear(inputs)
    errors = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 0.06
    assert errors.max() > 1e-4


@pytest.mark.parametrize("tokens", [1, 7, 48])
def test_on_a_gpu_an_fp8_linear_is_one_product_that_the_kernel_accepts(tokens: int) -> None:
    """Traced on a GPU that isn't there: torch's own shape function refuses wrong layouts, scales and sizes."""
    seen: list[tuple[Any, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._scaled_mm.default:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.device("cuda"):
        linear = nn.Linear(128, 64, device="meta")
        linear.weight = nn.Parameter(torch.empty(64, 128, dtype=torch.bfloat16), requires_grad=False)
        linear.bias = nn.Parameter(torch.empty(64, dtype=torch.bfloat16), requires_grad=False)
        product = RowwiseFp8Linear(linear)
        inputs = torch.empty(128, tokens, dtype=torch.bfloat16).t().unsqueeze(0)
        with Watch():
            output = product(inputs)
    assert (output.shape, output.dtype, output.device.type) == ((1, tokens, 64), torch.bfloat16, "cuda")
    ((a, b, scale_a, scale_b, *_),) = seen
    assert (a.stride(), b.stride()) == ((128, 1), (1, 128))
    assert (scale_a.shape, scale_b.shape) == ((tokens, 1), (1, 64))
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    assert {scale_a.dtype, scale_b.dtype} == {torch.float32}


def test_to_fp8_replaces_large_products_only_and_measures_the_change() -> None:
    target, documents = fresh_target("qwen3"), documents_of([40, 30])
    report = to_fp8(target, documents, TAPS, min_width=32)
    # q, k, v, o and gate, up, down of 6 layers; hidden 32, heads 4 x 16, kv 2 x 16, feed-forward 48.
    assert report.num_replaced == 42
    assert len(report.relative_error) == len(TAPS)
    assert all(1e-3 < error < 0.2 for error in report.relative_error)
    assert 0.5 < report.top1_agreement <= 1.0
    assert type(target.model.lm_head) is nn.Linear


def test_to_fp8_refuses_a_target_without_fitting_products() -> None:
    with pytest.raises(TargetError, match=r"at least 256 wide.*--target-compute native"):
        to_fp8(fresh_target("qwen3"), documents_of([5]), TAPS)


def test_fp8_needs_a_gpu() -> None:
    with pytest.raises(TargetError, match="needs a GPU, not cpu"):
        check_fp8_device(torch.device("cpu"))
