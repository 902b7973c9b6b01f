"""Hidden states of the frozen target, written by hooks straight into a FeatureBatch of fixed shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from draftsmith.errors import CapacityError, DataError, TargetError
from draftsmith.records import BatchPlan, BatchShape, Document, FeatureBatch, ForwardPlan, check_capacity
from draftsmith.target.anatomy import first_tensor
from draftsmith.target.model import Target, cut_after
from draftsmith.target.taps import check_taps

Context = Callable[[Tensor], Tensor]
"""What a drafter makes of features [T, F*H]: [T, H]."""
PAD_ID = 0
"""Fills places right of a document: any valid id does, since no earlier token sees it and the hooks drop its states."""


class HookCapture:
    """Forward hooks that write tapped layers (and the final norm) into rows of given buffers.

    Buffers have T + 1 rows: the last is scratch, where padded positions of a forward are sent, so that every write is
    one `index_copy_` whose shape depends only on the forward's [rows, length]. Hidden states are cast to the buffers'
    dtype on the way. Use as a context manager, or `close()` it: hooks stay on the model until then.
    """

    def __init__(self, target: Target, taps: Sequence[int], features_TFH: Tensor, last_hidden_TH: Tensor | None = None):
        if torch.float16 in (features_TFH.dtype, None if last_hidden_TH is None else last_hidden_TH.dtype):
            raise TargetError(
                "features can't be kept in float16, which outliers of some targets overflow: use bfloat16 or float32"
            )
        check_taps(taps, target.facts)
        self._rows_N: Tensor | None = None
        hidden = target.facts.hidden_size
        self._handles = [
            target.layers[tap].register_forward_hook(self._writer(features_TFH[:, i * hidden : (i + 1) * hidden]))
            for i, tap in enumerate(taps)
        ]
        if last_hidden_TH is not None:
            self._handles.append(target.final_norm.register_forward_hook(self._writer(last_hidden_TH)))

    def aim(self, rows_N: Tensor | None) -> None:
        """Row of the buffers for each position of the next forward, row-major over [rows, length]; None writes none."""
        self._rows_N = rows_N

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _writer(self, buffer_TH: Tensor) -> Callable[[nn.Module, Any, Any], None]:
        def write(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._rows_N is None:
                return
            hidden_NH = first_tensor(output).reshape(-1, buffer_TH.shape[1])
            buffer_TH.index_copy_(0, self._rows_N, hidden_NH.to(buffer_TH.device, buffer_TH.dtype))

        return write


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """One right-padded forward, on the target's device."""

    token_ids_RL: Tensor
    rows_N: Tensor


