"""The rivals' own drafters, losses and optimizers, from their installed packages, a training step a call.

speculators 0.9.0: `DFlashDraftModel.forward` (which computes the teacher's logits and the loss), fp32 weights under
bf16 autocast, gradients clipped to 1, `build_optimizers`, its schedule: what `speculators.train.trainer` runs on one
GPU. Its step is compiled by itself there and its loss needs Triton; on a CPU its own `sdpa` attention and `eager` loss
stand in. SpecForge 0.2.0: `OnlineDFlashModel` over `DFlashDraftModel` in bf16, `BF16Optimizer` (fp32 masters): what
its `FSDPTrainingBackend` runs unwrapped. Its flex attention has no backward on a CPU; `sdpa` stands in.

Nothing of theirs is copied: both are imported, and where one is absent the remedy is said. That the mapped weights give
the same drafter here is shown by rivals_check.py.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from draftsmith.drafter.layout import document_layout
from draftsmith.drafter.model import SLIDING, DrafterConfig
from draftsmith.evaluate.layout import expected_shapes, merge_weights
from draftsmith.records import FeatureBatch, FrozenEnds

INSTALL = {
    "speculators": "pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 datasets dill multiprocess xxhash "
    "pandas openai jiter sniffio distro httpx2 httpcore2 truststore pydantic pydantic-core annotated-types "
    "typing-inspection",
    "specforge": "pip install --no-deps specforge==0.2.0",
}


class RivalMissing(RuntimeError):
    """A rival that isn't installed, or lacks something it imports; says how to install it."""


def load(package: str, module: str) -> Any:
    """A module of a rival, imported only when it is asked for.

    Raises:
        RivalMissing: it, or something it imports, is absent.
    """
    try:
        # In a thread of its own: their packages keep errors of optional imports, whose tracebacks hold every frame
        # below, and with them the first rival and its batches on the GPU until the end.
        with ThreadPoolExecutor(1) as worker:
            return worker.submit(importlib.import_module, module).result()
    except ImportError as error:
        raise RivalMissing(f"{package} left out: {error}. Install it with: {INSTALL[package]}") from error


class Rival(Protocol):
    """One rival in training."""

    def step(self, batch: FeatureBatch) -> Tensor:
        """One optimizer step on a batch; the loss, on the device."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Its parameters under the names of `Drafter`."""
        ...


@dataclass(frozen=True, kw_only=True)
class SpeculatorsSettings:
    """The defaults are those of `speculators train --speculator-type dflash` 0.9.0 (speculators/train/config/schema.py:
    OptimizerArgs, SchedulerArgs, DFlashArgs, DataArgs and `_resolve_derived_defaults`)."""

    optimizer: str = "muon"
    lr: float = 1e-3
    """Of AdamW and, as there, of Muon."""
    weight_decay: float = 0.01
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.1
    muon_ns_steps: int = 5
    muon_adjust_lr_fn: str = "match_rms_adamw"
    loss: str = "ce"
    """Cross entropy to the argmax of the teacher's logits."""
    place_weights: str = "dpace"
    gamma: float = 4.0
    dpace_alpha: float = 0.5
    max_anchors: int = 512
    teacher: bool = True
    """False hands out logits made once where the teacher's head would be multiplied: the product alone is left out."""


@dataclass(frozen=True, kw_only=True)
class SpecForgeSettings:
    """The defaults are those of SpecForge 0.2.0 (specforge/config/schema.py: TrainingConfig)."""

    lr: float = 1e-4
    warmup: float = 0.015
    clip: float = 0.5
    num_anchors: int = 512
    """Per document: it draws them row by row."""
    gamma: float | None = None
    loss: str = "dflash"
    """dflash (cross entropy to the text, decaying by gamma where there is one) or dpace."""
    dpace_alpha: float = 0.5
    objective_chunk_blocks: int = 128


