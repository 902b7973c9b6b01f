"""What a drafter was when it was exported: its config, and its output on a fixed made-up input.

Travels in the drafter's folder as draftsmith.json, so that any later load, by whatever code, can be held against it
without the target: a changed RoPE theta, norm convention, mask or missing weight shows in the output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafter.model import Drafter, DrafterConfig
from draftsmith.drafter.rope import inverse_frequencies, rope_table
from draftsmith.evaluate.drafting import Blocks, Slots, visible

RECORD = "draftsmith.json"
CONTEXT = 64
SKETCHES = 8
"""Numbers kept of each place's output: fixed mixtures of all its components."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Made-up context features [CONTEXT, F*H] and block embeddings [B, H], the same on every machine."""

    features_TFH: Tensor
    block_BH: Tensor

    @classmethod
    def of(cls, config: DrafterConfig) -> Probe:
        H = config.hidden_size
        return cls(
            features_TFH=noise(CONTEXT, len(config.taps) * H, 1.0),
            block_BH=noise(config.block_size, H, 2.0),
        )


def noise(rows: int, columns: int, seed: float) -> Tensor:
    """Evenly spread numbers of variance 1 from a formula, fp32: no generator that a version may change."""
    index = torch.arange(1, rows * columns + 1, dtype=torch.float64)
    # Weyl sequence of an irrational step, squared to break its lattice.
    uniform = torch.frac(index * index * (0.6180339887498949 / seed) + index * 0.7548776662466927)
    return ((uniform * 2.0 - 1.0) * math.sqrt(3.0)).to(torch.float32).view(rows, columns)


@torch.no_grad()
def probe_output(drafter: Drafter) -> Tensor:
    """The drafter's output [B, H] on the probe, fp32 on its device."""
    config, device = drafter.config, drafter.fc.weight.device
    probe = Probe.of(config)
    size = config.block_size
    blocks = Blocks.single(0, CONTEXT, size, device)
    inv_freq, factor = inverse_frequencies(config.rope, device)
    dtype = drafter.fc.weight.dtype
    positions = torch.arange(CONTEXT + size, device=device)
    slots = Slots(rows_S=torch.zeros(CONTEXT, dtype=torch.int64, device=device), positions_S=positions[:CONTEXT])
    masks = {kind: visible(blocks, slots, config.window(kind)) for kind in set(config.layer_types)}
    output = drafter(
        probe.block_BH.to(device, dtype),
        probe.features_TFH.to(device, dtype),
        rope_table(positions[:CONTEXT], inv_freq, factor, dtype),
        rope_table(positions[CONTEXT:], inv_freq, factor, dtype),
        masks,
    )
    return output.float()


def sketch(output_BH: Tensor) -> list[list[float]]:
    """A few mixtures of each place's components, in which every component counts."""
    H = output_BH.shape[1]
    mixed: Any = output_BH.float().cpu() @ noise(H, SKETCHES, 3.0) / math.sqrt(H)
    return mixed.tolist()


def described(config: DrafterConfig) -> dict[str, Any]:
    """The config as plain JSON values, as they come back from a file."""
    rope = {"head_dim": config.rope.head_dim, "theta": config.rope.theta, "max_positions": config.rope.max_positions}
    values: dict[str, Any] = {name: getattr(config, name) for name in config.__slots__ if name != "rope"}
    values["rope"] = rope | {"scaling": dict(config.rope.scaling)}
    return json.loads(json.dumps(values))


def trained_record(config: DrafterConfig, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The record of `weights` (by the Drafter's names, already rounded to the dtype they are saved in)."""
    drafter = Drafter(config)
    drafter.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return {"drafter": described(config), "probe": sketch(probe_output(drafter))}