class PackedCapture:
    """The staging FeatureBatch of one target and the frozen forwards that fill it.

    Owns its buffers, on the target's device, for its whole life and returns the same ones from every `run`: copy them
    before the next. One thread uses it. Nothing in `run` waits for the device; `check()` does, on request.

    With a `context`, a function of features [T, F*H], the batch carries what it returns [T, H] in their place.
    """

    def __init__(self, target: Target, taps: Sequence[int], shape: BatchShape, context: Context | None = None):
        if shape.num_taps != (len(taps) if context is None else 1) or shape.hidden_size != target.facts.hidden_size:
            raise TargetError(
                f"a batch of {shape.num_taps} taps x {shape.hidden_size} doesn't fit taps {list(taps)} of "
                f"{target.facts.name} (hidden {target.facts.hidden_size}): give the features' own --target and taps"
            )
        self.target, self.taps, self.shape, self._context = target, tuple(taps), shape, context
        self.device = target.device
        # One row more than T everywhere: the last is where the hooks drop padded positions.
        wide = replace(shape, num_tokens=shape.num_tokens + 1, num_taps=len(taps))
        whole = FeatureBatch.allocate(wide, target.device)
        self._hooks = HookCapture(target, taps, whole.features_TFH, whole.last_hidden_TH)
        T = shape.num_tokens
        self._features_TFH = whole.features_TFH[:T]
        self.batch = replace(
            whole,
            shape=shape,
            token_ids_T=whole.token_ids_T[:T],
            loss_mask_T=whole.loss_mask_T[:T],
            features_TFH=self._features_TFH
            if context is None
            else torch.zeros_like(whole.features_TFH[:T, : shape.hidden_size]),
            last_hidden_TH=None if whole.last_hidden_TH is None else whole.last_hidden_TH[:T],
        )

    def close(self) -> None:
        """Take the hooks off the target; the buffers stay readable."""
        self._hooks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @torch.no_grad()
    def run(self, plan: BatchPlan, documents: Sequence[Document]) -> FeatureBatch:
        """The plan's documents, packed in plan order, with their hidden states; every row of the batch is written.

        `documents` is indexed by the plan's document numbers. Not `inference_mode`: its tensors can't be saved for a
        drafter's backward. `no_grad` holds for the calling thread only, so each worker enters it here.

        Raises:
            CapacityError: more tokens than T, more documents than D, more than a forward's rows or length.
            DataError: a token id that the target's vocabulary lacks.
        """
        packed = [documents[number] for number in plan.documents]
        lengths = [document.length for document in packed]
        check_capacity(lengths, self.shape)
        self._write_layout(packed, lengths)
        offset = 0
        cut = nullcontext() if self.shape.last_hidden else cut_after(self.target, self.taps[-1])
        with cut:
            for forward in plan.forwards:
                offset = self._forward(forward, documents, offset)
        self._features_TFH[offset:].zero_()
        if self._context is not None:
            self.batch.features_TFH.copy_(self._context(self._features_TFH))
        if self.batch.last_hidden_TH is not None:
            self.batch.last_hidden_TH[offset:].zero_()
        return self.batch

    def check(self, documents: Sequence[Document]) -> None:
        """Refuse non-finite or all-zero features in the batch last run, whose packed `documents` are given.

        Waits for the device: for the start of a run and for tests, not for every batch.

        Raises:
            TargetError: naming the first such document, its token and tap.
        """
        T = sum(document.length for document in documents)
        parts_TFH = self._features_TFH[:T].view(T, len(self.taps), self.shape.hidden_size)
        bad_TF = ~parts_TFH.isfinite().all(2) | (parts_TFH == 0).all(2)
        if not bool(bad_TF.any()):
            return
        # The shallowest layer first: from there on attention spreads a NaN to rows that never saw its token.
        tap, row = divmod(int(bad_TF.t().flatten().int().argmax()), T)
        start = 0
        for number, document in enumerate(documents):
            if row < start + document.length:
                raise TargetError(
                    f"document {number} of the batch has non-finite or all-zero features at token {row - start}, layer "
                    f"{self.taps[tap]} of {self.target.facts.name}: try --dtype float32, or another --target"
                )
            start += document.length

    def _write_layout(self, packed: Sequence[Document], lengths: Sequence[int]) -> None:
        T, D, total = self.shape.num_tokens, self.shape.num_documents, sum(lengths)
        token_ids_T = torch.zeros(T, dtype=torch.int64)
        loss_mask_T = torch.zeros(T, dtype=torch.bool)
        lengths_D = torch.zeros(D, dtype=torch.int64)
        if packed:
            torch.cat([document.token_ids for document in packed], out=token_ids_T[:total])
            torch.cat([document.loss_mask for document in packed], out=loss_mask_T[:total])
            lengths_D[: len(lengths)] = torch.tensor(lengths)
            low, high, rows = int(token_ids_T.min()), int(token_ids_T.max()), self.target.facts.vocab_size
            if low < 0 or high >= rows:
                raise DataError(
                    f"token ids {low}..{high} don't exist in {self.target.facts.name}, which has {rows}: "
                    "prepare the data with this target"
                )
        self.batch.token_ids_T.copy_(upload(token_ids_T, self.device), non_blocking=True)
        self.batch.loss_mask_T.copy_(upload(loss_mask_T, self.device), non_blocking=True)
        self.batch.lengths_D.copy_(upload(lengths_D, self.device), non_blocking=True)
        self.batch.num_tokens.fill_(total)

    def _forward(self, plan: ForwardPlan, documents: Sequence[Document], offset: int) -> int:
        """Run one forward and let the hooks write from row `offset` on; the row after its last document."""
        chosen = [documents[number] for number in plan.documents]
        longest = max((document.length for document in chosen), default=0)
        if longest > plan.length or len(chosen) > plan.rows:
            raise CapacityError(
                f"{len(chosen)} documents of up to {longest} tokens don't fit a forward of {plan.rows} x "
                f"{plan.length}: plan the batch again from the documents' own lengths"
            )
        token_ids_RL = torch.full((plan.rows, plan.length), PAD_ID, dtype=torch.int64)
        rows_RL = torch.full((plan.rows, plan.length), self.shape.num_tokens, dtype=torch.int64)
        for i, document in enumerate(chosen):
            length = document.length
            token_ids_RL[i, :length] = document.token_ids
            rows_RL[i, :length] = torch.arange(offset, offset + length)
            offset += length
        self._hooks.aim(upload(rows_RL.view(-1), self.device))
        run_backbone(self.target, upload(token_ids_RL, self.target.device))
        self._hooks.aim(None)
        return offset


