"""Speed of the frozen target: each decoder layer compiled for static shapes, its products in 8-bit floats if asked.

torch's compiler settings hold for the thread that sets them (they are context variables), so every worker thread calls
`allow_graphs` itself; otherwise the ninth shape of a layer would run uncompiled for ever after one warning.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftsmith.errors import TargetError
from draftsmith.records import Document, FeatureBatch, TargetFacts
from draftsmith.target.anatomy import logits_of
from draftsmith.target.capture import PAD_ID, get_hidden_states_packed, run_backbone
from draftsmith.target.linear_attention import fuse_convolutions, keep_rules_whole, take_packages
from draftsmith.target.model import Target, cut_after

logger = logging.getLogger(__name__)

untyped: Any = torch
"""For its private parts, of which it imports `_dynamo` at its first use only: that takes over a second."""
scaled_mm: Any = untyped._scaled_mm

E4M3_MAX = 448.0
FP8_ALIGNMENT = 16
"""Multiples that 8-bit products need in both dimensions."""
FP8_MIN_WIDTH = 256
"""Products narrower than this (routers, gates) stay as they are: they cost little and decide much."""
FP8_CAPABILITY = (8, 9)
LOGIT_ROWS = 2048
"""Rows of logits computed at once: a whole batch would be tokens x vocabulary."""


def allow_graphs(*, shapes: int, layer_kinds: int, devices: int) -> None:
    """Let the calling thread hold a compiled graph for each shape, layer kind and device; one more is an error.

    All layers of one class share one code object, and torch counts graphs per code object (8 by default).
    """
    needed = shapes * layer_kinds * devices
    config = untyped._dynamo.config
    config.recompile_limit = max(8, needed)
    config.accumulated_recompile_limit = max(256, 8 * needed)
    config.fail_on_recompile_limit_hit = True


def compiled_graphs() -> int:
    """Graphs compiled so far in this process: a rise after warm-up is a recompile."""
    return int(untyped._dynamo.utils.counters["stats"]["unique_graphs"])


def layer_kinds(target: Target) -> int:
    """Distinct (class, kind of attention) among the layers: each compiles to graphs of its own."""
    return len({(type(layer), kind) for layer, kind in zip(target.layers, target.facts.layer_types, strict=True)})


def compile_layers(target: Target, *, whole_graph: bool = True, backend: str = "inductor") -> None:
    """Compile each decoder layer's forward for static shapes, in place; hooks stay outside the graphs.

    `whole_graph` refuses graph breaks. Compiling itself happens at the first call of each shape (`warm_up`).
    """
    for layer in target.layers:
        plain = cast(Any, type(layer)).forward.__get__(layer)
        # Where accelerate spreads a model over devices, it wraps `forward` and keeps the layer's own beside it.
        slot = "_old_forward" if "_old_forward" in vars(layer) else "forward"
        setattr(layer, slot, torch.compile(plain, dynamic=False, fullgraph=whole_graph, backend=backend))


@contextmanager
def uncompiled(target: Target) -> Generator[None]:
    """The layers as they were written, for shapes that are not compiled (decoding): restored afterwards."""
    slots = ("_old_forward", "forward")
    held: list[tuple[nn.Module, str, Any]] = []
    for layer in target.layers:
        slot = next((name for name in slots if name in vars(layer)), None)
        if slot is not None:
            held.append((layer, slot, vars(layer)[slot]))
            setattr(layer, slot, cast(Any, type(layer)).forward.__get__(layer))
    try:
        yield
    finally:
        for layer, slot, forward in held:
            setattr(layer, slot, forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What warming up a target cost and whether its layers compiled whole."""

    seconds: dict[tuple[int, int], float]
    """First call of each (rows, length)."""
    graph_breaks: str
    """Why the layers didn't compile as one graph each; "" where they did."""


@functools.cache
def retune_linear_attention() -> int:
    """Let kernels of flash-linear-attention tune themselves anew, once a process; how many forget what they had.

    They tune at their first call and keep the choice whatever the number of tokens, on the disk too. That first call
    is the probe of a few tokens that a target is loaded with, where all choices take the time of a launch.
    """
    loaded = [module for name, module in sys.modules.items() if name.split(".")[0] == "fla"]
    if not loaded:
        return 0
    autotuner: Any = importlib.import_module("triton.runtime.autotuner")
    return forget_tuning(loaded, autotuner.Autotuner, autotuner.Heuristics)


