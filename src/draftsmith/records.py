"""What crosses the borders between stages, and the shape legend that all names use.

Legend (suffixes of tensor names):
    T  token budget of a batch (its fixed length)     D  most documents in a batch
    F  tapped target layers                           H  hidden width (target's and drafter's)
    V  vocabulary (rows of the target's embedding)    A  anchors drawn from a batch
    B  block size                                     Q  = A * B, drafted places of a batch
    N  parameters of the drafter, flat

A tapped layer id `l` means the *output* of decoder layer `l`, counted from 0 (Hugging Face: `hidden_states[l + 1]`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import CapacityError

EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What the drafter needs to know of a target, read from its resolved text config and modules."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding, which may exceed the tokenizer's length."""
    tokenizer_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any]
    """`rope_parameters` of the full-attention layers less theta and partial rotary; empty where plain."""
    max_positions: int
    layer_types: tuple[str, ...]
    """One of "full_attention", "sliding_attention", "linear_attention" per decoder layer."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    reserved_token_ids: tuple[int, ...]
    """Ids with an embedding row that the tokenizer never emits (candidates for the mask token), best first."""
    template_hash: str
    """SHA-256 of the chat template, "" where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenEnds:
    """The target's embedding and head as the drafter uses them: frozen, shared by reference, never saved.

    Logits are `soft_cap(logit_scale * (h @ head_VH.T + head_bias_V))`; a block token's embedding is
    `embedding_VH[id] * embedding_scale` (engines scale so when the exported config states it).
    """

    embedding_VH: Tensor
    head_VH: Tensor
    head_bias_V: Tensor | None = None
    logit_scale: float = 1.0
    soft_cap: float | None = None
    embedding_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One row of training data: token ids and which of them are supervised.

    Both 1-D, equal length, on the CPU: `token_ids` int64, `loss_mask` bool.
    """

    token_ids: Tensor
    loss_mask: Tensor

    @property
    def length(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """One right-padded forward of the target: `rows` x `length` tokens, row i holding document `documents[i]`.

    Fewer documents than rows leave dummy rows, so that the shape stays one of a few.
    """

    rows: int
    length: int
    documents: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One numbered FeatureBatch: its forwards in order; documents lie in it forward after forward, row after row."""

    number: int
    epoch: int
    forwards: tuple[ForwardPlan, ...]

    @property
    def documents(self) -> tuple[int, ...]:
        return tuple(document for forward in self.forwards for document in forward.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The one shape of every FeatureBatch of a run."""

    num_tokens: int
    """T, the token budget."""
    num_documents: int
    """D."""
    num_taps: int
    """F."""
    hidden_size: int
    """H."""
    dtype: torch.dtype
    """Of features and last hidden states."""
    last_hidden: bool
    """Whether the loss is distilled and the batch carries `last_hidden_TH`."""

    @property
    def num_bytes(self) -> int:
        width = self.num_taps + (1 if self.last_hidden else 0)
        return self.num_tokens * (width * self.hidden_size * self.dtype.itemsize + 8 + 1) + self.num_documents * 8 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureBatch:
    """Packed documents with the target's hidden states, in one fixed shape; allocated once, written by `copy_` only.

    Every batch writes every row: rows past `num_tokens` hold zeros, so that contents are always finite.

    `token_ids_T` int64 · `loss_mask_T` bool · `lengths_D` int64, zero-padded · `features_TFH` [T, F*H] ·
    `last_hidden_TH` [T, H], the output of the target's own final norm (what its head reads), or None ·
    `num_tokens` int64, 0-D.
    """

    shape: BatchShape
    token_ids_T: Tensor
    loss_mask_T: Tensor
    lengths_D: Tensor
    features_TFH: Tensor
    last_hidden_TH: Tensor | None
    num_tokens: Tensor

    @classmethod
    def allocate(cls, shape: BatchShape, device: torch.device | str, *, pin: bool = False) -> FeatureBatch:
        """Zeroed buffers on `device`; `pin` asks for page-locked host memory (device "cpu" only)."""

        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device, pin_memory=pin)

        T, H = shape.num_tokens, shape.hidden_size
        return cls(
            shape=shape,
            token_ids_T=zeros(T, dtype=torch.int64),
            loss_mask_T=zeros(T, dtype=torch.bool),
            lengths_D=zeros(shape.num_documents, dtype=torch.int64),
            features_TFH=zeros(T, shape.num_taps * H, dtype=shape.dtype),
            last_hidden_TH=zeros(T, H, dtype=shape.dtype) if shape.last_hidden else None,
            num_tokens=zeros(dtype=torch.int64),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The buffers by name, in a fixed order (what a ring copies, a channel sends and a graph guards)."""
        named = {
            "token_ids_T": self.token_ids_T,
            "loss_mask_T": self.loss_mask_T,
            "lengths_D": self.lengths_D,
            "features_TFH": self.features_TFH,
            "num_tokens": self.num_tokens,
        }
        if self.last_hidden_TH is not None:
            named["last_hidden_TH"] = self.last_hidden_TH
        return named

    def copy_(self, source: FeatureBatch, *, non_blocking: bool = False) -> None:
        """Overwrite every row with `source` of the same shape (the only way in)."""
        if source.shape != self.shape:
            raise CapacityError(f"a batch of shape {source.shape} can't be copied into buffers of shape {self.shape}")
        theirs = source.tensors()
        for name, buffer in self.tensors().items():
            buffer.copy_(theirs[name], non_blocking=non_blocking)


def check_capacity(lengths: list[int], shape: BatchShape) -> None:
    """Refuse documents that a batch of `shape` can't hold, naming both numbers.

    Raises:
        CapacityError: more tokens than T, more documents than D, or an empty document.
    """
    tokens = sum(lengths)
    if tokens > shape.num_tokens:
        raise CapacityError(
            f"{tokens} tokens don't fit a batch of {shape.num_tokens}: raise --token-budget or lower --max-length"
        )
    if len(lengths) > shape.num_documents:
        raise CapacityError(
            f"{len(lengths)} documents don't fit a batch of {shape.num_documents}: raise --max-documents"
        )
    if any(length < 1 for length in lengths):
        raise CapacityError("a document of 0 tokens can't be placed in a batch: skip it when preparing the data")
