"""The drafter's architecture against Hugging Face's parts and the independent `dflash` package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from draftsmith.drafter.anchors import draw_uniforms, make_blocks, select_anchors
from draftsmith.drafter.layout import document_layout
from draftsmith.drafter.mask import MaskShape, block_mask, context_ranges, dense_mask
from draftsmith.drafter.model import FULL, SLIDING, Drafter, DrafterConfig, RMSNorm, attend, guesses, init_weights
from draftsmith.drafter.rope import inverse_frequencies, rope_table
from draftsmith.errors import ConfigError
from tests.train.tiny import CONFIG, HIDDEN, TAPS, VOCAB, relative, tiny_ends


def wide_weights(drafter: Drafter) -> Drafter:
    """Weights far from their start, norms included, so that every part shows in the output."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            spread = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(spread if parameter.ndim > 1 else 1 + spread)
    return drafter


def as_dflash(drafter: Drafter) -> Any:
    """The same weights in the independent implementation."""
    config = drafter.config
    theirs = DFlashDraftModel(
        Qwen3Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.rope.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            layer_types=list(config.layer_types),
            use_sliding_window=SLIDING in config.layer_types,
            sliding_window=config.sliding_window,
            max_window_layers=0,
            attention_bias=False,
            attn_implementation="sdpa",
            block_size=config.block_size,
            num_target_layers=config.num_target_layers,
            dflash_config={"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.taps)},
        )
    )
    weights: dict[str, Tensor] = {}
    for name, value in drafter.state_dict().items():
        for joint, parts in (("kv_proj", ("k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if joint in name:
                halves = zip(parts, value.chunk(2), strict=True)
                weights |= {name.replace(joint, part): half for part, half in halves}
                break
        else:
            weights[name] = value
    theirs.load_state_dict(weights)
    return theirs.eval()


def packed_forward(
    drafter: Drafter,
    lengths: list[int],
    num_anchors: int,
    *,
    checkpoint_layers: bool = False,
    masked_blocks: bool = False,
) -> dict[str, Any]:
    """Hidden states of the blocks at random anchors of a packed batch, the way that training computes them."""
    config, T = drafter.config, 128
    generator = torch.Generator().manual_seed(1)
    features_TFH = torch.randn(T, TAPS * HIDDEN, generator=generator)
    token_ids_T = torch.randint(0, VOCAB - 1, (T,), generator=generator)
    mask_T = torch.ones(T, dtype=torch.bool)
    layout = document_layout(torch.tensor(lengths), T)
    anchors = select_anchors(mask_T, layout.document_ids_T, draw_uniforms(0, 0, 0, T), num_anchors)
    blocks = make_blocks(anchors, layout, token_ids_T, mask_T, config.block_size, config.mask_token_id)
    block_QH = tiny_ends(config).embedding_VH[blocks.input_ids_Q]
    inv_freq, factor = inverse_frequencies(config.rope, "cpu")
    ranges = context_ranges(anchors, layout)
    masks = {
        kind: dense_mask(
            ranges,
            MaskShape(
                num_tokens=T,
                num_anchors=num_anchors,
                block_size=config.block_size,
                group=1,
                window=config.window(kind),
            ),
        )
        for kind in set(config.layer_types)
    }
    tables = [rope_table(p, inv_freq, factor, torch.float32) for p in (layout.positions_T, blocks.positions_Q)]
    hidden_QH = drafter(block_QH, features_TFH, *tables, masks, checkpoint_layers, masked_blocks)
    return {
        "hidden_QH": hidden_QH,
        "anchors": anchors,
        "layout": layout,
        "features_TFH": features_TFH,
        "block_QH": block_QH,
    }


@pytest.mark.parametrize("kinds", [(FULL, FULL), (SLIDING, SLIDING), (FULL, SLIDING)], ids=["full", "sliding", "mixed"])
@torch.no_grad()
def test_blocks_of_a_packed_batch_equal_the_dflash_package_one_by_one(kinds: tuple[str, ...]) -> None:
    drafter = wide_weights(Drafter(replace(CONFIG, layer_types=kinds)))
    theirs = as_dflash(drafter)
    ours = packed_forward(drafter, [50, 9, 41, 28], num_anchors=24)
    compared = 0
    for j, (anchor, valid) in enumerate(
        zip(ours["anchors"].index_A.tolist(), ours["anchors"].valid_A.tolist(), strict=True)
    ):
        start = int(ours["layout"].starts_T[anchor])
        rows = slice(j * CONFIG.block_size, (j + 1) * CONFIG.block_size)
        if not valid or anchor == start:
            continue
        expected = theirs(
            target_hidden=ours["features_TFH"][None, start:anchor],
            noise_embedding=ours["block_QH"][None, rows],
            position_ids=torch.arange(anchor - start + CONFIG.block_size)[None],
            use_cache=False,
        )
        torch.testing.assert_close(ours["hidden_QH"][rows], expected[0], rtol=1e-5, atol=1e-5)
        compared += 1
    assert compared >= 20


def test_parameters_are_those_of_the_served_layout() -> None:
    drafter = Drafter(CONFIG)
    assert sum(p.numel() for p in drafter.parameters()) == sum(p.numel() for p in as_dflash(drafter).parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_equals_qwen3s(dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(32, 1e-6), Qwen3RMSNorm(32, 1e-6)
    weight = torch.rand(32) + 0.5
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
        norm.to(dtype)
    x = (torch.randn(7, 32) * 30).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x))


def test_attention_shares_key_heads_among_neighbouring_query_heads() -> None:
    rows, keys, heads, kv_heads, width = 5, 9, 6, 2, 4
    q, k, v = torch.randn(rows, heads, width), torch.randn(keys, kv_heads, width), torch.randn(keys, kv_heads, width)
    mask = torch.rand(rows, keys) < 0.7
    mask[:, 0] = True
    by_hand = torch.empty(rows, heads, width)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // 3].T / width**0.5
        by_hand[:, head] = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[:, head // 3]
    torch.testing.assert_close(attend(q, k, v, mask), by_hand.reshape(rows, -1))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 20])
@torch.no_grad()
def test_flex_attention_with_folded_heads_equals_the_dense_form(window: int | None) -> None:
    T, num_anchors, block_size, width = 128, 16, 8, 16
    layout = document_layout(torch.tensor([70, 40]), T)
    anchors = select_anchors(
        torch.ones(T, dtype=torch.bool), layout.document_ids_T, draw_uniforms(0, 0, 0, T), num_anchors
    )
    folded = MaskShape(num_tokens=T, num_anchors=num_anchors, block_size=block_size, group=3, window=window)
    q = torch.randn(num_anchors * block_size, 6, width)
    k, v = torch.randn(2, T + num_anchors * block_size, 2, width).unbind(0)
    ranges = context_ranges(anchors, layout)
    flex = attend(q, k, v, block_mask(ranges, folded))
    torch.testing.assert_close(flex, attend(q, k, v, dense_mask(ranges, replace(folded, group=1))))


def test_checkpointed_layers_give_the_same_output() -> None:
    drafter = wide_weights(Drafter(CONFIG))
    kept, remade = (packed_forward(drafter, [60, 40], 8, checkpoint_layers=again) for again in (False, True))
    assert torch.equal(kept["hidden_QH"], remade["hidden_QH"])


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_what_masked_blocks_leave_out_changes_neither_guesses_nor_gradients(
    checkpoint_layers: bool, layers: int
) -> None:
    """One mask row projected for all, and nothing past the last attention at the known places."""
    config = replace(CONFIG, layer_types=(SLIDING, FULL, FULL)[:layers])
    found: list[list[Tensor]] = []
    for masked in (False, True):
        drafter = wide_weights(Drafter(config))
        made = packed_forward(drafter, [60, 40], 8, checkpoint_layers=checkpoint_layers, masked_blocks=masked)
        hidden = made["hidden_QH"] if masked else guesses(made["hidden_QH"], config.block_size)
        scale = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))
        gradients = torch.autograd.grad((hidden * scale).sum(), list(drafter.parameters()))
        found.append([hidden.detach(), *gradients])
    assert found[1][0].shape[0] == 8 * (config.block_size - 1)
    for whole, short in zip(*found, strict=True):
        assert relative(short, whole) < 1e-5


