"""Do the rivals' weights, mapped by name, give the same drafter here? Tiny shapes, fp32, on the CPU.

    python bench/rivals_check.py

Each trains a few steps of its own (its CPU attention and loss), has every weight disturbed, and is held against our
model at the anchors that it drew. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import torch
from rivals import SpecForge, SpecForgeSettings, Speculators, SpeculatorsSettings, rows_of
from torch import Tensor, nn

from draftsmith.drafter.anchors import Anchors, make_blocks
from draftsmith.drafter.layout import document_layout
from draftsmith.drafter.mask import MaskShape, context_ranges, dense_mask
from draftsmith.drafter.model import FULL, SLIDING, Drafter, DrafterConfig
from draftsmith.drafter.rope import RopeConfig, inverse_frequencies, rope_table
from draftsmith.records import BatchShape, FeatureBatch, FrozenEnds


def ours_hidden(weights: Mapping[str, Tensor], drafter: DrafterConfig, ends: FrozenEnds, batch: FeatureBatch,
                anchor_A: Tensor) -> Tensor:  # fmt: skip
    """What draftsmith's model computes with a rival's weights at the given anchors: [A * B, H]."""
    model = Drafter(drafter)
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    layout = document_layout(batch.lengths_D, batch.shape.num_tokens)
    anchors = Anchors(index_A=anchor_A, valid_A=torch.ones_like(anchor_A, dtype=torch.bool))
    blocks = make_blocks(
        anchors, layout, batch.token_ids_T, batch.loss_mask_T, drafter.block_size, drafter.mask_token_id
    )
    inv_freq, factor = inverse_frequencies(drafter.rope, "cpu")
    ranges = context_ranges(anchors, layout)
    masks = {}
    for kind in set(drafter.layer_types):
        shape = MaskShape(
            num_tokens=batch.shape.num_tokens, num_anchors=anchor_A.numel(), block_size=drafter.block_size, group=1,
            window=drafter.window(kind),
        )  # fmt: skip
        masks[kind] = dense_mask(ranges, shape)
    tables = [rope_table(p, inv_freq, factor, torch.float32) for p in (layout.positions_T, blocks.positions_Q)]
    embedded = nn.functional.embedding(blocks.input_ids_Q, ends.embedding_VH)
    return model(embedded, batch.features_TFH, *tables, masks).detach()


def check_batch(drafter: DrafterConfig, lengths: list[int]) -> tuple[FrozenEnds, FeatureBatch]:
    """Random ends and documents, fp32 on the CPU."""
    torch.manual_seed(0)
    shape = BatchShape(
        num_tokens=sum(lengths) + 7, num_documents=8, num_taps=len(drafter.taps), hidden_size=drafter.hidden_size,
        dtype=torch.float32, last_hidden=True,
    )  # fmt: skip
    batch = FeatureBatch.allocate(shape, "cpu")
    used = sum(lengths)
    batch.lengths_D[: len(lengths)] = torch.tensor(lengths)
    batch.token_ids_T[:used] = torch.randint(drafter.vocab_size, (used,))
    batch.loss_mask_T[:used] = torch.cat([torch.arange(length) >= length // 4 for length in lengths])
    batch.features_TFH[:used].normal_()
    assert batch.last_hidden_TH is not None
    batch.last_hidden_TH[:used].normal_()
    batch.num_tokens.fill_(used)
    embedding, head = torch.randn(2, drafter.vocab_size, drafter.hidden_size).mul(0.02)
    return FrozenEnds(embedding_VH=embedding, head_VH=head), batch


def disturb(model: nn.Module) -> None:
    """Move every trained weight, or norms at 1 would hide a wrong mapping."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.02 if parameter.ndim > 1 else 0.3)


def check_speculators(drafter: DrafterConfig) -> dict[str, float]:
    """Largest difference between its hidden states and ours, after training steps on several documents."""
    ends, batch = check_batch(drafter, [70, 45, 90])
    settings = SpeculatorsSettings(max_anchors=16)
    rival = Speculators(drafter, ends, torch.ones(drafter.hidden_size), settings, 100)
    first = rival.step(batch).item()
    losses = [rival.step(batch).item() for _ in range(4)]
    disturb(rival.model)
    with torch.no_grad():
        hidden, _, _, _, index = rival.model._backbone_forward(**rival.inputs(batch), max_anchors=16)
    ours = ours_hidden(rival.weights(), drafter, ends, batch, index[:: drafter.block_size])
    return {"largest_difference": (ours - hidden[0]).abs().max().item(), "first_loss": first, "last_loss": losses[-1]}


def check_specforge(drafter: DrafterConfig) -> dict[str, float]:
    """The same for SpecForge, on one document (it packs none)."""
    ends, batch = check_batch(drafter, [150])
    rival = SpecForge(drafter, ends, SpecForgeSettings(num_anchors=16, lr=1e-3, gamma=4.0), 100)
    rows = rows_of(batch)
    first = rival.step_rows(*rows).item()
    losses = [rival.step_rows(*rows).item() for _ in range(4)]
    disturb(rival.model.draft_model)
    with torch.no_grad():
        anchors, _, hidden = rival.model._forward_draft_blocks(rows[0], rows[1], rows[2].float())
    ours = ours_hidden(rival.weights(), drafter, ends, batch, anchors[0])
    return {"largest_difference": (ours - hidden[0]).abs().max().item(), "first_loss": first, "last_loss": losses[-1]}


def tiny_drafter(*layer_types: str) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=128, intermediate_size=192, num_heads=4, num_kv_heads=2, head_dim=32, rms_norm_eps=1e-6,
        layer_types=layer_types, sliding_window=128 if SLIDING in layer_types else 0, block_size=8, mask_token_id=499,
        taps=(1, 3), num_target_layers=6, vocab_size=500,
        rope=RopeConfig(head_dim=32, theta=1e5, scaling={}, max_positions=4096),
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    result = {
        "speculators": check_speculators(tiny_drafter(FULL, FULL)),
        "speculators, sliding": check_speculators(tiny_drafter(SLIDING, SLIDING)),
        "specforge": check_specforge(tiny_drafter(FULL, FULL)),
    }
    for name, row in result.items():
        print(name, row)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
