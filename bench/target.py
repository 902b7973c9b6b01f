"""How fast does the frozen target read, against the GPU's own matrix rate?

    python bench/target.py qwen3-8b                       eager, compiled and fp8 at [24, 2048] and [6, 8192]
    python bench/target.py qwen3.6-27b --layers 16        the hybrid shape, as many layers as are worth the time
    python bench/target.py qwen3.6-27b --only full_attention    compile the layers of this kind alone
    python bench/target.py qwen3-8b --sdpa cudnn          another attention kernel

One CUDA GPU, random weights made on it from the packaged config, cut after the last tap, hooks writing every feature.
TFLOP/s are model FLOPs: 2 x tokens x weights of the products in layers 0 to the last tap (attention scores, norms,
embedding and head left out). The share is of an 8192-cube bf16 product timed in the same run. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import event_ms, matrix_rate
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from draftsmith.records import Document
from draftsmith.target.bundled import config_folder
from draftsmith.target.capture import HookCapture, run_backbone
from draftsmith.target.compute import (
    allow_graphs,
    check_fp8_device,
    layer_kinds,
    quantise_rowwise,
    retune_linear_attention,
    slow_fallback,
    to_fp8,
    uncompiled,
    warm_up,
)
from draftsmith.target.model import Target, TargetConfig, cut_after, load_target
from draftsmith.target.taps import default_taps

SHAPES = ((24, 2048), (6, 8192))
MODES = ("eager", "compiled", "fp8")
LAYERS = {"qwen3-8b": 12, "qwen3.6-27b": 16}
"""Enough for a rate, which doesn't depend on their number."""
FP8_DOCUMENTS = (1024, 777, 512, 256)
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The target, what it is asked to read, and where its features go."""

    target: Target
    taps: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    features: torch.Tensor
    """[tokens + 1, taps x H]"""
    weights: int
    """Weights of products in the layers that run."""
    runs: int


@contextmanager
def cut_config(name: str, num_layers: int) -> Iterator[str]:
    """A folder with the packaged config `name` (or a folder's own) cut to `num_layers` layers; 0 leaves all."""
    source = Path(name) if Path(name).is_dir() else config_folder(f"configs/{name}")
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if num_layers:
        values["num_hidden_layers"] = num_layers
        values.pop("layer_types", None)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        yield folder


def product_weights(target: Target, last_tap: int) -> int:
    """Weights of the linear layers in decoder layers 0 to `last_tap`: each costs 2 operations a token."""
    layers = list(target.layers)[: last_tap + 1]
    return sum(part.weight.numel() for layer in layers for part in layer.modules() if isinstance(part, nn.Linear))


def measure(bench: Bench, mode: str) -> list[dict[str, Any]]:
    """Milliseconds and rates of each shape."""
    device = bench.target.device
    rows: list[dict[str, Any]] = []
    with HookCapture(bench.target, bench.taps, bench.features) as hooks, cut_after(bench.target, bench.taps[-1]):
        for count, length in bench.shapes:
            ids = torch.randint(bench.target.facts.vocab_size, (count, length), device=device)
            hooks.aim(torch.arange(count * length, device=device))

            def forward(ids: torch.Tensor = ids) -> None:
                run_backbone(bench.target, ids)

            forward()
            forward()
            ms = timed_ms(forward, bench.runs, device)
            tflops = 2 * bench.weights * count * length / ms / 1e9
            rows.append({"mode": mode, "shape": [count, length], "ms": ms, "tflops": tflops})
            print(f"{mode:9} [{count}, {length}] {ms:8.1f} ms {tflops:6.0f} TFLOP/s", flush=True)
        hooks.aim(None)
    return rows


def timed_ms(run: Any, runs: int, device: torch.device) -> float:
    """Milliseconds a call; by the host's clock where there is no GPU (to try this file)."""
    if device.type == "cuda":
        return event_ms(run, runs)
    started = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - started) * 1e3 / runs


def compiled(bench: Bench, mode: str, backend: str) -> dict[str, Any]:
    """Compile the layers for the shapes; what that cost."""
    torch.compiler.reset()
    allow_graphs(shapes=len(bench.shapes), layer_kinds=layer_kinds(bench.target), devices=1)
    started = time.perf_counter()
    report = warm_up(bench.target, bench.taps[-1], bench.shapes, backend=backend)
    seconds = time.perf_counter() - started
    if report.graph_breaks:
        print(f"{mode}: layers run in pieces ({report.graph_breaks})", flush=True)
    print(f"{mode}: compiled in {seconds:.0f} s", flush=True)
    return {"compile_seconds": seconds, "graph_breaks": report.graph_breaks}


def leave_plain(target: Target, but: str) -> None:
    """Take the compiled forward from all layers but those of one kind.

    Raises:
        SystemExit: the target has no layer of that kind.
    """
    kinds = target.facts.layer_types
    if but not in kinds:
        raise SystemExit(f"--only {but}: this target's layers are {', '.join(sorted(set(kinds)))}")
    for layer, kind in zip(target.layers, kinds, strict=True):
        if kind != but:
            layer.forward = type(layer).forward.__get__(layer)


