"""Drafters started from their target's own layers, on tiny models of each kind of layer."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from draftsmith.drafter.initialise import InitReport, init_from_target
from draftsmith.drafter.model import FULL, Drafter, DrafterConfig, Layer, init_weights
from draftsmith.drafter.rope import RopeConfig, inverse_frequencies, rope_table
from tests.families import HIDDEN, LAYERS, ROWS, THETA, tiny_model


def text_model(model: Any) -> Any:
    return model.get_decoder()


def drafter_for(model: Any, **changes: Any) -> Drafter:
    config = model.config
    head_dim = text_model(model).layers[-1].self_attn.head_dim
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "layer_types": (FULL, FULL),
        "sliding_window": 0,
        "block_size": 4,
        "mask_token_id": ROWS - 1,
        "taps": (1, 3),
        "num_target_layers": LAYERS,
        "vocab_size": ROWS,
        "rope": RopeConfig(head_dim=head_dim, theta=THETA, scaling={}, max_positions=512),
    }
    drafter = Drafter(DrafterConfig(**(sizes | changes)))
    init_weights(drafter, 0)
    return drafter


def spread_norms(model: Any) -> None:
    """Norm weights that are neither 0 nor 1, so that a wrong convention shows."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.ndim == 1:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) * 2.0)


def started(family: str, kinds: tuple[str, ...] | None = None, **changes: Any) -> tuple[Any, Drafter, InitReport]:
    model = tiny_model(family)
    spread_norms(model)
    drafter = drafter_for(model, **changes)
    text = text_model(model)
    report = init_from_target(drafter, list(text.layers), text.norm, kinds or (FULL,) * LAYERS)
    return model, drafter, report


def layer_of(drafter: Drafter, index: int) -> Layer:
    return cast(Layer, drafter.layers[index])


def joined(report: InitReport) -> str:
    return "\n".join(report.lines())


