"""Answers generated in this process by a transformers model: left-padded batches through its own `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from draftsmith.data.conversations import Skip
from draftsmith.data.regenerate import Answer, Prompt, SamplingConfig
from draftsmith.data.template import RENDER_ERRORS, ChatTemplate
from draftsmith.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        self._model = model
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, end_token_ids)
        self._sampling = sampling
        self._batch_size = batch_size
        self._longest = int(model.config.get_text_config().max_position_embeddings)

    def __call__(self, prompts: Sequence[Prompt]) -> list[Answer | Skip]:
        self._template.require()
        answers: list[Answer | Skip | None] = [None] * len(prompts)
        ready: list[tuple[int, list[int]]] = []
        for place, prompt in enumerate(prompts):
            ids = self._encode(prompt)
            if isinstance(ids, Skip):
                answers[place] = ids
            else:
                ready.append((place, ids))
        ready.sort(key=lambda item: len(item[1]))  # alike lengths together: less padding
        for start in range(0, len(ready), self._batch_size):
            batch = ready[start : start + self._batch_size]
            for (place, _), answer in zip(batch, self._generate(batch, prompts), strict=True):
                answers[place] = answer
        return [answer for answer in answers if answer is not None]

    def _encode(self, prompt: Prompt) -> list[int] | Skip:
        try:
            text = self._template.render(prompt.messages, prompt.template_kwargs, prompt.tools, generation_prompt=True)
        except RENDER_ERRORS as error:
            return Skip("the template doesn't take the conversation", f"{type(error).__name__}: {error}"[:160])
        ids = self._template.encode([text])[0]
        if len(ids) + self._sampling.max_new_tokens > self._longest:
            return Skip("the prompt leaves no room for an answer", f"{len(ids)} tokens of {self._longest}")
        return ids

    @torch.no_grad()
    def _generate(self, batch: Sequence[tuple[int, list[int]]], prompts: Sequence[Prompt]) -> list[Answer]:
        """Sample token by token with the model's own cache; rows that ended are padded until all have."""
        device = self._model.device
        longest = max(len(ids) for _, ids in batch)
        ends = self._template.end_ids(prompts[batch[0][0]].template_kwargs)
        generators = [torch.Generator().manual_seed(prompts[place].seed) for place, _ in batch]
        ids = torch.tensor([[0] * (longest - len(row)) + row for _, row in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for _, row in batch], device=device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache: Any = None
        sampled: list[list[int]] = [[] for _ in batch]
        open_rows = set(range(len(batch)))
        for _ in range(self._sampling.max_new_tokens):
            out: Any = cast(Any, self._model)(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            logits = out.logits[:, -1].float().cpu()
            chosen = [pick(logits[row], self._sampling, generators[row]) for row in range(len(batch))]
            for row in sorted(open_rows):
                sampled[row].append(chosen[row])
                if chosen[row] in ends:
                    open_rows.discard(row)
            if not open_rows:
                break
            ids = torch.tensor(chosen, device=device)[:, None]
            mask = torch.cat([mask, mask.new_ones(len(batch), 1)], dim=1)
            positions = positions[:, -1:] + 1
        return [
            self._answer(row, tokens, finished=index not in open_rows)
            for index, ((_, row), tokens) in enumerate(zip(batch, sampled, strict=True))
        ]

    def _answer(self, prompt_ids: list[int], tokens: list[int], *, finished: bool) -> Answer:
        text = cast(str, self._tokenizer.decode(tokens[:-1] if finished else tokens))
        return Answer(
            message={"role": "assistant", "content": text},
            finish_reason="stop" if finished else "length",
            prompt_ids=tuple(prompt_ids),
            completion_ids=tuple(tokens),
        )


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
