"""One run of a team of threads that share a GPU: real targets, captured drafters, every step's loss."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import transformers

from draftsmith.data.buckets import OrderConfig, choose_buckets
from draftsmith.data.loader import BatchOrder
from draftsmith.drafter.loss import LossSpec
from draftsmith.drafter.model import Drafter, init_weights
from draftsmith.drafter.objectives import LossConfig, resolve_gamma
from draftsmith.pipeline.assemble import Blueprint, Team, build_drafters, build_rings, build_targets
from draftsmith.pipeline.placement import Placement
from draftsmith.pipeline.resolve import Batching
from draftsmith.pipeline.settings import PipelineConfig
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.team import run_workers
from draftsmith.records import BatchShape, Document
from draftsmith.target.model import Target, build_target
from draftsmith.train.build import StateSpec
from draftsmith.train.optim import OptimConfig
from draftsmith.train.step import StepConfig
from tests.gpu.steps import ANCHORS, BLOCK, CONFIG, HIDDEN, VOCAB

TOKENS, DRAWS, SEED, STALL_SECONDS = 1024, 2, 3, 60.0
LENGTHS = [120, 33, 89, 201, 52, 127, 78, 238, 64, 190, 42, 105, 97, 166, 71, 229, 154, 60, 111, 83]


def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(SEED)
    made: list[Document] = []
    for length in LENGTHS:
        ids = torch.randint(0, VOCAB - 1, (length,), generator=generator)
        made.append(Document(token_ids=ids, loss_mask=torch.arange(length) >= length // 4))
    return made


@functools.cache
def targets(device: torch.device, count: int) -> list[Target]:
    """Separate models of equal weights: a target serves one thread. Kept for a process's warm starts."""
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=384, num_hidden_layers=CONFIG.num_target_layers,
        num_attention_heads=6, num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made: list[Target] = []
    for _ in range(count):
        torch.manual_seed(SEED)
        model = transformers.Qwen3ForCausalLM(config).to(device, dtype)
        made.append(build_target(model, None, name="tiny qwen3"))
    return made


def blueprint(device: torch.device, num_targets: int, num_drafters: int, steps: int) -> Blueprint:
    on_gpu = device.type == "cuda"
    loss = LossConfig(chunk_rows=512)
    step = StepConfig(num_anchors=ANCHORS, attention="flex")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    drafter = Drafter(CONFIG)
    init_weights(drafter, SEED)
    order = OrderConfig(token_budget=TOKENS, max_documents=16, seed=SEED)
    return Blueprint(
        placement=Placement(
            targets=(device,) * num_targets, drafters=(device,) * num_drafters, joint=False, why="one GPU for all"
        ),
        pipeline=PipelineConfig(stall_seconds=STALL_SECONDS),
        batching=Batching(
            order=order, buckets=choose_buckets(LENGTHS, 2, 64), num_anchors=ANCHORS, draws_per_batch=DRAWS,
            accumulation=1, total_steps=steps,
        ),
        shape=BatchShape(
            num_tokens=TOKENS, num_documents=16, num_taps=len(CONFIG.taps), hidden_size=HIDDEN, dtype=dtype,
            last_hidden=loss.distilled,
        ),
        state=StateSpec(
            loss=LossSpec(config=loss, gamma=resolve_gamma(loss, BLOCK), block_size=BLOCK),
            step=step if on_gpu else replace(step, attention="dense"),
            optim=OptimConfig(lr=5e-3),
            total_steps=steps,
            dtype=dtype,
            compiled=on_gpu,
        ),
        drafter=drafter,
        ends=targets(device, num_targets)[0].ends(),
        seed=SEED,
        stop=Stop(),
        say=lambda _text: None,
    )  # fmt: skip


def run_team(device_name: str, num_targets: int, num_drafters: int, steps: int) -> list[float]:
    """Build everything, train `steps` steps with a thread per worker; the mean loss of each step.

    Raises:
        DraftsmithError: a worker's own error, or a wait of over a minute.
    """
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device(device_name)
    plan = blueprint(device, num_targets, num_drafters, steps)
    losses: list[float] = []
    team: Team | None = None

    def after_step(_step: int, _last: bool) -> None:
        assert team is not None
        totals = team.drafters[0].stepper.inputs.totals
        losses.append(float(totals[0] / totals[1]))
        totals.zero_()

    rings = build_rings(plan)
    drafters, streams = build_drafters(plan, rings, after_step)
    order = BatchOrder(LENGTHS, plan.batching.buckets, plan.batching.order)
    producers = build_targets(plan, targets(device, num_targets), documents(), order, rings)
    team = Team(
        producers=producers, drafters=drafters, streams=streams, rings=rings, placement=plan.placement, stop=plan.stop
    )
    try:
        run_workers(team.workers(), plan.stop, lambda: None)
    finally:
        team.close()
    masters = [loop.stepper.state.parameters.master_N for loop in drafters]
    assert all(torch.equal(master, masters[0]) for master in masters), "drafters ended with different weights"
    return losses