@torch.no_grad()
def test_a_copied_qwen3_layer_computes_what_the_targets_does() -> None:
    model, drafter, report = started("qwen3")
    rows = 7
    x_QH = torch.randn(rows, HIDDEN)
    positions = torch.arange(rows)
    rope = rope_table(positions, *inverse_frequencies(drafter.config.rope, torch.device("cpu")), torch.float32)
    layer = layer_of(drafter, 1)
    nothing = torch.zeros(0, 2, 16)
    ours = layer(x_QH, (nothing, nothing), rope, torch.ones(rows, rows, dtype=torch.bool))
    text = text_model(model)
    visible = torch.zeros(1, 1, rows, rows)
    table = text.rotary_emb(x_QH[None], positions[None])
    theirs = text.layers[-1](x_QH[None], attention_mask=visible, position_embeddings=table)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    torch.testing.assert_close(ours, theirs.view(rows, HIDDEN), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(drafter.norm(x_QH), text.norm(x_QH), rtol=1e-5, atol=1e-5)
    assert report.sources == (LAYERS - 2, LAYERS - 1)
    assert not report.left


def test_llama_layers_keep_random_query_and_key_norms_and_say_so() -> None:
    model, drafter, report = started("llama")
    theirs = text_model(model).layers[-1]
    ours = layer_of(drafter, 1)
    assert torch.equal(ours.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)
    kv = torch.cat([theirs.self_attn.k_proj.weight, theirs.self_attn.v_proj.weight])
    assert torch.equal(ours.self_attn.kv_proj.weight, kv)
    assert torch.equal(ours.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
    assert torch.equal(
        ours.mlp.gate_up_proj.weight, torch.cat([theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight])
    )
    assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    assert torch.equal(ours.self_attn.q_norm.weight, torch.ones(8))
    assert "not copied: self_attn.q_norm: the target has none there (layers 0, 1)" in report.lines()


@torch.no_grad()
def test_gemma_norms_are_copied_as_one_plus_w() -> None:
    kinds = ("sliding_attention", "sliding_attention", FULL) * 2
    model, drafter, report = started("gemma3", kinds)
    text = text_model(model)
    theirs, ours = text.layers[5], layer_of(drafter, 1)
    assert report.sources == (2, 5)
    assert torch.equal(ours.input_layernorm.weight, 1.0 + theirs.input_layernorm.weight)
    assert torch.equal(ours.self_attn.q_norm.weight, 1.0 + theirs.self_attn.q_norm.weight)
    # The one before the MLP; the target's post_attention_layernorm scales what attention gives.
    assert torch.equal(ours.post_attention_layernorm.weight, 1.0 + theirs.pre_feedforward_layernorm.weight)
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(drafter.norm(x), text.norm(x), rtol=1e-5, atol=1e-5)
    assert "the target's post_attention_layernorm: a drafter has no such norm" in joined(report)


def test_one_plus_w_norms_with_weights_above_fifty_in_bf16() -> None:
    model = tiny_model("gemma3")
    text = text_model(model)
    drafter = drafter_for(model)
    text.norm.weight.data.fill_(100.0)
    init_from_target(drafter, list(text.layers), text.norm.bfloat16(), (FULL,) * LAYERS)
    assert torch.equal(drafter.norm.weight, torch.full((HIDDEN,), 101.0))


def test_phi3_fused_projections_are_taken_apart() -> None:
    model, drafter, report = started("phi3")
    theirs = text_model(model).layers[-1]
    ours = layer_of(drafter, 1)
    fused = theirs.self_attn.qkv_proj.weight
    assert torch.equal(ours.self_attn.q_proj.weight, fused[:32])
    assert torch.equal(ours.self_attn.kv_proj.weight, fused[32:])
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(ours.mlp(x), theirs.mlp(x), rtol=1e-5, atol=1e-5)
    assert "copied: self_attn.kv_proj (layers 0, 1)" in report.lines()


def test_a_mixture_of_experts_is_skipped_but_its_attention_copied() -> None:
    model, drafter, report = started("qwen3_moe")
    ours = layer_of(drafter, 1)
    fresh = layer_of(drafter_for(model), 1)
    assert torch.equal(ours.mlp.gate_up_proj.weight, fresh.mlp.gate_up_proj.weight)
    assert torch.equal(ours.self_attn.q_proj.weight, text_model(model).layers[-1].self_attn.q_proj.weight)
    assert "not copied: mlp: the target's is a mixture of experts (layers 0, 1)" in report.lines()


def test_gated_query_projections_give_their_query_half_only() -> None:
    kinds = ("linear_attention", "linear_attention", FULL) * 2
    model, drafter, report = started("qwen3_5", kinds)
    theirs = text_model(model).layers[5].self_attn
    x = torch.randn(3, HIDDEN)
    query, _gate = torch.chunk(theirs.q_proj(x).view(3, 4, 2 * 16), 2, dim=-1)
    torch.testing.assert_close(layer_of(drafter, 1).self_attn.q_proj(x), query.reshape(3, 64))
    assert "the gates in the target's q_proj: a drafter's attention has none" in joined(report)
    assert torch.equal(layer_of(drafter, 1).self_attn.q_norm.weight, 1.0 + theirs.q_norm.weight)


def test_biases_are_left_behind_and_named() -> None:
    _, _, report = started("qwen2")
    assert "self_attn k_proj.bias, q_proj.bias, v_proj.bias: a drafter has no biases (layers 0, 1)" in joined(report)


def test_too_few_full_attention_layers_leave_the_first_drafter_layers_random() -> None:
    kinds = ("sliding_attention",) * 5 + (FULL,)
    model, drafter, report = started("qwen3", kinds)
    fresh = drafter_for(model)
    assert report.sources == (None, 5)
    ours, theirs = layer_of(drafter, 0).state_dict(), layer_of(fresh, 0).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "layer: the target has only 1 full-attention layers (layers 0)" in joined(report)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 64}, r"mlp.gate_up_proj: the target's is \[48, 32\], the drafter's needs \[64, 32\]"),
        ({"num_heads": 2}, r"self_attn.q_proj: the target's is \[64, 32\], the drafter's needs \[32, 32\]"),
        ({"head_dim": 8, "num_heads": 8, "num_kv_heads": 4}, "self_attn: heads of 16 in the target, of 8"),
    ],
)
def test_other_widths_keep_their_random_start(changes: dict[str, Any], words: str) -> None:
    if "head_dim" in changes:
        changes["rope"] = RopeConfig(head_dim=8, theta=THETA, scaling={}, max_positions=512)
    model, drafter, report = started("qwen3", **changes)
    assert re.search(words, joined(report))
    part = "mlp.gate_up_proj.weight" if "intermediate_size" in changes else "self_attn.q_proj.weight"
    fresh = layer_of(drafter_for(model, **changes), 1).state_dict()
    assert torch.equal(layer_of(drafter, 1).state_dict()[part], fresh[part])


