"""Answers generated in this process by a transformers model: one batch kept full, rows left-padded in one cache.

A row that has its answer leaves the batch; once a quarter of the places are free, waiting prompts are read and their
keys and values put beside the others', padded on the left to the same width. That holds for full attention only:
targets with sliding windows or recurrent state finish one batch after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from draftsmith.data.conversations import Skip
from draftsmith.data.regenerate import Answer, Prompt, SamplingConfig
from draftsmith.data.template import RENDER_ERRORS, ChatTemplate
from draftsmith.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WINDOW_BATCHES = 8
"""Prompts held, in batches: prompts of like length are chosen among them."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    """One prompt and what has been sampled of its answer."""

    ticket: int
    prompt_ids: list[int]
    end_ids: frozenset[int]
    generator: torch.Generator
    sampled: list[int] = field(default_factory=list[int])
    done: bool = False
    """Its end token came, or its longest length."""

    @property
    def ended(self) -> bool:
        """Whether the last token sampled ends the turn."""
        return self.sampled[-1] in self.end_ids


class EmbeddedGenerate:
    """A `Generate` that runs the model here.

    Sampling draws from one CPU generator per row, seeded by the prompt: what shares its batch changes an answer by
    rounding only. Prompts that leave less than `max_new_tokens` of the model's positions are skipped.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingConfig,
        *,
        end_token_ids: Sequence[int] = (),
        batch_size: int = 8,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"a batch of {batch_size} prompts can't be generated: give at least 1")
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, end_token_ids)
        self._sampling = sampling
        self._batch_size = batch_size
        self._longest = int(model.config.get_text_config().max_position_embeddings)
        self._waiting: list[_Row] = []
        self._skipped: list[tuple[int, Skip]] = []
        self._batch = _Batch(model)

    @property
    def window(self) -> int:
        return self._batch_size * WINDOW_BATCHES

    def start(self, ticket: int, prompt: Prompt) -> None:
        """Encode a prompt; generating goes on in `finished`."""
        self._template.require()
        ids = self._encode(prompt)
        if isinstance(ids, Skip):
            self._skipped.append((ticket, ids))
            return
        ends = self._template.end_ids(prompt.template_kwargs)
        generator = torch.Generator().manual_seed(prompt.seed)
        self._waiting.append(_Row(ticket=ticket, prompt_ids=ids, end_ids=ends, generator=generator))

    @torch.no_grad()
    def finished(self) -> Sequence[tuple[int, Answer | Skip]]:
        """Generate until an answer is complete."""
        if self._skipped:
            skipped, self._skipped = self._skipped, []
            return skipped
        while self._waiting or self._batch.rows:
            logits_RV = self._batch.admit(admitted) if (admitted := self._choose()) else self._batch.step()
            for row, logits_V in zip(admitted or self._batch.rows, logits_RV, strict=True):
                self._sample(row, logits_V)
            if ended := self._batch.leave():
                return [(row.ticket, self._answer(row)) for row in ended]
        return []

    def _choose(self) -> list[_Row]:
        """Who joins the batch now: the prompt that has waited longest, and those nearest to it in length."""
        num_free = self._batch_size - len(self._batch.rows)
        is_time = self._batch.takes_more and 4 * num_free >= self._batch_size
        if not self._waiting or (self._batch.rows and not is_time):
            return []
        length = len(self._waiting[0].prompt_ids)
        nearest = sorted(self._waiting, key=lambda row: abs(len(row.prompt_ids) - length))
        chosen = nearest[:num_free]
        self._waiting = [row for row in self._waiting if row not in chosen]
        return chosen

    def _encode(self, prompt: Prompt) -> list[int] | Skip:
        try:
            text = self._template.render(prompt.messages, prompt.template_kwargs, prompt.tools, generation_prompt=True)
        except RENDER_ERRORS as error:
            return Skip("the template doesn't take the conversation", f"{type(error).__name__}: {error}"[:160])
        ids = self._template.encode([text])[0]
        if len(ids) + self._sampling.max_new_tokens > self._longest:
            return Skip("the prompt leaves no room for an answer", f"{len(ids)} tokens of {self._longest}")
        return ids

    def _sample(self, row: _Row, logits_V: Tensor) -> None:
        if row.done:
            return
        row.sampled.append(pick(logits_V, self._sampling, row.generator))
        row.done = row.ended or len(row.sampled) == self._sampling.max_new_tokens

    def _answer(self, row: _Row) -> Answer:
        text = cast(str, self._tokenizer.decode(row.sampled[:-1] if row.ended else row.sampled))
        return Answer(
            message={"role": "assistant", "content": text},
            finish_reason="stop" if row.ended else "length",
            prompt_ids=tuple(row.prompt_ids),
            completion_ids=tuple(row.sampled),
        )


