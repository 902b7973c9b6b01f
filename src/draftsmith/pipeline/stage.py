"""A run with everything loaded and resolved, before its workers are built."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.markup import escape

from draftsmith.data.buckets import OrderConfig
from draftsmith.data.loader import BatchOrder
from draftsmith.data.onpolicy import OnPolicyConfig
from draftsmith.data.prepare import PrepareConfig
from draftsmith.drafter.model import Drafter, DrafterConfig
from draftsmith.drafter.objectives import LossConfig
from draftsmith.errors import CheckpointError, ConfigError
from draftsmith.pipeline.answers import answer_first
from draftsmith.pipeline.inputs import TrainingData, compute_dtype, context_id, load_data
from draftsmith.pipeline.placement import Placement, place
from draftsmith.pipeline.resolve import (
    Batching,
    Choices,
    Corpus,
    batch_shape,
    resolve_batching,
    resolve_draws,
    resolve_loss,
    resolve_step,
    start_layers,
)
from draftsmith.pipeline.settings import (
    AnswerOptions,
    BatchOptions,
    DataOptions,
    DrafterOptions,
    MeasureOptions,
    PipelineConfig,
)
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.store import Origin, StoreIndex, index_of, read_index
from draftsmith.records import BatchShape
from draftsmith.target.compute import check_fp8_device, slow_fallback
from draftsmith.target.light import load_light_target
from draftsmith.target.model import Target, TargetConfig, load_target
from draftsmith.train.build import StateSpec
from draftsmith.train.checkpoint import CheckpointConfig, RunRecord
from draftsmith.train.metrics import MetricsConfig
from draftsmith.train.optim import OptimConfig

CONFIG = "config.json"
"""In a run's folder: its RunConfig and what it resolved to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a person can say about a training run, by part."""

    out: str
    """The run's folder: log, checkpoints, drafter (for capture: the features' folder)."""
    target: TargetConfig
    data: DataOptions
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    loss: LossConfig = field(default_factory=LossConfig)
    batch: BatchOptions = field(default_factory=BatchOptions)
    optim: OptimConfig = field(default_factory=OptimConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    resume: Annotated[bool, tyro.conf.Suppress] = False
    """Continue the run in `out` from its newest checkpoint (the command line's --resume RUN)."""
    allow_changed: tuple[str, ...] = ()
    """With --resume: parts that may differ from the checkpoint (data, target, mask-token, architecture, objective)."""

    def __post_init__(self) -> None:
        if self.data.features and self.pipeline.colocate:
            raise ConfigError("with --features no target runs, so there is nothing to colocate: drop --colocate")
        if self.drafter.freeze_context and self.pipeline.feature_noise:
            raise ConfigError("--feature-noise is for features, and with --freeze-context none come: drop one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run's drafter begins."""

    config: DrafterConfig
    drafter: Drafter
    """First weights, fp32 on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Loaded before anything is chosen. `data` is None where features come from disk without conversations."""

    placement: Placement
    target: Target
    data: TrainingData | None
    store: tuple[Path, StoreIndex] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Everything resolved."""

    config: RunConfig
    run: Path
    console: Console
    inputs: Inputs
    start: Start
    batching: Batching
    shape: BatchShape
    state: StateSpec
    record: RunRecord
    stop: Stop

    @property
    def target(self) -> Target:
        return self.inputs.target

    @property
    def placement(self) -> Placement:
        return self.inputs.placement

    def order(self) -> BatchOrder | None:
        """The run's batches; None where features on disk decide them."""
        data = self.inputs.data
        if data is None or self.inputs.store is not None:
            return None
        return BatchOrder(data.train.lengths, self.batching.buckets, self.batching.order)

    def epoch_index(self, order: BatchOrder, data: TrainingData) -> StoreIndex:
        """What a capture of one epoch of this run holds."""
        origin = Origin(
            target=self.target.facts.name,
            taps=self.start.config.taps,
            data_fingerprint=data.fingerprint,
            num_supervised=data.num_supervised,
            context=context_id(self.start.drafter) if self.state.freeze_context else "",
        )
        return index_of(self.shape, order.num_batches(0), origin)


def dry_run_config(config: RunConfig, out: Path) -> RunConfig:
    """The same run cut to three steps, one checkpoint, one export and one short evaluation, in a folder of its own."""
    if config.resume:
        raise CheckpointError("--dry-run starts anew: drop --resume")
    return replace(
        config,
        out=str(out),
        batch=replace(config.batch, max_steps=3),
        checkpoint=replace(config.checkpoint, save_every=3),
        metrics=replace(config.metrics, log_every=1, wandb_project=""),
        measure=replace(config.measure, num_prompts=1, max_new_tokens=16, eval_every=0),
    )


def measures(config: RunConfig) -> bool:
    """Whether there is anything to measure drafters on, which takes a target that runs."""
    return bool(config.measure.prompts or config.data.data)


def load_inputs(
    config: RunConfig,
    run: Path | None,
    console: Console,
    placement: Placement | None = None,
    device: torch.device | None = None,
    is_whole: bool = True,
) -> Inputs:
    """The target, the conversations and the features on disk that a configuration names.

    `placement` and the target's `device` are chosen here unless a distributed run gives them. Where the target runs
    neither for features nor to measure (not `is_whole`), it is loaded without its body.
    """
    from_disk = bool(config.data.features)
    if placement is None:
        placement = place(config.pipeline, reads_features=from_disk)
        is_whole = not from_disk or measures(config)
    with console.status(f"loading target {escape(config.target.target)}"):
        where = device or placement.targets[0]
        if is_whole and config.target.target_compute == "fp8":
            check_fp8_device(where)
        if is_whole:
            target = load_target(config.target, where)
        else:
            target = load_light_target(config.target, lambda facts: start_layers(config.drafter, facts))
    if (remark := slow_fallback(target.facts)) and where.type == "cuda":
        console.print(f"[yellow]{escape(remark)}[/yellow]")
    data = _load_data(config, target, run, console) if config.data.data else None
    folder = Path(config.data.features)
    store = (folder, read_index(folder)) if from_disk else None
    return Inputs(placement=placement, target=target, data=data, store=store)


def _load_data(config: RunConfig, target: Target, run: Path | None, console: Console) -> TrainingData:
    """The conversations named, or the target's answers to them."""
    options, kwargs = config.data, dict(config.prepare.tokenize.template_kwargs)
    if config.answers.regenerate:
        options = answer_first(options, config.answers, kwargs, target, run, console)
    return load_data(options, config.prepare, target, run, console)


def resolve_stage(
    config: RunConfig, run: Path, console: Console, inputs: Inputs, start: Start, batching: Batching, choices: Choices
) -> Stage:
    """Choose what else was left open."""
    placement = inputs.placement
    loss = resolve_loss(config.loss, start.config.block_size, choices)
    dtype = compute_dtype(placement.on_gpu)
    frozen = config.drafter.freeze_context
    if frozen:
        choices.note("trained", "the layers", "fc and hidden_norm stay, as --freeze-context says")
    shape = batch_shape(batching, start.config, dtype, config.loss.distilled, frozen)
    if inputs.store is not None:
        _check_store(inputs.store, shape, start, frozen, inputs.target)
    state = StateSpec(
        loss=loss,
        step=resolve_step(config.pipeline, batching.num_anchors, placement.on_gpu, choices),
        optim=config.optim,
        total_steps=batching.total_steps,
        dtype=dtype,
        compiled=placement.on_gpu,
        freeze_context=frozen,
    )
    fingerprint = inputs.data.fingerprint if inputs.data is not None else ""
    if inputs.store is not None:
        fingerprint = inputs.store[1].data_fingerprint
    resolved = {
        **_pinned(config, inputs, start.config, loss.gamma),
        "data": fingerprint,
        "batching": asdict(batching),
    }
    return Stage(
        config=config,
        run=run,
        console=console,
        inputs=inputs,
        start=start,
        batching=batching,
        shape=shape,
        state=state,
        record=RunRecord(config=resolved, data_fingerprint=fingerprint),
        stop=Stop(),
    )


def choose_batching(config: RunConfig, inputs: Inputs, drafter: DrafterConfig, choices: Choices) -> Batching:
    """How much a step sees, and how many steps there are; from the data, or as captured features have it."""
    num_drafters = len(inputs.placement.drafters)
    if inputs.store is not None:
        index = inputs.store[1]
        choices.note("token budget", index.num_tokens, "as the features were captured")
        order = OrderConfig(token_budget=index.num_tokens, max_documents=index.num_documents, seed=config.batch.seed)
        corpus = Corpus(num_batches=index.num_batches, num_supervised=index.num_supervised)
        return resolve_draws(config.batch, drafter, order, (), corpus, num_drafters, choices)
    assert inputs.data is not None
    train, supervised = inputs.data.train, inputs.data.num_supervised
    on_gpu = inputs.placement.on_gpu
    return resolve_batching(config.batch, drafter, train.lengths, supervised, on_gpu, num_drafters, choices)


def _check_store(
    store: tuple[Path, StoreIndex], shape: BatchShape, start: Start, freeze_context: bool, target: Target
) -> None:
    folder, index = store
    drafter, context = start.config, context_id(start.drafter) if freeze_context else ""
    if index.context != context:
        theirs, needed = ("the context of a drafter" if kept else "features" for kept in (index.context, context))
        another = "another one's" if index.context and context else needed
        raise ConfigError(
            f"{folder} holds {theirs}, and this run needs {another}: capture again with the same --init-from and "
            "--freeze-context"
        )
    if index.shape != shape or index.taps != drafter.taps or index.target != target.facts.name:
        raise ConfigError(
            f"{folder} holds features of {index.target}, taps {list(index.taps)}, {index.dtype}, last hidden states "
            f"{index.last_hidden}; this run needs {target.facts.name}, {list(drafter.taps)}, {shape.dtype}, "
            f"{shape.last_hidden}: capture again with these settings"
        )


def _pinned(config: RunConfig, inputs: Inputs, drafter: DrafterConfig, gamma: float) -> dict[str, Any]:
    """What a checkpoint pins down, by the names that a resume compares."""
    facts = inputs.target.facts
    alpha = config.loss.dpace_alpha if config.loss.weights == "dpace" else None
    # Only where it is, so that runs from before there was a choice go on.
    context = {"context": "frozen"} if config.drafter.freeze_context else {}
    return {
        "target": {"name": facts.name, "template": facts.template_hash, "adapter": config.target.adapter},
        "mask-token": drafter.mask_token_id,
        "architecture": json.loads(json.dumps(asdict(drafter), default=dict)),
        "objective": {"loss": config.loss.loss, "weights": config.loss.weights, "gamma": gamma, "alpha": alpha}
        | context,
        "gpus": inputs.placement.describe(),
        "threads": torch.get_num_threads(),
    }