def forget_tuning(modules: Iterable[ModuleType], tuner: type, wrapper: type) -> int:
    """Empty the caches of each `tuner` in `modules`, also inside a `wrapper`; how many had chosen something."""
    tuners: dict[int, Any] = {}
    for module in modules:
        for kernel in list(vars(module).values()):
            while isinstance(kernel, wrapper):
                kernel = kernel.fn
            if isinstance(kernel, tuner):
                tuners[id(kernel)] = kernel
    tuned = [kernel for kernel in tuners.values() if kernel.cache]
    for kernel in tuned:
        kernel.cache.clear()
        kernel.cache_results = False
    return len(tuned)


@torch.no_grad()
def warm_up(
    target: Target, last_tap: int | None, shapes: Sequence[tuple[int, int]], *, backend: str = "inductor"
) -> WarmUp:
    """Compile and run each (rows, length) once, the largest first, cut after `last_tap` (None runs all layers).

    One device after another, before worker threads start: tracing isn't safe in several threads at once. Layers that
    can't compile whole are compiled in pieces, and the report says why.
    """
    retune_linear_attention()
    take_packages()
    keep_rules_whole(target)
    if target.device.type == "cuda":
        fuse_convolutions(target)
    shapes = sorted(shapes, key=lambda shape: shape[0] * shape[1], reverse=True)  # kernels tune at the largest
    compile_layers(target, backend=backend)
    breaks = ""
    try:
        seconds = _time_shapes(target, last_tap, shapes)
    except untyped._dynamo.exc.Unsupported as error:
        breaks = str(error).strip().splitlines()[0]
        logger.warning("the layers of %s don't compile whole (%s): they run in pieces", target.facts.name, breaks)
        compile_layers(target, whole_graph=False, backend=backend)
        seconds = _time_shapes(target, last_tap, shapes)
    return WarmUp(seconds=seconds, graph_breaks=breaks)


