"""The way that fixed shapes replace, written as a reference: every batch has its own length, so does every tensor.

Packed length without padding, `repeat_interleave` and host lists for the layout, `nonzero` and `randperm` for anchors,
`create_block_mask` each step, eager layers around compiled flex attention, checkpointed loss chunks, bf16 masters, a
product each for keys, values, gate and up. Anchors stay in the order that `randperm` gives unless `sort_anchors`: a
tile of unsorted anchors sees parts of many documents, so far more tiles of the mask must be computed.
"""

from __future__ import annotations

import torch
from common import Shape, make_state
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from draftsmith.drafter.model import Attention
from draftsmith.drafter.rope import RopeTable, rope_table, rotate
from draftsmith.records import FeatureBatch


class DynamicStep:
    """One optimizer step a call over the ring's batches."""

    def __init__(
        self, shape: Shape, ring: list[FeatureBatch], device: torch.device, *, sort_anchors: bool = False
    ) -> None:
        self.shape, self.ring, self.device, self.count = shape, ring, device, 0
        self.sort_anchors = sort_anchors
        state = make_state(shape, device, compiled=False)
        self.drafter, self.ends, self.inv_freq = state.drafter, state.ends, state.inv_freq
        for parameter in self.drafter.parameters():
            parameter.data = parameter.data.clone()
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-4, fused=True)
        del state
        self.flex = torch.compile(flex_attention, dynamic=True)
        self.make_mask = torch.compile(create_block_mask, dynamic=True)

    def __call__(self) -> None:
        batch = self.ring[self.count % len(self.ring)]
        self.count += 1
        lengths = [length for length in batch.lengths_D.tolist() if length]
        # Lengths of real batches all differ; cutting the last document makes each step another shape.
        lengths[-1] = max(16, lengths[-1] - 7 * (self.count % 61))
        self._step(batch, lengths)

    def _step(self, batch: FeatureBatch, lengths: list[int]) -> None:
        d, device = self.shape.drafter, self.device
        T, B = sum(lengths), d.block_size
        sizes = torch.tensor(lengths, device=device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=device), sizes)
        starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        positions = torch.arange(T, device=device) - starts
        mask, ids = batch.loss_mask_T[:T], batch.token_ids_T[:T]
        eligible = torch.nonzero(mask[:-1] & mask[1:] & (document[1:] == document[:-1]))[:, 0]
        chosen = torch.randperm(eligible.numel(), device=device)[: self.shape.num_anchors]
        anchor = eligible[chosen]
        if self.sort_anchors:
            anchor = anchor.sort().values
        A = anchor.numel()
        place = torch.arange(B, device=device)
        index = (anchor[:, None] + place).clamp(max=T - 1)
        supervised = (document[index] == document[anchor][:, None]) & mask[index] & (place > 0)
        weights = supervised * torch.exp(-(place - 1).clamp(min=0) / 7.0)
        inputs = torch.full((A, B), d.mask_token_id, device=device)
        inputs[:, 0] = ids[anchor]
        x = F.embedding(inputs.view(-1), self.ends.embedding_VH)
        block_positions = (positions[anchor][:, None] + place).view(-1)
        rope_q = rope_table(block_positions, self.inv_freq, 1.0, x.dtype)
        rope_k = rope_table(positions, self.inv_freq, 1.0, x.dtype)
        anchor_document = document[anchor]

        def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            block = q // B
            token = kv.clamp(max=T - 1)
            context = (kv < T) & (document[token] == anchor_document[block]) & (token < anchor[block])
            return context | ((kv >= T) & ((kv - T) // B == block))

        tiles = self.make_mask(visible, None, None, A * B, T + A * B, device=device)
        context = self.drafter.context(batch.features_TFH[:T])
        for layer in self.drafter.layers:
            h = layer.input_layernorm(x)
            a = layer.self_attn
            q = rotate(a.q_norm(a.q_proj(h).view(A * B, -1, d.head_dim)), rope_q).transpose(0, 1)[None]
            k0, v0 = self._keys_values(a, context, rope_k)
            k1, v1 = self._keys_values(a, h, rope_q)
            k, v = torch.cat([k0, k1]).transpose(0, 1)[None], torch.cat([v0, v1]).transpose(0, 1)[None]
            o = self.flex(q, k, v, block_mask=tiles, enable_gqa=True)
            x = x + a.o_proj(o[0].transpose(0, 1).reshape(A * B, -1))
            h = layer.post_attention_layernorm(x)
            gate, up = layer.mlp.gate_up_proj.weight.chunk(2)
            x = x + layer.mlp.down_proj(F.silu(F.linear(h, gate)) * F.linear(h, up))
        x = self.drafter.norm(x)

        def chunk(hidden: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            logits = (hidden @ self.ends.head_VH.t()).float()
            return (F.cross_entropy(logits, labels, reduction="none") * weight).sum()

        labels, flat = ids[index].view(-1), weights.view(-1)
        total = x.new_zeros((), dtype=torch.float32)
        for low in range(0, A * B, 2048):
            piece = slice(low, low + 2048)
            total = total + checkpoint(chunk, x[piece], labels[piece], flat[piece], use_reentrant=False)
        (total / flat.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @staticmethod
    def _keys_values(attention: Attention, x: torch.Tensor, rope: RopeTable) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = attention.kv_proj.weight.chunk(2)
        heads = (x.shape[0], -1, attention.head_dim)
        return rotate(attention.k_norm(F.linear(x, key).view(heads)), rope), F.linear(x, value).view(heads)
