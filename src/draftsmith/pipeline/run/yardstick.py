"""What a run measures itself with: prompts, the target's own answers to them, and the draft-verify loop."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from draftsmith.drafter.model import Drafter, DrafterConfig
from draftsmith.evaluate.acceptance import EvalConfig, EvalResult, Progress, evaluate_prompts, plain_answers
from draftsmith.evaluate.decode import Plain
from draftsmith.evaluate.pace import step_costs
from draftsmith.evaluate.prompts import Prompt, encode_prompt
from draftsmith.pipeline.chief import Measure, Measured
from draftsmith.pipeline.documents import prompt_of
from draftsmith.pipeline.show import ProgressView
from draftsmith.pipeline.stage import Stage
from draftsmith.pipeline.together import RemoteMeasures
from draftsmith.pipeline.world import World
from draftsmith.target.compute import uncompiled


def with_weights(config: DrafterConfig, weights: Mapping[str, Tensor]) -> Drafter:
    """A drafter of this architecture with these weights."""
    drafter = Drafter(config)
    drafter.load_state_dict(dict(weights))
    return drafter


class Measures(Protocol):
    """Measures drafters of a run with the true loop, here or in the first target's process."""

    def measure(self, drafter: Drafter, name: str) -> EvalResult | None: ...

    def during(self) -> Measure | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """The prompts that a run measures itself on, and the target's own answers, decoded once."""

    stage: Stage
    prompts: list[Prompt]
    config: EvalConfig
    plains: list[Plain]

    def measure(self, drafter: Drafter, name: str, max_drafts: int = 0) -> EvalResult | None:
        """The true loop's result, with at most so many drafts verified a step; None where there are no prompts."""
        if not self.prompts:
            return None
        with ProgressView(self.stage.console, f"measuring {name}", len(self.prompts)) as view:

            def tell(done: int, _total: int, tau: float) -> None:
                view.update(done, f"tau {tau:.2f}")

            return self._answer(drafter, name, tell, max_drafts)

    def _answer(self, drafter: Drafter, name: str, tell: Progress | None, max_drafts: int = 0) -> EvalResult:
        target = self.stage.target
        beside = copy.deepcopy(drafter).to(target.device)
        config = replace(self.config, max_drafts=max_drafts)
        with uncompiled(target):
            return evaluate_prompts(target, beside, self.prompts, config, tell, self.plains, name)

    def costs(self, drafter: Drafter) -> list[float]:
        """A step of each size in steps of plain decoding, on this device, after the first prompt."""
        target = self.stage.target
        ids = encode_prompt(target, self.prompts[0], self.config.template_kwargs)
        with self.stage.console.status("timing verify steps"), uncompiled(target):
            return step_costs(target, copy.deepcopy(drafter).to(target.device), ids)

    def answer(self, name: str, weights: Mapping[str, Tensor]) -> EvalResult:
        """For the first drafter of a distributed run, which has no target."""
        return self._answer(with_weights(self.stage.start.config, weights), name, None)

    def during(self) -> Measure | None:
        """For the chief: a score and the numbers of its log line."""
        if not self.prompts:
            return None

        return lambda _step, weights: _measured(self.answer("during", weights))


def _measured(result: EvalResult) -> Measured:
    return result.summary.tau.value, result.to_dict()["summary"]


class RemoteYardstick:
    """The same, measured by the first target's process."""

    def __init__(self, stage: Stage, world: World) -> None:
        self._stage, self._remote = stage, RemoteMeasures(world)
        self._num_prompts = int(world.wait("prompts", "the first target to answer the prompts"))

    def measure(self, drafter: Drafter, name: str) -> EvalResult | None:
        """The true loop's result; None where there is nothing to measure on."""
        if not self._num_prompts:
            return None
        with self._stage.console.status(f"measuring {name}"):
            return self._ask(name, drafter.state_dict())

    def during(self) -> Measure | None:
        """For the chief: a score and the numbers of its log line."""
        if not self._num_prompts:
            return None
        return lambda _step, weights: _measured(self._ask("during", weights))

    def _ask(self, name: str, weights: Mapping[str, Tensor]) -> EvalResult:
        names = self._stage.start.drafter.state_dict()
        result = self._remote.ask(name, {key: weights[key] for key in names})
        assert isinstance(result, EvalResult)
        return result


def yardstick_of(stage: Stage) -> Yardstick:
    """What is measured on: the prompts named, or the conversations held out."""
    options, data = stage.config.measure, stage.inputs.data
    config = EvalConfig(
        prompts=options.prompts or ("held-out",),
        num_prompts=options.num_prompts,
        max_new_tokens=options.max_new_tokens,
        template_kwargs=stage.config.prepare.tokenize.template_kwargs,
    )
    prompts: list[Prompt] = []
    if options.prompts:
        prompts = config.load()
    elif data is not None:
        count = min(len(data.held_out), options.num_prompts or len(data.held_out))
        ids = [tuple(prompt_of(data.held_out[index])) for index in range(count)]
        prompts = [Prompt(source="held-out", token_ids=prompt) for prompt in ids if prompt]
    with stage.console.status(f"decoding {len(prompts)} prompts plainly, to compare with"):
        plains = plain_answers(stage.target, prompts, config)
    return Yardstick(stage=stage, prompts=prompts, config=config, plains=plains)
