"""Every measured constant of the plan, in one place, with its source.

Everything was taken on one H200 (bf16, CUDA graphs, torch 2.11 to 2.13) and is carried to other cards by their matrix
rate. Sizes of buffers are not calibrated: they follow from shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

H200_MATRIX_TFLOPS = 664.0
"""Sustained bf16 product of 8192-cubes over seconds, as `bench/step.py` takes it (cold: 780; nominal: 989)."""
SUSTAINED_SHARE = H200_MATRIX_TFLOPS / 989.0
"""What an unmeasured card is taken to sustain of its nominal dense bf16 rate: what the H200 does."""

DRAFTER_SHARE = 281.7 / 0.511 / H200_MATRIX_TFLOPS
"""Of the matrix rate, a captured draw with its update: 281.7 TFLOP in 511 ms at the reference shape (`bench/step.py
qwen3.6-27b`: T 49,152, 1,024 anchors, B 16, H 5,120, FFN 17,408, 5 layers, V 248,320) = 83%."""
TARGET_DENSE_SHARE = 593.0 / H200_MATRIX_TFLOPS
"""Of the matrix rate, the compiled forward of a dense target: Qwen3-8B at [24, 2048], 593 TFLOP/s (taken cold)."""
TARGET_FP8_SHARE = 935.0 / H200_MATRIX_TFLOPS
"""The same with `--target-compute fp8`: 935 TFLOP/s."""
TARGET_HYBRID_SHARE = 442.0 / H200_MATRIX_TFLOPS
"""A Qwen3.5-type hybrid with flash-linear-attention, uncompiled: 442 TFLOP/s."""
DECODE_SHARE = 0.25
"""Of the matrix rate, a server decoding many answers at once (regeneration). An assumption: servers vary by 2x."""

POOL_SLACK = 1.08
"""Graphs' pool over the live activations at its fullest: 29-32 GB reserved against 27.3 counted at the reference."""
CONTEXT_BYTES = round(1.2e9)
"""CUDA context, libraries and workspaces, outside torch's allocator. An assumption: 0.5 to 1.5 GB by driver."""
PCIE_GBPS = 35.0
"""Gigabytes a second that gradients are averaged at over PCIe: 6.9 GB took 140 to 280 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU as the plan sees it."""

    name: str
    memory: int
    """Bytes that a process may use."""
    tflops: float
    """Sustained bf16 matrix rate."""
    peer_gbps: float
    """Gigabytes a second between two of one host; above PCIE_GBPS they write into each other's memory."""
    fp8: bool
    source: str
    """Where the rate comes from."""

    @property
    def has_peers(self) -> bool:
        return self.peer_gbps > PCIE_GBPS


def _card(name: str, gib: float, nominal: float, peer_gbps: float, fp8: bool) -> Card:
    rate = nominal * SUSTAINED_SHARE
    source = f"{nominal:g} nominal x {SUSTAINED_SHARE:.2f}"
    return Card(name=name, memory=round(gib * GIB), tflops=rate, peer_gbps=peer_gbps, fp8=fp8, source=source)


CARDS: tuple[Card, ...] = (
    Card(
        name="h200",
        memory=139 * GIB,
        tflops=H200_MATRIX_TFLOPS,
        peer_gbps=300.0,
        fp8=True,
        source="measured, sustained",
    ),
    _card("b200", 178.0, 2250.0, 600.0, True),
    _card("h100", 79.0, 989.0, 300.0, True),
    _card("a100", 79.0, 312.0, 200.0, False),
    _card("a100-40gb", 39.0, 312.0, 200.0, False),
    _card("rtx-pro-6000", 94.0, 504.0, PCIE_GBPS, True),
    _card("l40s", 44.0, 362.0, PCIE_GBPS, True),
    _card("rtx5090", 31.0, 210.0, PCIE_GBPS, True),
    _card("rtx4090", 23.0, 165.0, PCIE_GBPS, True),
    _card("rtx3090", 23.0, 71.0, PCIE_GBPS, False),
)
"""Memory as the driver reports it, nominal dense bf16 rates (fp32 sums) as their makers state them."""
