"""What bench/quality.py trains: features captured once, and each system's own step over them.

Settings of the rivals, by system name:

    speculators        its defaults (speculators 0.9.0, train/config/schema.py): Muon, 1e-3 throughout, linear schedule
                       with 1% warm-up, cross entropy to the teacher's argmax, D-PACE, 512 anchors in 8,192 packed
                       tokens, every layer sliding over 2,048 tokens and causal inside the block.
    speculators-best   its repository's recipe for quality (examples/train/dflash_*_bestpractices.sh, not in the wheel):
                       the same with 3,072 anchors and 3e-4; and full attention, both ways inside the block
                       (`--full-attention-indices` of all layers), as the paper has it.
    specforge          its defaults (SpecForge 0.2.0, config/schema.py): AdamW, 1e-4, cosine with 1.5% warm-up, clip
                       0.5, cross entropy to the text without decay, 512 anchors a document, one document a step.
    specforge-best     its repository's DFlash configs (examples/configs/**/qwen3-8b-dflash*.yaml, not in the wheel):
                       6e-4, 4% warm-up, clip 1, decay (gamma 7 there for blocks of 16; the paper's 4 for 8), 4 ranks of
                       4 documents: 16 a step.

Layers, block size, taps and mask token are the same for all, and so are the features. Their loaders and transports
are not run: batches are gathered from device memory, as ours are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from rivals import SpecForge, SpecForgeSettings, Speculators, SpeculatorsSettings
from torch import Tensor

from draftsmith.data.buckets import OrderConfig, choose_buckets
from draftsmith.data.loader import BatchOrder
from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.drafter.loss import LossSpec
from draftsmith.drafter.model import SLIDING, Drafter, DrafterConfig
from draftsmith.drafter.objectives import LossConfig, resolve_gamma
from draftsmith.pipeline.inputs import compute_dtype, start_drafter
from draftsmith.pipeline.resolve import Choices, resolve_batching, resolve_drafter, resolve_init
from draftsmith.pipeline.settings import BatchOptions, DrafterOptions
from draftsmith.records import BatchShape, Document, FeatureBatch, FrozenEnds
from draftsmith.target.capture import PackedCapture
from draftsmith.target.model import Target
from draftsmith.target.taps import default_taps
from draftsmith.train.build import StateSpec, build_state
from draftsmith.train.graph import CapturedStep, PlainStep, StepInputs
from draftsmith.train.optim import OptimConfig
from draftsmith.train.step import StepConfig

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


def to_device(values: np.ndarray) -> Tensor:
    """An index on the device, without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(DEVICE, non_blocking=True) if ON_GPU else tensor


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Every document with its features, flat on the device: document d has the rows from `starts[d]` on.

    `features_NF` [N, F*H], `last_hidden_NH` (behind the target's final norm; None where nobody reads it),
    `token_ids_N`, `loss_mask_N`.
    """

    token_ids_N: Tensor
    loss_mask_N: Tensor
    features_NF: Tensor
    last_hidden_NH: Tensor | None
    starts: np.ndarray
    lengths: list[int]
    num_supervised: int

    def _index(self, documents: Sequence[int]) -> Tensor:
        return to_device(
            np.concatenate([np.arange(self.starts[d], self.starts[d] + self.lengths[d]) for d in documents])
        )

    def pack(self, documents: Sequence[int], batch: FeatureBatch) -> None:
        """Write `documents` into a batch of fixed shape, every row of it."""
        index = self._index(documents)
        used = index.numel()
        lengths = np.zeros(batch.shape.num_documents, dtype=np.int64)
        lengths[: len(documents)] = [self.lengths[d] for d in documents]
        batch.lengths_D.copy_(to_device(lengths))
        batch.num_tokens.fill_(used)
        pairs = [(batch.token_ids_T, self.token_ids_N), (batch.loss_mask_T, self.loss_mask_N)]
        pairs.append((batch.features_TFH, self.features_NF))
        if batch.last_hidden_TH is not None:
            assert self.last_hidden_NH is not None, "captured without last hidden states"
            pairs.append((batch.last_hidden_TH, self.last_hidden_NH))
        for buffer, source in pairs:
            torch.index_select(source, 0, index, out=buffer[:used])
            buffer[used:].zero_()

    def rows(self, documents: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The documents right-padded to their longest: ids [R, L], features [R, L, F*H], loss mask [R, L]."""
        longest = max(self.lengths[d] for d in documents)
        place = np.arange(longest)
        inside = to_device(place < np.asarray([[self.lengths[d]] for d in documents]))
        index = np.asarray([[self.starts[d]] for d in documents]) + place
        picked = to_device(np.minimum(index, self.token_ids_N.numel() - 1))
        features = self.features_NF[picked] * inside[..., None]
        return self.token_ids_N[picked] * inside, features, self.loss_mask_N[picked] & inside


@torch.no_grad()
def capture_corpus(
    target: Target, documents: Sequence[Document], taps: Sequence[int] = (), *, last_hidden: bool = True
) -> Corpus:
    """Run the target once over all documents; large forwards, since nothing waits for the first batch."""
    lengths, taps = [document.length for document in documents], taps or default_taps(target.facts.num_layers)
    budget, total = max(65_536 if ON_GPU else 512, *lengths), sum(lengths)
    order = OrderConfig(token_budget=budget, max_documents=2048, forwards_per_batch=2)
    batches = BatchOrder(lengths, choose_buckets(lengths, 8, 32), order)
    hidden, dtype = target.facts.hidden_size, compute_dtype(ON_GPU)
    shape = BatchShape(
        num_tokens=budget, num_documents=2048, num_taps=len(taps), hidden_size=hidden, dtype=dtype,
        last_hidden=last_hidden,
    )  # fmt: skip
    corpus = Corpus(
        token_ids_N=torch.zeros(total, dtype=torch.int64, device=DEVICE),
        loss_mask_N=torch.zeros(total, dtype=torch.bool, device=DEVICE),
        features_NF=torch.zeros(total, len(taps) * hidden, dtype=dtype, device=DEVICE),
        last_hidden_NH=torch.zeros(total, hidden, dtype=dtype, device=DEVICE) if last_hidden else None,
        starts=np.zeros(len(lengths), dtype=np.int64),
        lengths=lengths,
        num_supervised=sum(int(document.loss_mask.sum()) for document in documents),
    )
    offset = 0
    with PackedCapture(target, taps, shape) as capture:
        for number in range(batches.num_batches(0)):
            plan = batches.batch(number)
            batch = capture.run(plan, documents)
            first = offset
            for document in plan.documents:
                corpus.starts[document] = offset
                offset += lengths[document]
            used = offset - first
            corpus.token_ids_N[first:offset] = batch.token_ids_T[:used]
            corpus.loss_mask_N[first:offset] = batch.loss_mask_T[:used]
            corpus.features_NF[first:offset] = batch.features_TFH[:used]
            if corpus.last_hidden_NH is not None and batch.last_hidden_TH is not None:
                corpus.last_hidden_NH[first:offset] = batch.last_hidden_TH[:used]
    return corpus


@dataclass(frozen=True, kw_only=True)
class OursSettings:
    """draftsmith's own choices; 0 leaves one to what `draftsmith train` would choose."""

    loss: str = LossConfig().loss
    weights: str = LossConfig().weights
    init: str = DrafterOptions().init
    lr: float = OptimConfig().lr
    schedule: str = OptimConfig().schedule
    clip: float = OptimConfig().clip
    draws: int = 0
    anchors: int = 0
    tokens: int = 0
    labels_per_token: float = BatchOptions.__dataclass_fields__["labels_per_token"].default
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SpeculatorsRun:
    """Beside its settings: packed tokens of a step, and the window of its layers (0: full attention)."""

    tokens: int = 8192
    window: int = 2048


@dataclass(frozen=True, kw_only=True)
class SpecForgeRun:
    """Beside its settings: documents of a step."""

    documents: int = 1


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of the table."""

    name: str
    system: str
    layers: int
    block: int
    parts: tuple[Any, ...]

    @property
    def reads_last_hidden(self) -> bool:
        """Whether its step needs the target's last hidden states: speculators' does, ours only to distil."""
        if self.system == "draftsmith":
            return LossConfig(loss=self.parts[0].loss).distilled
        return self.system == "speculators"


PRESETS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "draftsmith": ("draftsmith", (OursSettings(),)),
    "speculators": ("speculators", (SpeculatorsRun(), SpeculatorsSettings())),
    "speculators-best": ("speculators", (SpeculatorsRun(window=0), SpeculatorsSettings(max_anchors=3072, lr=3e-4))),
    "specforge": ("specforge", (SpecForgeRun(), SpecForgeSettings())),
    "specforge-best": (
        "specforge",
        (SpecForgeRun(documents=16), SpecForgeSettings(lr=6e-4, warmup=0.04, clip=1.0, gamma=4.0)),
    ),
}


def make_variant(name: str, preset: str, options: Mapping[str, str], layers: int, block: int) -> Variant:
    """A preset with some of its settings replaced; `layers` and `block` are among them.

    Raises:
        SystemExit: a setting that the system doesn't have, or none of that name.
    """
    if preset not in PRESETS:
        raise SystemExit(f"variant {name}: no system {preset}; there are {', '.join(PRESETS)}")
    system, parts = PRESETS[preset]
    left = dict(options)
    layers, block = int(left.pop("layers", layers)), int(left.pop("block", block))
    changed: list[Any] = []
    for part in parts:
        known = {field.name: getattr(part, field.name) for field in fields(part)}
        mine = {key: left.pop(key) for key in known.keys() & left.keys()}
        changed.append(replace(part, **{key: as_like(known[key], text) for key, text in mine.items()}))
    if left:
        raise SystemExit(f"variant {name}: {system} has no setting {', '.join(left)}")
    return Variant(name=name, system=system, layers=layers, block=block, parts=tuple(changed))


def as_like(value: Any, text: str) -> Any:
    if isinstance(value, bool):
        return text.lower() in ("1", "true", "yes")
    return float(text) if value is None else type(value)(text)


class Contender(Protocol):
    """One system in training: `step` returns the loss where it has one (ours keeps its sums on the device)."""

    config: DrafterConfig

    def step(self) -> None: ...

    def weights(self) -> dict[str, Tensor]: ...

    def facts(self) -> dict[str, Any]: ...


def drafter_config(variant: Variant, target: Target, window: int = 0) -> DrafterConfig:
    options = DrafterOptions(layers=variant.layers, block_size=variant.block)
    config = resolve_drafter(options, target.facts, Choices())
    return replace(config, layer_types=(SLIDING,) * variant.layers, sliding_window=window) if window else config


class Ours:
    """draftsmith's step, captured on a GPU, with what `draftsmith train` chooses for this corpus."""

    def __init__(self, variant: Variant, target: Target, corpus: Corpus, seed: int, total_steps: int) -> None:
        (settings,) = cast(tuple[OursSettings], variant.parts)
        self.config, self.corpus, self.seed, self.count = self.choose(variant, target), corpus, seed, 0
        self.total_steps = total_steps
        options = BatchOptions(
            seed=seed, labels_per_token=settings.labels_per_token, anchors=settings.anchors or "auto",
            draws_per_batch=settings.draws or "auto", token_budget=settings.tokens or "auto",
        )  # fmt: skip
        self.batching = resolve_batching(
            options, self.config, corpus.lengths, corpus.num_supervised, ON_GPU, 1, Choices()
        )
        self.order = BatchOrder(corpus.lengths, self.batching.buckets, self.batching.order)
        loss = LossConfig(loss=cast(Any, settings.loss), weights=cast(Any, settings.weights))
        drafter = self.start(settings, target, seed)
        spec = StateSpec(
            loss=LossSpec(config=loss, gamma=resolve_gamma(loss, variant.block), block_size=variant.block),
            step=StepConfig(
                num_anchors=self.batching.num_anchors,
                attention="flex" if ON_GPU else "dense",
                feature_noise=settings.noise,
            ),
            optim=OptimConfig(lr=settings.lr, schedule=cast(Any, settings.schedule), clip=settings.clip),
            total_steps=total_steps,
            dtype=compute_dtype(ON_GPU),
            compiled=ON_GPU,
        )
        self.state = build_state(drafter, target.ends(), spec, DEVICE)
        shape = BatchShape(
            num_tokens=self.batching.order.token_budget, num_documents=self.batching.order.max_documents,
            num_taps=len(self.config.taps), hidden_size=self.config.hidden_size, dtype=compute_dtype(ON_GPU),
            last_hidden=loss.distilled,
        )  # fmt: skip
        self.inputs = StepInputs.allocate(shape, variant.block, DEVICE)
        if ON_GPU:
            self.stepper: Any = CapturedStep(self.state, self.inputs, torch.cuda.current_stream())
        else:
            self.stepper = PlainStep(self.state, self.inputs)

    def choose(self, variant: Variant, target: Target) -> DrafterConfig:
        return drafter_config(variant, target)

    def start(self, settings: OursSettings, target: Target, seed: int) -> Drafter:
        init = resolve_init(cast(Any, settings.init), self.total_steps, Choices())
        return start_drafter(self.config, init, target, seed, lambda line: None)

    def step(self) -> None:
        self.accumulate()
        self.stepper.update()
        self.count += 1

    def accumulate(self) -> None:
        number, draw = divmod(self.count, self.batching.draws_per_batch)
        if draw == 0:
            self.corpus.pack(self.order.batch(number).documents, self.inputs.batch)
        uniforms = draw_uniforms(self.seed, number, draw, self.inputs.uniforms_T.numel())
        self.inputs.uniforms_T.copy_(uniforms.pin_memory() if ON_GPU else uniforms, non_blocking=True)
        self.stepper.accumulate()

    def weights(self) -> dict[str, Tensor]:
        flat = self.state.parameters
        return {piece.name: piece.view(flat.master_N).detach() for piece in flat.slices}

    def facts(self) -> dict[str, Any]:
        return {
            "tokens": self.inputs.batch.shape.num_tokens,
            "anchors": self.batching.num_anchors,
            "draws": self.batching.draws_per_batch,
            "epochs": self.count / self.batching.draws_per_batch / self.order.num_batches(0),
        }


class SpeculatorsContender:
    """speculators' step over packed batches of its own size."""

    def __init__(self, variant: Variant, target: Target, corpus: Corpus, seed: int, total_steps: int) -> None:
        run, settings = cast(tuple[SpeculatorsRun, SpeculatorsSettings], variant.parts)
        self.config, self.corpus, self.run, self.count = drafter_config(variant, target, run.window), corpus, run, 0
        self.anchors = settings.max_anchors
        torch.manual_seed(seed)
        self.rival = Speculators(self.config, device_ends(target), None, settings, total_steps)
        order = OrderConfig(token_budget=max(run.tokens, *corpus.lengths), max_documents=256, seed=seed)
        self.order = BatchOrder(corpus.lengths, choose_buckets(corpus.lengths), order)
        shape = BatchShape(
            num_tokens=order.token_budget, num_documents=256, num_taps=len(self.config.taps),
            hidden_size=self.config.hidden_size, dtype=compute_dtype(ON_GPU), last_hidden=True,
        )  # fmt: skip
        self.batch = FeatureBatch.allocate(shape, DEVICE)

    def step(self) -> None:
        self.corpus.pack(self.order.batch(self.count).documents, self.batch)
        self.rival.step(self.batch)
        self.count += 1

    def weights(self) -> dict[str, Tensor]:
        return self.rival.weights()

    def facts(self) -> dict[str, Any]:
        epochs = self.count / self.order.num_batches(0)
        return {"tokens": self.batch.shape.num_tokens, "anchors": self.anchors, "draws": 1, "epochs": epochs}


class SpecForgeContender:
    """SpecForge's step over padded rows of one document each, in random order."""

    def __init__(self, variant: Variant, target: Target, corpus: Corpus, seed: int, total_steps: int) -> None:
        run, settings = cast(tuple[SpecForgeRun, SpecForgeSettings], variant.parts)
        self.config, self.corpus, self.run, self.count = drafter_config(variant, target), corpus, run, 0
        self.anchors = settings.num_anchors
        torch.manual_seed(seed)
        self.rival = SpecForge(self.config, device_ends(target), settings, total_steps)
        # It leaves out documents without two supervised tokens in a row, which it can't draw an anchor from.
        mask = corpus.loss_mask_N.cpu().numpy()
        pairs = [mask[start : start + length] for start, length in zip(corpus.starts, corpus.lengths, strict=True)]
        self.usable = np.asarray([d for d, one in enumerate(pairs) if bool((one[:-1] & one[1:]).any())])
        self.generator, self.queue = np.random.default_rng(seed), np.zeros(0, dtype=np.int64)

    def step(self) -> None:
        while self.queue.size < self.run.documents:
            self.queue = np.concatenate([self.queue, self.generator.permutation(self.usable)])
        chosen, self.queue = self.queue[: self.run.documents], self.queue[self.run.documents :]
        self.rival.step_rows(*self.corpus.rows([int(document) for document in chosen]))
        self.count += 1

    def weights(self) -> dict[str, Tensor]:
        return self.rival.weights()

    def facts(self) -> dict[str, Any]:
        epochs = self.count * self.run.documents / len(self.usable)
        return {"documents": self.run.documents, "anchors": self.anchors, "draws": 1, "epochs": epochs}


def device_ends(target: Target) -> FrozenEnds:
    ends = target.ends()
    plain = ends.logit_scale == 1.0 and ends.soft_cap is None and ends.embedding_scale == 1.0
    assert plain, "the rivals know neither scaled embeddings nor scaled heads"
    assert ends.head_bias_V is None, "the rivals know no bias of the head"
    return ends


CONTENDERS = {"draftsmith": Ours, "speculators": SpeculatorsContender, "specforge": SpecForgeContender}
