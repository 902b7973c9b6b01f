"""Parts of a model are found by structure and proved; what they don't explain is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.errors import TargetError
from draftsmith.target.anatomy import find_anatomy, frozen_ends, logits_of
from draftsmith.target.model import build_target
from tests.families import FAMILIES, LAYERS, tiny_model, tiny_target, tiny_tokenizer


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_B18_ends_and_final_norm_reproduce_the_models_logits(family: str) -> None:
    target, caught = tiny_target(family), []
    handle = target.final_norm.register_forward_hook(lambda _m, _a, output: caught.append(output))
    logits = target.model(input_ids=torch.randint(0, 256, (1, 13))).logits
    handle.remove()
    torch.testing.assert_close(logits_of(target.ends(), caught[0]), logits, rtol=1e-4, atol=1e-4)


def test_ends_are_shared_not_copied_tied_or_not() -> None:
    tied, untied = tiny_target("qwen2"), tiny_target("qwen3")
    assert tied.ends().embedding_VH is tied.model.get_input_embeddings().weight
    assert tied.ends().head_VH is tied.ends().embedding_VH
    assert untied.ends().head_VH is untied.model.lm_head.weight
    assert untied.ends().head_VH.data_ptr() != untied.ends().embedding_VH.data_ptr()


@pytest.mark.parametrize(
    ("family", "logit_scale", "soft_cap", "embedding_scale"),
    [
        ("qwen3", 1.0, None, 1.0),
        ("granite", 0.25, None, 6.0),
        ("cohere", 0.25, None, 1.0),
        ("gemma2", 1.0, 3.0, 32**0.5),
        ("gemma3", 1.0, None, 32**0.5),
    ],
)
def test_scales_and_caps_of_families(
    family: str, logit_scale: float, soft_cap: float | None, embedding_scale: float
) -> None:
    ends = tiny_target(family).ends()
    assert (ends.logit_scale, ends.soft_cap, ends.embedding_scale) == (logit_scale, soft_cap, embedding_scale)


def test_head_bias_is_found() -> None:
    assert tiny_target("phi").ends().head_bias_V is tiny_target("phi").model.lm_head.bias
    assert tiny_target("qwen3").ends().head_bias_V is None


def test_B18_wrappers_resolve_to_their_text_decoder() -> None:
    for family, expected in (("qwen3_5_vlm", "Qwen3_5TextModel"), ("llava", "MistralModel")):
        target = tiny_target(family)
        assert type(target.anatomy.backbone).__name__ == expected
        assert len(target.layers) == LAYERS


def test_lists_of_layers_beside_the_decoder_are_passed_over() -> None:
    model = tiny_model("qwen3")
    model.memory = nn.ModuleList([nn.Linear(2, 2) for _ in range(LAYERS)])
    assert find_anatomy(model, LAYERS).layers is model.model.layers


def test_bf16_targets_pass_the_proof() -> None:
    for family in ("qwen3", "gemma2", "granite"):
        target = build_target(tiny_model(family).to(torch.bfloat16), tiny_tokenizer(), name=family)
        assert target.ends().head_VH.dtype == torch.bfloat16


class Odd(nn.Module):
    """A head that does something of its own."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, None

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.weight) + hidden.sum(-1, keepdim=True) * torch.arange(272)


def test_unknown_extras_on_the_logits_are_refused() -> None:
    model = tiny_model("qwen3")
    model.lm_head = Odd(model.lm_head)
    with pytest.raises(TargetError, match="aren't its head applied to its last hidden states"):
        frozen_ends(model, find_anatomy(model, LAYERS))


def test_learned_positions_leave_raw_embeddings_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("qwen3")
    model.model.embed_tokens.register_forward_hook(lambda _m, _a, output: output + torch.randn(output.shape))
    ends = frozen_ends(model, find_anatomy(model, LAYERS))
    assert ends.embedding_scale == 1.0
    assert "raw rows" in caplog.text


def test_models_without_layers_norm_or_head_are_refused() -> None:
    model = tiny_model("qwen3")
    with pytest.raises(TargetError, match="no list of 9 decoder layers"):
        find_anatomy(model, 9)
    anatomy = find_anatomy(model, LAYERS)
    with pytest.raises(TargetError, match="no language-model head"):
        frozen_ends(model.model, anatomy)
    model.model.norm = nn.Identity()
    with pytest.raises(TargetError, match="no final norm"):
        find_anatomy(model, LAYERS)


def test_quantised_or_mismatched_ends_are_refused() -> None:
    model = tiny_model("qwen3")
    anatomy = find_anatomy(model, LAYERS)
    head = model.lm_head
    model.lm_head = nn.Linear(32, 300, bias=False)
    with pytest.raises(TargetError, match="differ in shape"):
        frozen_ends(model, anatomy)
    head.weight = nn.Parameter(head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    model.lm_head = head
    with pytest.raises(TargetError, match=r"the head .* stored as torch.float8_e4m3fn"):
        frozen_ends(model, anatomy)
