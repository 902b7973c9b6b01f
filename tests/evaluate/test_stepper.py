"""The target's cache after taking tokens back equals one that never saw them."""

from __future__ import annotations

import pytest
import torch

from draftsmith.evaluate.stepper import Stepper, TapHooks
from tests.families import FAMILIES, tiny_target

PROMPT = [72, 101, 108, 108, 111, 32] * 3


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("kept", [1, 3, 5])
def test_tokens_taken_back_leave_no_trace(family: str, kept: int) -> None:
    """Twice, since a wrong state may need a second block to show; with windows and recurrent state too."""
    target = tiny_target(family)
    stepper = Stepper(target)
    stepper.run(PROMPT, last_only=True)
    block, then = [11, 12, 13, 14, 15], [90, 91, 92, 93, 94, 95, 96, 97, 98, 99]
    stepper.run(block)
    stepper.commit(kept)
    stepper.run(then)
    stepper.commit(7)
    ours = stepper.run([42, 43])
    straight = torch.tensor([PROMPT + block[:kept] + then[:7] + [42, 43]])
    expected = target.model(input_ids=straight).logits[0, -2:]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@torch.no_grad()
def test_only_full_attention_is_cropped() -> None:
    cropped = {
        family: Stepper(tiny_target(family)).is_croppable for family in ("llama", "gemma3", "qwen3_5", "gpt_oss")
    }
    assert cropped == {"llama": True, "gemma3": False, "qwen3_5": False, "gpt_oss": False}


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_B06_and_B19_taps_are_the_outputs_of_their_layers(family: str) -> None:
    target = tiny_target(family)
    taps = (0, 2, 4)
    with TapHooks(target, taps) as hooks:
        Stepper(target).run(PROMPT)
        features = hooks.features()[0]
    states = target.anatomy.backbone(input_ids=torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[tap + 1][0] for tap in taps], dim=-1)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
