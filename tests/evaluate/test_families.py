"""Every family: capture, 20 real steps, export, read back, and drafted decoding that equals the target's own greedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.drafter.loss import LossSpec
from draftsmith.drafter.model import Drafter, init_weights
from draftsmith.drafter.objectives import LossConfig
from draftsmith.evaluate.decode import DecodeLimits, decode, plain_greedy
from draftsmith.evaluate.export import export_zlab, load_zlab, verify_export
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.records import Document
from draftsmith.target.capture import get_hidden_states_packed
from draftsmith.target.model import Target, TargetConfig, load_target
from draftsmith.train.build import StateSpec, build_state
from draftsmith.train.optim import OptimConfig
from draftsmith.train.step import StepConfig, accumulate, update
from tests.evaluate.overfit import PROMPTS, drafter_config
from tests.families import FAMILIES, save_tiny, tiny_model, tiny_target

STEPS, ANSWER = 20, 24
SCALED_LOGITS = ("granite", "cohere")
"""Families that scale their logits down, so that on tiny random weights a loss moves slower for the same step."""


def trained(target: Target) -> tuple[Drafter, list[float]]:
    """A drafter after 20 steps on the target's own answers, and its losses."""
    documents: list[Document] = []
    for prompt in PROMPTS[:3]:
        ids = torch.tensor(prompt + plain_greedy(target, prompt, ANSWER))
        documents.append(Document(token_ids=ids, loss_mask=torch.arange(len(ids)) >= len(prompt)))
    config = drafter_config(target)
    drafter = Drafter(config)
    init_weights(drafter, 0)
    batch = get_hidden_states_packed(target, documents, config.taps)
    spec = StateSpec(
        loss=LossSpec(config=LossConfig(), gamma=4.0, block_size=config.block_size),
        step=StepConfig(num_anchors=32, attention="dense"),
        optim=OptimConfig(lr=6e-3),
        total_steps=STEPS,
        dtype=torch.float32,
        compiled=False,
    )
    state = build_state(drafter, target.ends(), spec, torch.device("cpu"))
    totals = torch.zeros_like(state.sums, dtype=torch.float64)
    losses: list[float] = []
    for step in range(STEPS):
        totals.zero_()
        accumulate(state, batch, draw_uniforms(0, step, 0, batch.shape.num_tokens))
        update(state, totals)
        losses.append(float(totals[0] / totals[1]))
    drafter.requires_grad_(False)
    return drafter, losses


def adapted(folder: Path) -> Target:
    """The tiny Qwen3 with a LoRA adapter merged, as a person names it."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_alpha=4, init_lora_weights=False)
    peft.get_peft_model(tiny_model("qwen3"), lora).save_pretrained(folder / "adapter")
    base = save_tiny("qwen3", folder / "base")
    return load_target(TargetConfig(target=str(base), adapter=str(folder / "adapter")), "cpu")


@pytest.mark.parametrize("family", [*FAMILIES, "lora"])
def test_20_steps_export_reload_and_decode_identically_to_greedy(family: str, tmp_path: Path) -> None:
    target = adapted(tmp_path) if family == "lora" else tiny_target(family)
    drafter, losses = trained(target)
    limit = 0.95 if family in SCALED_LOGITS else 0.9
    assert sum(losses[-5:]) < limit * sum(losses[:5]), losses
    info = ExportInfo.of(target.facts, target.ends())
    folder = export_zlab(drafter, None, info, tmp_path / "drafter", torch.float32)
    verify_export(folder, drafter.config, target.facts)
    config, reloaded = load_zlab(folder)
    assert config.rope == drafter.config.rope
    assert all(torch.equal(mine, drafter.state_dict()[name]) for name, mine in reloaded.state_dict().items())
    limits = DecodeLimits(max_new_tokens=ANSWER, stop_ids=target.facts.eos_token_ids)
    steps = tokens = 0
    for prompt in [*PROMPTS[:3], [5, 6, 7, 8]]:
        first = decode(target, drafter, target.ends(), prompt, limits)
        again = decode(target, reloaded, target.ends(), prompt, limits)
        assert list(again.token_ids) == plain_greedy(target, prompt, ANSWER)
        assert again.steps == first.steps
        steps, tokens = steps + len(again.steps), tokens + again.committed
    assert tokens > steps, "no draft was ever accepted: reloading and decoding were not put to the test"