def _time_shapes(
    target: Target, last_tap: int | None, shapes: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    seconds: dict[tuple[int, int], float] = {}
    last = target.facts.num_layers - 1 if last_tap is None else last_tap
    with cut_after(target, last):
        for rows, length in shapes:
            start = time.perf_counter()
            run_backbone(target, torch.full((rows, length), PAD_ID, device=target.device))
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            seconds[rows, length] = time.perf_counter() - start
    return seconds


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def slow_fallback(facts: TargetFacts, installed: Callable[[str], bool] = is_installed) -> str:
    """Which package a hybrid target lacks, as a sentence; "" where none. transformers then runs its linear attention
    in a plain reference form, a third slower as a whole or worse."""
    if "linear_attention" not in facts.layer_types:
        return ""
    module, package = ("fla", "flash-linear-attention") if "qwen" in facts.model_type else ("mamba_ssm", "mamba-ssm")
    if installed(module):
        return ""
    return f"{facts.name} has linear attention, which runs slowly without {package}: pip install {package}"


def quantise_rowwise(values_NK: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [N, K] and fp32 scales [N, 1] with `values ~ quantised * scale`, each row's largest at 448."""
    wide_NK = values_NK.float()
    scale_N1 = wide_NK.abs().amax(1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
    wide_NK = (wide_NK / scale_N1).clamp(-E4M3_MAX, E4M3_MAX)
    # Elementwise operations keep a transposed input's strides, and the product takes row-major rows only.
    quantised_NK = wide_NK.to(torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    return quantised_NK, scale_N1


class RowwiseFp8Linear(nn.Module):
    """A frozen linear layer in 8-bit floats: weights scaled per output row once, inputs per token at each call.

    On a GPU one `_scaled_mm`; on a CPU, which has none, the same numbers multiplied in fp32 (the reference).
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight_OK, scale_O1 = quantise_rowwise(linear.weight.detach())
        self.weight_OK = nn.Buffer(weight_OK)
        self.scale_1O = nn.Buffer(scale_O1.t().contiguous())
        bias: Tensor | None = cast(Any, linear).bias
        self.bias = None if bias is None else nn.Buffer(bias.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        flat_NK = inputs.reshape(-1, inputs.shape[-1])
        quantised_NK, scale_N1 = quantise_rowwise(flat_NK)
        if flat_NK.device.type == "cuda":
            # Row-wise scaling wants a column-major second operand, fp32 scales [rows, 1] and [1, columns], bf16 out.
            output_NO: Tensor = scaled_mm(
                quantised_NK,
                self.weight_OK.t(),
                scale_a=scale_N1,
                scale_b=self.scale_1O,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
        else:
            output_NO = (quantised_NK.float() @ self.weight_OK.float().t()) * scale_N1 * self.scale_1O
        output_NO = output_NO.to(inputs.dtype)
        if self.bias is not None:
            output_NO = output_NO + self.bias
        return output_NO.view(*inputs.shape[:-1], -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Report:
    """What 8-bit products change, measured on the user's own documents."""

    relative_error: tuple[float, ...]
    """Per tap: norm of the difference over norm of the native features."""
    top1_agreement: float
    """Share of tokens whose most likely next token stays the same."""
    num_replaced: int


def check_fp8_device(device: torch.device) -> None:
    """Refuse a device without 8-bit products.

    Raises:
        TargetError: a CPU, or a GPU older than compute capability 8.9.
    """
    if device.type != "cuda":
        raise TargetError(f"--target-compute fp8 needs a GPU, not {device}: use --target-compute native")
    found = torch.cuda.get_device_capability(device)
    if found < FP8_CAPABILITY:
        raise TargetError(
            f"--target-compute fp8 needs compute capability 8.9 or newer, {device} has {found[0]}.{found[1]}: "
            "use --target-compute native"
        )


@torch.no_grad()
def to_fp8(
    target: Target, documents: Sequence[Document], taps: Sequence[int], *, min_width: int = FP8_MIN_WIDTH
) -> Fp8Report:
    """Replace the decoder layers' large products by 8-bit ones, in place, and measure the change on `documents`.

    Call it before `compile_layers`. Embedding and head stay as they are.

    Raises:
        TargetError: no layer fits, or the target isn't in plain floating point.
    """
    before = get_hidden_states_packed(target, documents, taps, last_hidden=True)
    best_before = _top1(target, before)
    replaced = 0
    for layer in target.layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and _fits_fp8(child, min_width):
                    setattr(parent, name, RowwiseFp8Linear(child))
                    replaced += 1
    if not replaced:
        raise TargetError(
            f"no product of {target.facts.name} can run in 8-bit floats (plain linear layers at least {min_width} wide "
            "are needed): use --target-compute native"
        )
    after = get_hidden_states_packed(target, documents, taps, last_hidden=True)
    agreement = torch.eq(_top1(target, after), best_before).float().mean()
    gaps = zip(taps_of(before), taps_of(after), strict=True)
    errors_F = [float((changed - native).square().sum() / native.square().sum()) ** 0.5 for native, changed in gaps]
    return Fp8Report(relative_error=tuple(errors_F), top1_agreement=float(agreement), num_replaced=replaced)


def taps_of(batch: FeatureBatch) -> list[Tensor]:
    """The features of each tap by itself, [T, H] in fp32."""
    H = batch.shape.hidden_size
    return [batch.features_TFH[:, i * H : (i + 1) * H].float() for i in range(batch.shape.num_taps)]


def _fits_fp8(linear: nn.Linear, min_width: int) -> bool:
    sizes = (linear.in_features, linear.out_features)
    plain = linear.weight.dtype in (torch.float32, torch.bfloat16)
    return plain and min(sizes) >= min_width and all(size % FP8_ALIGNMENT == 0 for size in sizes)


def _top1(target: Target, batch: FeatureBatch) -> Tensor:
    assert batch.last_hidden_TH is not None
    hidden_TH, T = batch.last_hidden_TH, batch.shape.num_tokens
    starts = range(0, T, LOGIT_ROWS)
    return torch.cat([logits_of(target.ends(), hidden_TH[i : i + LOGIT_ROWS]).argmax(1) for i in starts])