class GivenLogits(nn.Module):
    """Stands where speculators multiplies by the teacher's head, and hands out logits made once."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__()
        self.logits = torch.randn(1, rows, vocab_size, device=device, dtype=torch.bfloat16)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits


def qwen3_config(drafter: DrafterConfig, attention: str) -> Any:
    """The drafter's layers as both rivals describe them."""
    from transformers import Qwen3Config

    slides = SLIDING in drafter.layer_types
    config = Qwen3Config(
        vocab_size=drafter.vocab_size, hidden_size=drafter.hidden_size, intermediate_size=drafter.intermediate_size,
        num_hidden_layers=drafter.num_layers, num_attention_heads=drafter.num_heads,
        num_key_value_heads=drafter.num_kv_heads, head_dim=drafter.head_dim, rms_norm_eps=drafter.rms_norm_eps,
        max_position_embeddings=drafter.rope.max_positions, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", **drafter.rope.scaling, "rope_theta": drafter.rope.theta},
        layer_types=list(drafter.layer_types), use_sliding_window=slides,
        sliding_window=drafter.sliding_window if slides else None, pad_token_id=None,
    )  # fmt: skip
    config._attn_implementation = attention
    return config


def drafter_weights(drafter: DrafterConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that a z-lab drafter has, of a rival's `state_dict`, under the names of `Drafter`."""
    return merge_weights({name: state[name].detach() for name in expected_shapes(drafter)})


def leave_uncompiled(module: Any) -> None:
    """Call its fused losses from between compiled pieces of its step instead of inside one.

    Their two autotuned kernels share one list of configurations, which the compiler of torch 2.11 refuses as "already
    tracked for mutation"; its step would not start. The same kernels run either way.
    """
    for name, function in list(vars(module).items()):
        # Once only: another wrapper would make the next instance compile again.
        if name.startswith("fused_") and not getattr(function, "_torchdynamo_disable", False):
            setattr(module, name, torch.compiler.disable(function))


class Speculators:
    """speculators' DFlash model, loss, optimizers and schedule on one device.

    `final_norm_H` is the weight of the verifier's final norm, None where batches hold states that are normed already.
    """

    def __init__(
        self,
        drafter: DrafterConfig,
        ends: FrozenEnds,
        final_norm_H: Tensor | None,
        settings: SpeculatorsSettings,
        total_steps: int,
    ) -> None:
        core = load("speculators", "speculators.models.dflash.core")
        config_class = load("speculators", "speculators.models.dflash").DFlashSpeculatorConfig
        losses = load("speculators", "speculators.losses")
        self.drafter, self.settings, self.device = drafter, settings, ends.head_VH.device
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            leave_uncompiled(load("speculators", "speculators.losses.fused"))
        config = config_class(
            transformer_layer_config=qwen3_config(drafter, "simple_flex_attention" if on_gpu else "eager"),
            draft_vocab_size=drafter.vocab_size,
            block_size=drafter.block_size,
            aux_hidden_state_layer_ids=[tap + 1 for tap in drafter.taps],
            mask_token_id=drafter.mask_token_id,
            sliding_window_non_causal=False,
        )
        with self.device:
            self.model = core.DFlashDraftModel(config=config)
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(ends.embedding_VH)
            self.model.lm_head.weight.copy_(ends.head_VH)
            self.model.verifier_lm_head.weight.copy_(ends.head_VH)
            if final_norm_H is not None:
                self.model.verifier_norm.weight.copy_(final_norm_H)
        if final_norm_H is None:
            self.model.verifier_norm = nn.Identity()
        if not settings.teacher:
            rows = settings.max_anchors * drafter.block_size
            self.model.verifier_lm_head = GivenLogits(rows, drafter.vocab_size, self.device)
        self.call = {
            "loss_config": losses.resolve_loss_config(settings.loss, "fused" if on_gpu else "eager"),
            "gamma": settings.gamma,
            "max_anchors": settings.max_anchors,
            "per_position_loss_weight": settings.place_weights,
            "dpace_alpha": settings.dpace_alpha,
        }
        self.model.train()
        self.optimizers, self.schedulers = self._optimizers(total_steps)

    def _optimizers(self, total_steps: int) -> tuple[list[Any], list[Any]]:
        """As `Trainer.setup_optimizer`: linear, 1% of the steps to warm up."""
        from transformers import get_linear_schedule_with_warmup

        s = self.settings
        options = SimpleNamespace(
            optimizer=s.optimizer, lr=s.lr, weight_decay=s.weight_decay, muon_lr=s.lr, muon_momentum=s.muon_momentum,
            muon_weight_decay=s.muon_weight_decay, muon_ns_steps=s.muon_ns_steps,
            muon_adjust_lr_fn=s.muon_adjust_lr_fn,
        )  # fmt: skip
        optimizers = load("speculators", "speculators.train.optimizers").build_optimizers(self.model, options)
        warmup = total_steps // 100
        return optimizers, [get_linear_schedule_with_warmup(each, warmup, total_steps) for each in optimizers]

    def inputs(self, batch: FeatureBatch) -> dict[str, Tensor]:
        """What its loader would collate: every tensor with a batch dimension of 1, padding as document -1."""
        assert batch.last_hidden_TH is not None, "speculators reads the verifier's last hidden states"
        layout = document_layout(batch.lengths_D, batch.shape.num_tokens)
        return {
            "hidden_states": batch.features_TFH[None],
            "input_ids": batch.token_ids_T[None],
            "loss_mask": batch.loss_mask_T[None].long(),
            "verifier_last_hidden_states": batch.last_hidden_TH[None],
            "document_ids": layout.document_ids_T[None],
            "position_ids": layout.positions_T[None],
        }

    def step(self, batch: FeatureBatch) -> Tensor:
        with autocast(self.device):
            _, loss, _ = self.model(**self.inputs(batch), **self.call)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for each in (*self.optimizers, *self.schedulers):
            each.step()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        return drafter_weights(self.drafter, self.model.state_dict())


class SpecForge:
    """SpecForge's DFlash model, loss and optimizer on one device; a batch is rows of one document each."""

    def __init__(self, drafter: DrafterConfig, ends: FrozenEnds, settings: SpecForgeSettings, total_steps: int) -> None:
        family = load("specforge", "specforge.algorithms.common.dflash_family_model")
        model_class = load("specforge", "specforge.modeling.draft.dflash").DFlashDraftModel
        optimizer_class = load("specforge", "specforge.optimizer").BF16Optimizer
        self.drafter, self.settings, self.device = drafter, settings, ends.head_VH.device
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        attention = "flex_attention" if self.device.type == "cuda" else "sdpa"
        config = qwen3_config(drafter, attention)
        config.block_size, config.num_target_layers = drafter.block_size, drafter.num_target_layers
        config.dflash_config = {"target_layer_ids": list(drafter.taps), "mask_token_id": drafter.mask_token_id}
        with self.device:
            draft = model_class(config).to(dtype)
        self.model = family.OnlineDFlashModel(
            draft_model=draft,
            target_lm_head=frozen_head(ends.head_VH, dtype),
            target_embed_tokens=nn.Embedding.from_pretrained(ends.embedding_VH.to(dtype), freeze=True),
            mask_token_id=drafter.mask_token_id,
            block_size=drafter.block_size,
            attention_backend=attention,
            num_anchors=settings.num_anchors,
            loss_decay_gamma=settings.gamma,
            objective_chunk_blocks=settings.objective_chunk_blocks,
            loss_type=settings.loss,
            dpace_alpha=settings.dpace_alpha,
        )
        self.model.train()
        self.optimizer = optimizer_class(
            draft,
            lr=settings.lr,
            max_grad_norm=settings.clip,
            warmup_ratio=settings.warmup,
            total_steps=total_steps,
        )

    def step(self, batch: FeatureBatch) -> Tensor:
        """The whole batch as one unpacked document, as it has no document ids."""
        return self.step_rows(batch.token_ids_T[None], batch.features_TFH[None], batch.loss_mask_T[None])

    def step_rows(self, ids_RL: Tensor, features_RLF: Tensor, mask_RL: Tensor) -> Tensor:
        """One step on right-padded rows, a document each."""
        loss, _, _ = self.model(input_ids=ids_RL, hidden_states=features_RLF, loss_mask=mask_RL.float())
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        return drafter_weights(self.drafter, self.model.draft_model.state_dict())


def frozen_head(head_VH: Tensor, dtype: torch.dtype) -> nn.Linear:
    head = nn.Linear(head_VH.shape[1], head_VH.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(head_VH.to(dtype), requires_grad=False)
    return head


def autocast(device: torch.device) -> Any:
    """bf16 on a GPU, as its trainer does; plain fp32 on a CPU, where closeness is checked."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def rows_of(batch: FeatureBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The documents of a packed batch as right-padded rows: ids [D, L], features [D, L, F*H], loss mask [D, L]."""
    lengths = [length for length in batch.lengths_D.tolist() if length]
    longest = max(lengths)
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)

    def padded(tensor: Tensor) -> Tensor:
        out = tensor.new_zeros(len(lengths), longest, *tensor.shape[1:])
        for row, length in enumerate(lengths):
            out[row, :length] = tensor[bounds[row] : bounds[row + 1]]
        return out

    return padded(batch.token_ids_T), padded(batch.features_TFH), padded(batch.loss_mask_T)
