"""Greedy draft-verify decoding of many prompts at once, for GPUs: the same tokens and steps as batch 1.

How rows of different lengths keep their positions. Prompts are padded on the left; every row carries its own position
ids. A verify step appends one block to the target's cache for all rows alike; slots of a row's rejected tokens stay
behind as holes that its attention mask hides, and only what no row kept is cropped. Slots of a row lie in the order of
its positions, so index-causal attention with holes is causal attention. That holds for full attention only: targets
with sliding windows or recurrent state are decoded one by one. The drafter packs all rows' positions into one context,
each slot naming its row. Answered rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafter.model import Drafter
from draftsmith.evaluate.decode import Decoded, DecodeLimits, VerifyStep, check_prompt, decode, now
from draftsmith.evaluate.drafting import Blocks, DraftContext, Slots
from draftsmith.evaluate.stepper import Stepper, TapHooks
from draftsmith.records import FrozenEnds
from draftsmith.target.model import Target


@dataclass(slots=True, kw_only=True)
class Row:
    """One prompt being answered. `number` is its place in the caller's list and its row of the drafter's context."""

    number: int
    length: int
    """Positions committed on both sides; the last token of `answer` is not among them."""
    answer: list[int]
    steps: list[VerifyStep] = field(default_factory=list[VerifyStep])
    done: bool = False


class BatchStepper:
    """The target's side: one cache for all rows, and the mask of its slots [rows, slots]."""

    def __init__(self, target: Target):
        from transformers import DynamicCache  # a model that runs has long imported it; a plan never does

        self._target = target
        self._cache: Any = DynamicCache(config=target.model.config)
        self._mask_RS = torch.zeros(0, 0, dtype=torch.int64, device=target.device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """First tokens [rows], and which slots hold prompt tokens [rows, longest]."""
        longest = max(len(prompt) for prompt in prompts)
        ids_RL = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask_RL = torch.zeros_like(ids_RL)
        for row, prompt in enumerate(prompts):
            ids_RL[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask_RL[row, longest - len(prompt) :] = 1
        self._mask_RS = mask_RL.to(self._target.device)
        logits = self._forward(ids_RL, (mask_RL.cumsum(1) - 1).clamp(min=0), keep=1)
        return logits[:, -1].argmax(-1), self._mask_RS.bool()

    def run(self, block_RB: Tensor, lengths_R: Tensor) -> Tensor:
        """The target's choices [rows, size] after each token of a block that starts at each row's own position."""
        size = block_RB.shape[1]
        self._mask_RS = torch.cat([self._mask_RS, torch.ones_like(block_RB, device=self._target.device)], dim=1)
        return self._forward(block_RB, lengths_R[:, None] + torch.arange(size), keep=0).argmax(-1)

    def commit(self, kept_R: Tensor, size: int) -> None:
        """Of the last block, row r keeps its first `kept_R[r]` tokens: the rest turns into holes, or is cropped."""
        most = int(kept_R.max())
        place = torch.arange(size, device=self._mask_RS.device)
        self._mask_RS[:, -size:] = (place < kept_R.to(place.device)[:, None]).to(torch.int64)
        if most < size:
            self._cache.crop(most - size)
            self._mask_RS = self._mask_RS[:, : most - size]

    def keep_rows(self, index: Tensor) -> None:
        index = index.to(self._mask_RS.device)
        self._cache.batch_select_indices(index)
        self._mask_RS = self._mask_RS[index]

    def _forward(self, ids: Tensor, positions: Tensor, keep: int) -> Tensor:
        device = self._target.device
        output = self._target.model(
            input_ids=ids.to(device),
            attention_mask=self._mask_RS,
            position_ids=positions.to(device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits.float()


@torch.no_grad()
def decode_many(
    target: Target,
    drafter: Drafter,
    ends: FrozenEnds,
    prompts: Sequence[Sequence[int]],
    limits: DecodeLimits,
    num_rows: int = 16,
) -> list[Decoded]:
    """Answer all prompts greedily, `num_rows` at a time (prompts of like length together); answers in given order.

    Seconds of an answer are its batch's, divided by its rows.

    Raises:
        ConfigError: an empty prompt.
    """
    for prompt in prompts:
        check_prompt(prompt)
    if num_rows == 1 or not Stepper(target).is_croppable:
        return [decode(target, drafter, ends, prompt, limits) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    answers: dict[int, Decoded] = {}
    for low in range(0, len(order), num_rows):
        numbers = order[low : low + num_rows]
        decoded = _decode_batch(target, drafter, ends, [prompts[number] for number in numbers], limits)
        answers |= dict(zip(numbers, decoded, strict=True))
    return [answers[number] for number in range(len(prompts))]


def _decode_batch(
    target: Target, drafter: Drafter, ends: FrozenEnds, prompts: Sequence[Sequence[int]], limits: DecodeLimits
) -> list[Decoded]:
    with TapHooks(target, drafter.config.taps) as hooks:
        began = now(target)
        stepper = BatchStepper(target)
        context = DraftContext.start(drafter, ends)
        firsts, present_RL = stepper.prefill(prompts)
        rows = [
            Row(number=number, length=len(prompt), answer=[int(first)])
            for number, (prompt, first) in enumerate(zip(prompts, firsts, strict=True))
        ]
        for row in rows:
            row.done = limits.cut(row.answer, limits.max_new_tokens)[1]
        _extend(context, hooks.features(), present_RL, rows, [0] * len(rows))
        prefilled = now(target)
        active = rows
        while True:
            going = [place for place, row in enumerate(active) if not row.done]
            if len(going) < len(active):
                if not going:
                    break
                stepper.keep_rows(torch.tensor(going))
                active = [active[place] for place in going]
            _step(stepper, hooks, context, active, limits)
        ended = now(target)
    return [
        Decoded(
            token_ids=tuple(row.answer),
            steps=tuple(row.steps),
            prefill_seconds=(prefilled - began) / len(rows),
            seconds=(ended - prefilled) / len(rows),
            num_reruns=0,
        )
        for row in rows
    ]


def _step(
    stepper: BatchStepper, hooks: TapHooks, context: DraftContext, active: Sequence[Row], limits: DecodeLimits
) -> None:
    """Draft, verify and commit one block of every active row."""
    block_size = context.drafter.config.block_size
    rooms = [limits.max_new_tokens - len(row.answer) for row in active]
    widths = [min(block_size, room + 1) for room in rooms]
    size = max(widths)
    lengths_R = torch.tensor([row.length for row in active])
    last_R = torch.tensor([row.answer[-1] for row in active])
    blocks = Blocks(
        rows_A=torch.tensor([row.number for row in active], device=context.device),
        tokens_A=last_R.to(context.device),
        anchors_A=lengths_R.to(context.device),
        widths_A=torch.tensor(widths, device=context.device),
        size=size,
    )
    num_drafts = limits.drafts(size)
    hidden = context.hidden(blocks)[:, 1 : 1 + num_drafts]
    drafts = context.logits(hidden.reshape(-1, hidden.shape[-1])).argmax(-1).view(len(active), num_drafts).cpu()
    block_RB = torch.cat([last_R[:, None], drafts], dim=1)
    choices = stepper.run(block_RB, lengths_R).cpu()
    kept: list[int] = []
    for place, row in enumerate(active):
        drafted = limits.drafts(widths[place])
        right = drafts[place, :drafted] == choices[place, :drafted]
        accepted = int(right.int().cumprod(0).sum())
        tokens = [int(token) for token in [*drafts[place, :accepted], choices[place, accepted]]]
        out, row.done = limits.cut(tokens, rooms[place])
        row.steps.append(VerifyStep(drafted=drafted, accepted=accepted, committed=len(out)))
        row.answer += out
        kept.append(len(out))
    kept_R = torch.tensor(kept)
    features = hooks.features()
    read = 1 + num_drafts
    present_RB = torch.arange(read, device=features.device) < kept_R.to(features.device)[:, None]
    _extend(context, features, present_RB, active, [row.length for row in active])
    stepper.commit(kept_R, read)
    for row, count in zip(active, kept, strict=True):
        row.length += count


def _extend(
    context: DraftContext, features: Tensor, present: Tensor, rows: Sequence[Row], starts: Sequence[int]
) -> None:
    """Pack the `present` [rows, width] positions of `features` [rows, width, F*H]; row r's first is `starts[r]`."""
    row_R1 = torch.tensor([row.number for row in rows], device=present.device)[:, None]
    start_R1 = torch.tensor(list(starts), device=present.device)[:, None]
    positions = start_R1 + present.long().cumsum(1) - 1
    slots = Slots(
        rows_S=row_R1.expand_as(positions)[present].to(context.device),
        positions_S=positions[present].to(context.device),
    )
    context.extend(features[present.to(features.device)], slots)
