"""Drafting and verifying one block's tokens, so that what comes out is distributed as the target alone would decode.

Greedy keeps the longest prefix equal to the target's own choices. Sampled decoding keeps draft d with probability
min(1, p(d) / q(d)) and otherwise draws from the rest max(p - q, 0) (speculative sampling, arXiv 2211.17192).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftsmith.errors import ConfigError

DraftPolicy = Literal["argmax", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How tokens are chosen. `generator` lies on the CPU, so that a seed gives the same draws on every device."""

    temperature: float = 0.0
    draft_policy: DraftPolicy = "argmax"
    """argmax: the drafter proposes its likeliest token (q is one-hot), as engines do; sample: it draws from q."""
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"--temperature {self.temperature} is below 0; 0 decodes greedily")
        if self.temperature > 0 and self.generator is None:
            raise ConfigError("sampling needs a seeded generator: give --seed")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Softmax at the temperature, fp32 on the CPU."""
        return torch.softmax(logits.float().cpu() / self.temperature, dim=-1)

    def draw(self, probabilities: Tensor) -> Tensor:
        """One index per row [rows, V] -> [rows]."""
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]

    def choose(self, logits: Tensor) -> Tensor:
        """One token per row of the target's logits [rows, V]."""
        return logits.argmax(-1) if self.temperature == 0 else self.draw(self.probabilities(logits))

    def propose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draft tokens [places] for drafter logits [places, V], and q where they were drawn from it."""
        if self.temperature == 0 or self.draft_policy == "argmax":
            return logits.argmax(-1), None
        q = self.probabilities(logits)
        return self.draw(q), q

    def verify(self, drafts: Tensor, q: Tensor | None, logits: Tensor) -> tuple[int, int]:
        """How many of `drafts` [places] stand, and the token after them.

        `logits` [places + 1, V] are the target's: row k chooses what follows place k of the block.
        """
        if self.temperature == 0:
            choices = logits.argmax(-1)
            num_accepted = int((choices[:-1] == drafts.to(choices.device)).int().cumprod(0).sum())
            return num_accepted, int(choices[num_accepted])
        p = self.probabilities(logits)
        index = drafts.cpu()[:, None]
        if q is None:
            q = torch.zeros_like(p[:-1]).scatter(1, index, 1.0)
        u = torch.rand(len(drafts), generator=self.generator)
        kept = u * q.gather(1, index)[:, 0] < p.gather(1, index)[:, 0]
        num_accepted = int(kept.int().cumprod(0).sum())
        rest = p[num_accepted]
        if num_accepted < len(drafts):
            rest = (rest - q[num_accepted]).clamp(min=0)
            # p == q up to rounding leaves nothing over: any draw from p is right then.
            rest = rest if float(rest.sum()) > 0 else p[num_accepted]
        return num_accepted, int(self.draw(rest[None])[0])


GREEDY = Sampler()
