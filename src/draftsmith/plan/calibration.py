"""Every measured constant of the plan, in one place, with its source.

Everything was taken on one H200 (bf16, CUDA graphs, torch 2.11 to 2.13) and is carried to other cards by their matrix
rate. Sizes of buffers are not calibrated: they follow from shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

H200_MATRIX_TFLOPS = 669.0
"""Sustained bf16 product of 8192-cubes over seconds, as `bench/step.py` takes it (cold: 780; nominal: 989)."""
SUSTAINED_SHARE = H200_MATRIX_TFLOPS / 989.0
"""What an unmeasured card is taken to sustain of its nominal dense bf16 rate: what the H200 does."""

DRAFTER_SHARE = 0.999
"""Of the matrix rate, the products of a captured draw: they run at 685 TFLOP/s in the step, the cube at 669. This and
the next constant are solved from `bench/step.py` at qwen3.6-27b (476 ms) and smollm2 (5.18 ms). Held out: qwen3-8b
144 ms, foretold 137; its 24 GB shape 54, 60; 3,072 anchors 1,255, 1,273; distilled 560, 550."""
MOVED_TIMES = 3.6
"""How often a draw moves each byte of its activations, and the bytes of all its logits, at nominal bandwidth: next to
nothing for wide drafters, most of the time for narrow ones."""
LOGIT_BYTES_MOVED = 10
"""Of a logit in bf16: written, read twice, overwritten by its gradient, read."""
TEACHER_BYTES_MOVED = 4
"""Of its teacher's: written and read."""
UPDATE_BYTES = 34
"""That an update moves for each element: gradient read and zeroed, master and two moments read and written, all fp32,
shadow written in bf16."""
TARGET_DENSE_SHARE = 593.0 / H200_MATRIX_TFLOPS
"""Of the matrix rate, the compiled forward of a dense target: Qwen3-8B at [24, 2048], 593 TFLOP/s (taken cold)."""
TARGET_FP8_SHARE = 935.0 / H200_MATRIX_TFLOPS
"""The same with `--target-compute fp8`: 935 TFLOP/s."""
TARGET_HYBRID_SHARE = 573.0 / 673.5
"""A Qwen3.5-type hybrid with flash-linear-attention, compiled: 573 TFLOP/s of the run's 673.5 at [24, 2048]."""
HOST_SECONDS_PER_LAYER = 0.65e-3
"""What the host spends on a layer of a target's forward, compiled but not captured, hooks included: SmolLM2 with 2,048
tokens a forward reads 100,000 tokens/s (docs/log.md). Wide layers take the GPU longer and hide it."""
DECODE_SHARE = 0.25
"""Of the matrix rate, a server decoding many answers at once (regeneration). An assumption: servers vary by 2x."""

BYTES_PER_LOGIT = 2
"""Of a chunk at its fullest: bf16 logits, which their gradient overwrites."""
BYTES_PER_DISTILLED_LOGIT = 12
"""With a teacher, once compiled: two of bf16, and the gradient's fp32 beside each."""
POOL_SLACK = 1.08
"""Graphs' pool over the activations counted: 64.3 GB in all at qwen3.6-27b, foretold 65.0. Held out, in GB: qwen3-8b
31.4, foretold 31.5; its 24 GB shape 17.8, 16.8; smollm2 1.31, 1.21; 3,072 anchors 99.2, 96.9; distilled 67.3, 71.3."""
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
    bandwidth: float
    """Nominal terabytes a second of its memory."""
    peer_gbps: float
    """Gigabytes a second between two of one host; above PCIE_GBPS they write into each other's memory."""
    fp8: bool
    source: str
    """Where the rate comes from."""

    @property
    def has_peers(self) -> bool:
        return self.peer_gbps > PCIE_GBPS


def _card(name: str, gib: float, nominal: float, bandwidth: float, peer_gbps: float) -> Card:
    return Card(
        name=name,
        memory=round(gib * GIB),
        tflops=nominal * SUSTAINED_SHARE,
        bandwidth=bandwidth,
        peer_gbps=peer_gbps,
        fp8=not name.startswith(("a100", "rtx3")),
        source=f"{nominal:g} nominal x {SUSTAINED_SHARE:.2f}",
    )


CARDS: tuple[Card, ...] = (
    Card(
        name="h200",
        memory=139 * GIB,
        tflops=H200_MATRIX_TFLOPS,
        bandwidth=4.8,
        peer_gbps=300.0,
        fp8=True,
        source="measured",
    ),
    _card("b200", 178.0, 2250.0, 8.0, 600.0),
    _card("h100", 79.0, 989.0, 3.35, 300.0),
    _card("a100", 79.0, 312.0, 2.0, 200.0),
    _card("a100-40gb", 39.0, 312.0, 1.55, 200.0),
    _card("rtx-pro-6000", 94.0, 504.0, 1.79, PCIE_GBPS),
    _card("l40s", 44.0, 362.0, 0.86, PCIE_GBPS),
    _card("rtx5090", 31.0, 210.0, 1.79, PCIE_GBPS),
    _card("rtx4090", 23.0, 165.0, 1.0, PCIE_GBPS),
    _card("rtx3090", 23.0, 71.0, 0.94, PCIE_GBPS),
)
"""Memory as the driver reports it; dense bf16 rates (fp32 sums) and bandwidths as their makers state them."""