class _Batch:
    """The rows being generated, their cache, and which of its W places each row fills: `mask_RW`, 0 or 1.

    The last sampled token of a row isn't in the cache yet.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.rows: list[_Row] = []
        self._cache: Any = None
        self._mask_RW = torch.zeros(0, 0, dtype=torch.int64)

    @property
    def takes_more(self) -> bool:
        """Whether rows can leave and join while others go on."""
        from transformers.cache_utils import DynamicLayer  # the model has long imported it; a plan never does

        return self._cache is not None and all(type(layer) is DynamicLayer for layer in self._cache.layers)

    def admit(self, rows: Sequence[_Row]) -> Tensor:
        """Read the prompts of new rows; logits [rows, V] of their first tokens, on the CPU."""
        width = max(len(row.prompt_ids) for row in rows)
        ids = torch.tensor([[0] * (width - len(row.prompt_ids)) + row.prompt_ids for row in rows])
        mask_RW = torch.tensor([[0] * (width - len(row.prompt_ids)) + [1] * len(row.prompt_ids) for row in rows])
        positions = (mask_RW.cumsum(-1) - 1).clamp(min=0)
        cache, logits_RV = self._forward(ids, positions, mask_RW, None)
        if self.rows:
            cache, mask_RW = _side_by_side((self._cache, cache), (self._mask_RW, mask_RW))
        self._cache, self._mask_RW = cache, mask_RW
        self.rows.extend(rows)
        return logits_RV

    def step(self) -> Tensor:
        """Read the token sampled last of every row; logits [rows, V] of the next ones, on the CPU."""
        ids = torch.tensor([[row.sampled[-1]] for row in self.rows])
        positions = torch.tensor([[len(row.prompt_ids) + len(row.sampled) - 1] for row in self.rows])
        self._mask_RW = torch.cat([self._mask_RW, torch.ones_like(ids)], dim=1)
        self._cache, logits_RV = self._forward(ids, positions, self._mask_RW, self._cache)
        return logits_RV

    def leave(self) -> list[_Row]:
        """Rows that are done leave: each at once, or all together where the cache can't be taken apart."""
        ended = [row for row in self.rows if row.done]
        if not ended or not (self.takes_more or len(ended) == len(self.rows)):
            return []
        kept = [place for place, row in enumerate(self.rows) if not row.done]
        self.rows = [self.rows[place] for place in kept]
        self._mask_RW = self._mask_RW[kept]
        if not kept:
            self._cache = None
            return ended
        unused = int(self._mask_RW.any(0).int().argmax())
        self._mask_RW = self._mask_RW[:, unused:]
        self._cache.batch_select_indices(torch.tensor(kept, device=self._model.device))
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]
        return ended

    def _forward(self, ids: Tensor, positions: Tensor, mask_RW: Tensor, cache: Any) -> tuple[Any, Tensor]:
        device = self._model.device
        out: Any = cast(Any, self._model)(
            input_ids=ids.to(device),
            attention_mask=mask_RW.to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.past_key_values, out.logits[:, -1].float().cpu()


def _side_by_side(caches: tuple[Any, Any], masks: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
    """Two batches as one, padded on the left to the wider one; the first cache takes both in."""
    width = max(mask_RW.shape[1] for mask_RW in masks)
    first, second = caches
    for mine, other in zip(first.layers, second.layers, strict=True):
        mine.keys, mine.values = (
            torch.cat([_padded(states, width - states.shape[2]) for states in pair])
            for pair in ((mine.keys, other.keys), (mine.values, other.values))
        )
    padded = [torch.nn.functional.pad(mask_RW, (width - mask_RW.shape[1], 0)) for mask_RW in masks]
    return first, torch.cat(padded)


def _padded(states: Tensor, num_places: int) -> Tensor:
    """Keys or values [rows, heads, places, size] with zeros put before them."""
    return torch.nn.functional.pad(states, (0, 0, num_places, 0))


def pick(logits_V: torch.Tensor, sampling: SamplingConfig, generator: torch.Generator) -> int:
    """One token of a distribution: greedy at temperature 0, else from the smallest set that holds `top_p`."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities = (logits_V / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, ids = probabilities.sort(descending=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p
        ordered = ordered.masked_fill(outside, 0.0)
        return int(ids[torch.multinomial(ordered, 1, generator=generator)])
    return int(torch.multinomial(probabilities, 1, generator=generator))
