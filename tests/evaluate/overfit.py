"""A drafter overfitted to a tiny target's own greedy answers, so that many tokens and whole blocks are accepted."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.drafter.loss import LossSpec
from draftsmith.drafter.model import FULL, SLIDING, Drafter, DrafterConfig, init_weights
from draftsmith.drafter.objectives import LossConfig
from draftsmith.drafter.rope import RopeConfig
from draftsmith.evaluate.decode import plain_greedy
from draftsmith.records import Document
from draftsmith.target.capture import get_hidden_states_packed
from draftsmith.target.model import Target
from draftsmith.train.build import StateSpec, build_state
from draftsmith.train.optim import OptimConfig
from draftsmith.train.step import StepConfig, accumulate, update
from tests.families import tiny_target

ANSWER = 40
PROMPTS = [[72, 101, 108, 108, 111], [97, 98, 99] * 5, list(range(60, 90)), [33] * 9, [200, 7, 120], [10, 20] * 6]


def drafter_config(target: Target, **changes: Any) -> DrafterConfig:
    """Two layers, one of them sliding, block 8, on three taps of a tiny target."""
    facts = target.facts
    config = DrafterConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        layer_types=(FULL, SLIDING),
        sliding_window=12,
        block_size=8,
        mask_token_id=facts.reserved_token_ids[0],
        taps=(1, 2, 4),
        num_target_layers=facts.num_layers,
        vocab_size=facts.vocab_size,
        rope=RopeConfig(head_dim=16, theta=facts.rope_theta, scaling=facts.rope_scaling, max_positions=512),
    )
    return replace(config, **changes)


def random_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    """Weights wide enough that every part matters, norms included."""
    drafter = Drafter(config)
    init_weights(drafter, seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
            else:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5, generator=draw))
    return drafter


@dataclass(frozen=True, kw_only=True)
class Overfit:
    target: Target
    drafter: Drafter
    documents: list[Document]
    num_prompt: list[int]


@functools.cache
def overfit(family: str, num_steps: int = 80, layer_types: tuple[str, ...] = (FULL, SLIDING)) -> Overfit:
    """Train on the greedy answers to PROMPTS with the real step."""
    target = tiny_target(family)
    documents: list[Document] = []
    for prompt in PROMPTS:
        ids = torch.tensor(prompt + plain_greedy(target, prompt, ANSWER))
        documents.append(Document(token_ids=ids, loss_mask=torch.arange(len(ids)) >= len(prompt)))
    config = drafter_config(target, layer_types=layer_types)
    drafter = Drafter(config)
    init_weights(drafter, 0)
    batch = get_hidden_states_packed(target, documents, config.taps)
    spec = StateSpec(
        loss=LossSpec(config=LossConfig(), gamma=4.0, block_size=config.block_size),
        step=StepConfig(num_anchors=64, attention="dense"),
        optim=OptimConfig(lr=6e-3, schedule="cosine"),
        total_steps=num_steps,
        dtype=torch.float32,
        compiled=False,
    )
    state = build_state(drafter, target.ends(), spec, torch.device("cpu"))
    totals = torch.zeros_like(state.sums, dtype=torch.float64)
    for step in range(num_steps):
        accumulate(state, batch, draw_uniforms(0, step, 0, batch.shape.num_tokens))
        update(state, totals)
    drafter.requires_grad_(False)
    return Overfit(target=target, drafter=drafter, documents=documents, num_prompt=[len(p) for p in PROMPTS])
