"""How many drafts of a block are worth verifying: steps of each size are timed, and held against what survives.

A step that verifies k drafts commits 1 + S_1 + ... + S_k tokens on average, S_i being the share of steps whose first i
drafts all hold. It costs c_k steps of plain decoding, on this device. The best k has the largest ratio of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from draftsmith.drafter.model import Drafter
from draftsmith.evaluate.decode import DecodeLimits, VerifyStep, decode, now
from draftsmith.evaluate.drafting import Blocks, DraftContext
from draftsmith.evaluate.sampling import GREEDY
from draftsmith.evaluate.statistics import survival_of
from draftsmith.evaluate.stepper import Stepper, TapHooks
from draftsmith.target.model import Target
from draftsmith.target.packed import packed_products

PILOT_PROMPTS, PILOT_TOKENS = 3, 64
"""What survival is read from where it isn't known yet."""
REPEATS = 5
"""Timings of each size; the median counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What each number of drafts costs and brings; place k - 1 is k drafts."""

    costs: tuple[float, ...]
    """A step, in steps of plain decoding."""
    survival: tuple[float, ...]

    @classmethod
    def of(cls, costs: Sequence[float], survival: Sequence[float]) -> Pace:
        """Places that no step reached have nothing to survive."""
        padding = [0.0] * (len(costs) - len(survival))
        return cls(costs=tuple(costs), survival=(*survival[: len(costs)], *padding))

    def tau(self, num_drafts: int) -> float:
        """Tokens that a step commits on average, the bonus token included."""
        return 1 + sum(self.survival[:num_drafts])

    def speedup(self, num_drafts: int) -> float:
        """Over plain decoding, the prefill left out."""
        return self.tau(num_drafts) / self.costs[num_drafts - 1]

    @property
    def num_drafts(self) -> int:
        """The number with the largest speed-up."""
        return max(range(1, len(self.costs) + 1), key=self.speedup)

    def __str__(self) -> str:
        best, most = self.num_drafts, len(self.costs)
        text = f"verify {best} of {most} drafts a step: {self._reason(best)}"
        if best < most:
            text += f"; all {most}: {self._reason(most)}"
        return text if self.speedup(best) > 1 else f"{text}; plain decoding is faster on this device"

    def _reason(self, num_drafts: int) -> str:
        return (
            f"tau {self.tau(num_drafts):.2f} for {self.costs[num_drafts - 1]:.2f} plain steps = "
            f"{self.speedup(num_drafts):.2f}x expected"
        )


@torch.no_grad()
def step_costs(target: Target, drafter: Drafter, prompt_ids: Sequence[int], repeats: int = REPEATS) -> list[float]:
    """Time of a draft-verify step with 1, 2, ... drafts over that of a plain step, after `prompt_ids`.

    Sizes take turns, so that a device that slows down meanwhile slows all of them.
    """
    size = drafter.config.block_size
    seconds: list[list[float]] = [[] for _ in range(size)]
    with packed_products(target.model, drafter), TapHooks(target, drafter.config.taps) as hooks:
        stepper = Stepper(target)
        context = DraftContext.start(drafter, target.ends())
        token = int(stepper.run(prompt_ids, last_only=True)[0].argmax())
        context.extend(hooks.features()[0])
        for repeat in range(1 + repeats):
            for num_drafts in range(size):
                began = now(target)
                if num_drafts == 0:
                    int(stepper.run([token], last_only=True).argmax())
                else:
                    blocks = Blocks.single(token, context.length, size, context.device)
                    drafts, q = GREEDY.propose(context.logits(context.hidden(blocks)[0, 1 : 1 + num_drafts]))
                    GREEDY.verify(drafts, q, stepper.run([token, *(int(draft) for draft in drafts)]))
                    context.extend(hooks.features()[0, :1])
                    stepper.commit(1)
                ended = now(target)
                if num_drafts == 0:
                    context.extend(hooks.features()[0])  # keeps both sides in step; plain decoding has no drafter
                if repeat:
                    seconds[num_drafts].append(ended - began)
    plain, *drafted = (median(times) for times in seconds)
    return [cost / plain for cost in drafted]


def measure_pace(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: tuple[int, ...]
) -> Pace:
    """Time every size on the first prompt, and see what survives on the first few."""
    limits = DecodeLimits(max_new_tokens=min(max_new_tokens, PILOT_TOKENS), stop_ids=stop_ids)
    steps: list[VerifyStep] = []
    for prompt in prompts[:PILOT_PROMPTS]:
        steps += decode(target, drafter, target.ends(), prompt, limits).steps
    return Pace.of(step_costs(target, drafter, prompts[0]), survival_of(steps)[0])