@pytest.mark.parametrize(
    ("family", "changes", "part", "keys_copied"),
    [
        # A gated projection holds twice its heads' rows, as many as 8 plain heads of this width.
        ("qwen3_5", {"num_heads": 8}, "self_attn.q_proj", True),
        # 4 + 2 + 2 heads in one matrix are as many rows as 6 + 1 + 1.
        ("phi3", {"num_heads": 6, "num_kv_heads": 1}, "self_attn.q_proj", False),
    ],
)
def test_queries_of_other_heads_are_not_taken_over_though_their_matrix_fits(
    family: str, changes: dict[str, Any], part: str, keys_copied: bool
) -> None:
    model, drafter, report = started(family, **changes)
    fresh, ours = layer_of(drafter_for(model, **changes), 1).state_dict(), layer_of(drafter, 1).state_dict()
    theirs = dict(text_model(model).layers[-1].self_attn.named_parameters())
    tall = theirs["qkv_proj.weight"] if family == "phi3" else theirs["q_proj.weight"]
    rows = ours["self_attn.q_proj.weight"].shape[0]
    assert tall.shape[0] == (rows + ours["self_attn.kv_proj.weight"].shape[0] if family == "phi3" else rows)
    assert torch.equal(ours[f"{part}.weight"], fresh[f"{part}.weight"])
    assert re.search(
        rf"not copied: {part}: the target's heads are \d+ wide together, the drafter's {rows}", joined(report)
    )
    assert torch.equal(ours["self_attn.kv_proj.weight"], fresh["self_attn.kv_proj.weight"]) is not keys_copied
    assert torch.equal(ours["self_attn.o_proj.weight"], fresh["self_attn.o_proj.weight"])
    assert any(line.startswith("copied: mlp.gate_up_proj") for line in report.lines())


def test_layers_of_another_build_are_explained() -> None:
    """Phi: LayerNorms, `dense` instead of `o_proj`, a plain MLP, one norm for both branches."""
    model = tiny_model("phi")
    text = text_model(model)
    report = init_from_target(drafter_for(model), list(text.layers), text.final_layernorm, (FULL,) * LAYERS)
    words = joined(report)
    assert "input_layernorm: LayerNorm is not an RMSNorm" in words
    assert "self_attn.o_proj: the target has no o_proj" in words
    assert "mlp.gate_up_proj: the target has no gate_proj" in words
    assert "post_attention_layernorm: the target has none there" in words
    assert "not copied: norm: LayerNorm is not an RMSNorm" in words


def test_quantised_weights_and_bare_layers_are_explained() -> None:
    model = tiny_model("qwen3")
    text = text_model(model)
    quantised = torch.nn.Parameter(torch.zeros(32, 64, dtype=torch.int8), requires_grad=False)
    text.layers[5].self_attn.o_proj.weight = quantised
    layers = [*list(text.layers)[:4], torch.nn.Identity(), text.layers[5]]
    report = init_from_target(drafter_for(model), layers, text.norm, (FULL,) * LAYERS)
    assert "self_attn.o_proj: the target's is quantised (layers 1)" in joined(report)
    assert "self_attn: the target's layer has none (layers 0)" in joined(report)
    assert "mlp: the target's layer has none of that name (layers 0)" in joined(report)


@torch.no_grad()
def test_context_starts_as_the_last_tap() -> None:
    model, drafter, _ = started("qwen3")
    features = torch.randn(50, 2 * HIDDEN)
    last: Tensor = features[:, HIDDEN:]
    noise = (drafter.fc(features) - last).square().mean().sqrt()
    assert 0.005 < noise < 0.05
    norms = [text_model(model).layers[index].input_layernorm.weight for index in (4, 5)]
    torch.testing.assert_close(drafter.hidden_norm.weight.data, torch.stack(norms).mean(0).detach())


def test_hooks_on_the_targets_norm_are_not_run() -> None:
    model = tiny_model("qwen3")
    text = text_model(model)
    calls: list[int] = []
    text.norm.register_forward_hook(lambda *_: calls.append(1))
    init_from_target(drafter_for(model), list(text.layers), text.norm, (FULL,) * LAYERS)
    assert not calls