def test_masked_blocks_project_the_mask_once() -> None:
    drafter, seen = Drafter(CONFIG), list[int]()
    for layer in drafter.layers:
        part = layer.get_submodule("self_attn.q_proj")
        part.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[0]))
    packed_forward(drafter, [60, 40], 8, masked_blocks=True)
    assert seen == [9, *[8 * CONFIG.block_size] * (len(seen) - 1)]
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"block_size": 1}, "--block-size 1 drafts nothing"),
        ({"num_heads": 5}, "5 heads don't share 2 key heads"),
        ({"layer_types": ()}, "layer types"),
        ({"layer_types": ("linear_attention",)}, "layer types"),
        ({"sliding_window": 7}, "--sliding-window 7 is smaller than a block of 8; raise it"),
        ({"mask_token_id": VOCAB}, f"--mask-token-id {VOCAB} has no embedding row"),
        ({"mask_token_id": -1}, "--mask-token-id -1"),
    ],
)
def test_sizes_that_can_not_work_are_refused(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        replace(CONFIG, **changes)


def test_a_window_belongs_to_sliding_layers_only() -> None:
    full: DrafterConfig = replace(CONFIG, layer_types=(FULL,), sliding_window=0)
    assert full.window(FULL) is None
    assert CONFIG.window(FULL) is None
    assert CONFIG.window(SLIDING) == 16
    assert CONFIG.num_layers == 2
    assert CONFIG.group == 3


def test_the_random_start_is_a_function_of_its_seed() -> None:
    def start(seed: int) -> dict[str, Tensor]:
        drafter = Drafter(CONFIG)
        init_weights(drafter, seed)
        return {name: p.detach() for name, p in drafter.named_parameters()}

    first, again, other = start(3), start(3), start(4)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if value.ndim > 1:
            assert not torch.equal(value, other[name])
            assert float(value.std()) == pytest.approx(0.02, rel=0.1)
        else:
            assert (value == 1).all()


@torch.no_grad()
def test_C21_what_a_head_reads_is_normalised_so_no_layers_scale_reaches_the_loss() -> None:
    """Residual streams grow with depth; read unnormalised, a head's loss and what it sends back grow alike."""
    drafter = wide_weights(Drafter(CONFIG))
    for loudness in (1.0, 1000.0):
        for name, weight in drafter.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(loudness)
        hidden_QH = packed_forward(drafter, [40, 30], 6)["hidden_QH"]
        size_Q = (hidden_QH / drafter.norm.weight).square().mean(-1)
        torch.testing.assert_close(size_Q, torch.ones_like(size_Q), rtol=1e-3, atol=0)