def run_backbone(target: Target, token_ids_RL: Tensor) -> Tensor:
    """Last hidden states [rows, length, H] of right-padded rows, without the head.

    No attention mask: each row is plain causal from its first place, so that attention keeps its fast path, and what
    pads a row on the right reaches no earlier token (in linear attention neither, whose state also runs left to right).
    """
    backbone: Any = target.anatomy.backbone
    return backbone(input_ids=token_ids_RL, use_cache=False).last_hidden_state


def upload(source: Tensor, device: torch.device) -> Tensor:
    """`source` on `device` without waiting: through pinned memory, which its allocator keeps until it has been read."""
    return source if device.type == "cpu" else source.pin_memory().to(device, non_blocking=True)


def reference_plan(documents: Sequence[Document]) -> BatchPlan:
    """One forward per document, without any padding: the exact-size plan."""
    forwards = tuple(ForwardPlan(rows=1, length=d.length, documents=(i,)) for i, d in enumerate(documents))
    return BatchPlan(number=0, epoch=0, forwards=forwards)


def get_hidden_states_packed(
    target: Target,
    documents: Sequence[Document],
    taps: Sequence[int],
    *,
    pad_to: int | None = None,
    last_hidden: bool = False,
) -> FeatureBatch:
    """Packed documents with their hidden states in fresh buffers: the exact-size reference of the fixed-shape path.

    `pad_to` None gives T = the documents' own tokens, run one by one; an int gives the fixed shape of that many
    tokens, run as one right-padded forward, its rows past the documents zero.

    Raises:
        CapacityError: more tokens than `pad_to`.
        TargetError: taps that the target lacks.
    """
    lengths = [document.length for document in documents]
    shape = BatchShape(
        num_tokens=sum(lengths) if pad_to is None else pad_to,
        num_documents=max(1, len(documents)),
        num_taps=len(taps),
        hidden_size=target.facts.hidden_size,
        dtype=target.ends().embedding_VH.dtype,
        last_hidden=last_hidden,
    )
    check_capacity(lengths, shape)
    plan = reference_plan(documents)
    if pad_to is not None and documents:
        padded = ForwardPlan(rows=len(documents), length=max(lengths), documents=tuple(range(len(documents))))
        plan = BatchPlan(number=0, epoch=0, forwards=(padded,))
    with PackedCapture(target, taps, shape) as capture:
        return capture.run(plan, documents)