def fp8(bench: Bench) -> dict[str, Any]:
    """Put the target's products into 8-bit floats and say what that changed, as a run would."""
    generator = torch.Generator().manual_seed(0)
    documents: list[Document] = []
    for length in FP8_DOCUMENTS:
        ids = torch.randint(bench.target.facts.vocab_size, (length,), generator=generator)
        documents.append(Document(token_ids=ids, loss_mask=torch.ones(length, dtype=torch.bool)))
    with uncompiled(bench.target):
        report = to_fp8(bench.target, documents, bench.taps)
    errors = ", ".join(f"{error:.1%}" for error in report.relative_error)
    print(
        f"fp8: {report.num_replaced} products; features differ by {errors} a tap, top-1 agrees for "
        f"{report.top1_agreement:.1%} of tokens (random weights: a flat distribution, the hardest case)",
        flush=True,
    )
    return {
        "relative_error": report.relative_error,
        "top1_agreement": report.top1_agreement,
        "num_replaced": report.num_replaced,
    }


def fp8_matrix_rate() -> float:
    """TFLOP/s of an 8192-cube row-wise 8-bit product."""
    a, scale_a = quantise_rowwise(torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16))
    b, scale_b = quantise_rowwise(torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16))
    scales = {"scale_a": scale_a, "scale_b": scale_b.t().contiguous()}

    def product() -> None:
        torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    product()
    return 2 * 8192**3 / event_ms(product, 200) / 1e9


def build(arguments: argparse.Namespace, device: torch.device) -> Bench:
    """The target with random weights on its device."""
    layers = LAYERS.get(arguments.target, 0) if arguments.layers is None else arguments.layers
    with cut_config(arguments.target, layers) as folder:
        target = load_target(TargetConfig(target=folder), device, random_weights=True)
    taps = default_taps(target.facts.num_layers)
    if remark := slow_fallback(target.facts):
        print(remark, flush=True)
    shapes = tuple((int(rows), int(length)) for rows, length in (text.split("x") for text in arguments.shapes))
    tokens = max(rows * length for rows, length in shapes)
    width = len(taps) * target.facts.hidden_size
    return Bench(
        target=target,
        taps=taps,
        shapes=shapes,
        features=torch.zeros(tokens + 1, width, device=device, dtype=target.ends().embedding_VH.dtype),
        weights=product_weights(target, taps[-1]),
        runs=arguments.runs,
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="qwen3-8b, qwen3.6-27b, or a folder with a config.json")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--shapes", nargs="+", default=[f"{rows}x{length}" for rows, length in SHAPES])
    parser.add_argument("--layers", type=int, help="layers of the target; 0 leaves all of its config")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--only", default="", help="compile only layers of this kind, as the config's layer_types say")
    parser.add_argument("--sdpa", choices=["default", *SDPA], default="default")
    parser.add_argument("--backend", default="inductor", help="torch.compile's")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    started = time.perf_counter()
    bench = build(arguments, device)
    print(f"{bench.target.facts.num_layers} layers, taps {bench.taps}, {time.perf_counter() - started:.0f} s to make")
    if retuned := retune_linear_attention():
        print(f"{retuned} linear-attention kernels tune themselves at the first full forward", flush=True)
    rate = matrix_rate(2.0) if on_gpu else None
    result: dict[str, Any] = {
        "target": arguments.target,
        "layers": bench.target.facts.num_layers,
        "taps": bench.taps,
        "sdpa": arguments.sdpa,
        "compiled_kind": arguments.only or "all",
        "formula": "2 x tokens x weights of products in layers 0 .. last tap",
        "weights": bench.weights,
        "matrix_rate": rate,
        "fp8_matrix_rate": None,
        "rows": [],
    }
    with nullcontext() if arguments.sdpa == "default" else sdpa_kernel(SDPA[arguments.sdpa]):
        for mode in [mode for mode in MODES if mode in arguments.modes]:
            if mode == "fp8":
                if on_gpu:
                    check_fp8_device(device)
                    result["fp8_matrix_rate"] = fp8_matrix_rate()
                result["fp8"] = fp8(bench)
            if mode != "eager":
                result[f"{mode}_warm_up"] = compiled(bench, mode, arguments.backend)
                if arguments.only:
                    leave_plain(bench.target, but=arguments.only)
            result["rows"] += measure(bench, mode)
    for row in result["rows"]:
        row["share"] = row["tflops"] / rate if rate else None
    if on_gpu:
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    table(result)
    print(json.dumps(result))


def table(result: dict[str, Any]) -> None:
    rate = result["matrix_rate"]
    print(f"matrix rate {rate or float('nan'):.0f} TFLOP/s bf16, {result['fp8_matrix_rate'] or float('nan'):.0f} fp8")
    for row in result["rows"]:
        share = f"{row['share']:.1%}" if row["share"] else "-"
        print(f"{row['mode']:9} {row['shape']!s:12} {row['ms']:8.1f} ms {row['tflops']:6.0f} TFLOP/s {share:>6}")


if __name__ == "__main__":
    main()
