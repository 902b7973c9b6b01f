"""The drafter as decoding uses it: keys and values of the committed context cached, blocks run on top and dropped.

Decoding asks for one block at a time, the teacher-forced estimate for many: both go through `DraftContext.hidden`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.drafter.loss import head_logits
from draftsmith.drafter.model import Drafter, Layer
from draftsmith.drafter.rope import RopeTable, inverse_frequencies, rope_table
from draftsmith.records import FrozenEnds
from draftsmith.target.packed import linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks to draft, `size` places each.

    `tokens_A` is the known token at each anchor, `anchors_A` its absolute position (both int64, on the drafter's
    device). `widths_A` is how many places of a block exist: fewer than `size` near a length limit. `rows_A` is whose
    conversation each block continues.
    """

    rows_A: Tensor
    tokens_A: Tensor
    anchors_A: Tensor
    widths_A: Tensor
    size: int

    @classmethod
    def single(cls, token: int, anchor: int, size: int, device: torch.device) -> Blocks:
        def one(value: int) -> Tensor:
            return torch.tensor([value], device=device)

        return cls(rows_A=one(0), tokens_A=one(token), anchors_A=one(anchor), widths_A=one(size), size=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Where each cached position belongs: its conversation and its position in it (int64, one per slot)."""

    rows_S: Tensor
    positions_S: Tensor


@dataclass(slots=True, kw_only=True)
class DraftContext:
    """Committed positions as every drafter layer sees them: rotated keys, and values.

    Grows by `extend`; a block never enters it. Positions of several conversations may lie in it in any order, each in
    a slot that names both. Tensors per layer: [slots, kv_heads, head_dim].
    """

    drafter: Drafter
    ends: FrozenEnds
    slots: Slots
    keys: list[Tensor] = field(default_factory=list[Tensor])
    values: list[Tensor] = field(default_factory=list[Tensor])
    inv_freq: Tensor
    rope_factor: float

    @classmethod
    def start(cls, drafter: Drafter, ends: FrozenEnds) -> DraftContext:
        device = drafter.fc.weight.device
        inv_freq, factor = inverse_frequencies(drafter.config.rope, device)
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        slots = Slots(rows_S=nothing, positions_S=nothing)
        return cls(drafter=drafter, ends=ends, slots=slots, inv_freq=inv_freq, rope_factor=factor)

    @property
    def length(self) -> int:
        """Slots in use; with one conversation, the position that comes next."""
        return self.slots.positions_S.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.drafter.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.drafter.fc.weight.device

    def table(self, positions: Tensor) -> RopeTable:
        return rope_table(positions, self.inv_freq, self.rope_factor, self.dtype)

    def extend(self, features_TFH: Tensor, slots: Slots | None = None) -> None:
        """Commit positions by their tapped hidden states [new, F*H], cast to the drafter's dtype.

        Without `slots` they are the next positions of the one conversation.
        """
        if slots is None:
            positions = torch.arange(self.length, self.length + features_TFH.shape[0], device=self.device)
            slots = Slots(rows_S=torch.zeros_like(positions), positions_S=positions)
        context_TH = self.drafter.context(features_TFH.to(self.device, self.dtype))
        rope = self.table(slots.positions_S)
        for index, layer in enumerate(self.drafter.layers):
            assert isinstance(layer, Layer)
            k, v = layer.self_attn.keys_values(context_TH, rope)
            if index == len(self.keys):
                self.keys.append(k)
                self.values.append(v)
            else:
                self.keys[index] = torch.cat([self.keys[index], k])
                self.values[index] = torch.cat([self.values[index], v])
        self.slots = Slots(
            rows_S=torch.cat([self.slots.rows_S, slots.rows_S]),
            positions_S=torch.cat([self.slots.positions_S, slots.positions_S]),
        )

    def hidden(self, blocks: Blocks) -> Tensor:
        """The drafter's output [A, size, H] for blocks whose anchors are at or before their conversation's length."""
        config = self.drafter.config
        A, size = blocks.anchors_A.numel(), blocks.size
        ids_AB = torch.full((A, size), config.mask_token_id, device=self.device)
        ids_AB[:, 0] = blocks.tokens_A
        embedding_VH = self.ends.embedding_VH
        raw_QH = F.embedding(ids_AB.view(-1).to(embedding_VH.device), embedding_VH) * self.ends.embedding_scale
        x = raw_QH.to(self.device, self.dtype)
        place_B = torch.arange(size, device=self.device)
        rope = self.table((blocks.anchors_A[:, None] + place_B).view(-1))
        masks = {kind: visible(blocks, self.slots, config.window(kind)) for kind in set(config.layer_types)}
        for index, (layer, kind) in enumerate(zip(self.drafter.layers, config.layer_types, strict=True)):
            x = layer(x, (self.keys[index], self.values[index]), rope, masks[kind])
        return self.drafter.norm(x).view(A, size, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's own head on drafter output [rows, H]: fp32 [rows, V], on the head's device."""
        head_VH = self.ends.head_VH
        return head_logits(hidden.to(head_VH.device, head_VH.dtype), self.ends, linear)


def visible(blocks: Blocks, slots: Slots, window: int | None) -> Tensor:
    """Bool [A * size, slots + A * size]: the own conversation strictly before the anchor, and the own block.

    On sliding layers only the last `window` positions, and the own block causally. Places past a block's width are
    keys to no place within it; as queries they keep their block, since a row with nothing to see turns into NaN.
    """
    device, size = blocks.anchors_A.device, blocks.size
    A = blocks.anchors_A.numel()
    block_Q = torch.arange(A * size, device=device) // size
    place_Q = torch.arange(A * size, device=device) % size
    anchor_Q1, width_Q1 = blocks.anchors_A[block_Q][:, None], blocks.widths_A[block_Q][:, None]
    context = (slots.rows_S == blocks.rows_A[block_Q][:, None]) & (slots.positions_S < anchor_Q1)
    own = (block_Q[:, None] == block_Q) & ((place_Q < width_Q1) | (place_Q[:, None] >= width_Q1))
    if window is not None:
        context &= slots.positions_S >= anchor_Q1 + place_Q[:, None] - (window - 1)
        own &= place_Q <= place_Q[:, None]
    return torch.cat([context, own], dim=1)
