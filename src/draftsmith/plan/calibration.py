"""Every measured constant of the plan, in one place, with its source.

Everything was taken on one H200 (bf16, CUDA graphs, torch 2.11 to 2.13) and is carried to other cards by their matrix
rate. Sizes of buffers are not calibrated: they follow from shapes.

The drafter's constants and the count of its activations are those of the step before weight gradients were added by
their own products and known places left out (docs/log.md, 2026-12-01, fourth session). That one takes 5% less time and
2 to 9% less memory at qwen3.6-27b; until the other shapes are measured anew, the plan errs on the safe side.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

H200_MATRIX_TFLOPS = 669.0
"""Sustained bf16 product of 8192-cubes over seconds, as `bench/step.py` takes it (cold: 780; nominal: 989)."""
SUSTAINED_SHARE = H200_MATRIX_TFLOPS / 989.0
"""What an unmeasured card is taken to sustain of its nominal dense bf16 rate: what the H200 does."""

DRAFTER_SHARE = 0.942
"""Of the matrix rate, the products of a captured draw with its update. This and the next constant are solved from
`bench/step.py` at qwen3.6-27b (502 ms) and smollm2 (6.19 ms); qwen3-8b (154 ms) is held out and foretold as 142."""
MOVED_TIMES = 4.2
"""How often a draw moves each byte of its activations and of all its logits through memory, at nominal bandwidth:
next to nothing for wide drafters, most of the time for narrow ones."""
TARGET_DENSE_SHARE = 593.0 / H200_MATRIX_TFLOPS
"""Of the matrix rate, the compiled forward of a dense target: Qwen3-8B at [24, 2048], 593 TFLOP/s (taken cold)."""
TARGET_FP8_SHARE = 935.0 / H200_MATRIX_TFLOPS
"""The same with `--target-compute fp8`: 935 TFLOP/s."""
TARGET_HYBRID_SHARE = 442.0 / H200_MATRIX_TFLOPS
"""A Qwen3.5-type hybrid with flash-linear-attention, uncompiled: 442 TFLOP/s."""
HOST_SECONDS_PER_LAYER = 0.65e-3
"""What the host spends on a layer of a target's forward, compiled but not captured, hooks included: SmolLM2 with 2,048
tokens a forward reads 100,000 tokens/s (docs/log.md). Wide layers take the GPU longer and hide it."""
DECODE_SHARE = 0.25
"""Of the matrix rate, a server decoding many answers at once (regeneration). An assumption: servers vary by 2x."""

BYTES_PER_LOGIT = 6
"""Of a chunk at its fullest, once compiled: bf16 logits and the gradient's fp32 beside them."""
POOL_SLACK = 1.17
"""Graphs' pool over the activations counted: 29.1 GB reserved at qwen3.6-27b. qwen3-8b and smollm2 are held out:
foretold 35.9 and 1.7 GB in all, measured 36.8 and 1.6."""
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
