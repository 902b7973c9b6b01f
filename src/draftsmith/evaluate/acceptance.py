"""Measure drafters on prompt sets by the draft-verify loop, and say what came out as one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from rich.console import Group, RenderableType
from rich.table import Table

from draftsmith.drafter.model import Drafter
from draftsmith.errors import ConfigError
from draftsmith.evaluate.batched import decode_many
from draftsmith.evaluate.decode import Decoded, DecodeLimits, Plain, compare_answers, decode, plain_decode
from draftsmith.evaluate.pace import Pace, measure_pace
from draftsmith.evaluate.prompts import BUILT_IN, Prompt, encode_prompt, load_prompts
from draftsmith.evaluate.sampling import Sampler
from draftsmith.evaluate.statistics import Answered, Difference, Summary, compare, summarize
from draftsmith.target.model import Target
from draftsmith.target.packed import packed_products

PLACES = "Survival: first k drafts all accepted, % of steps (below: given the first k-1)"
Progress = Callable[[int, int, float], None]
"""Called after each prompt with prompts done, prompts in all, and tau so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """How drafters are measured: decoded on held-out prompts, batch 1."""

    prompts: tuple[str, ...] = (BUILT_IN,)
    """Prompt sets: JSONL files, or names: quickstart, humaneval, gsm8k, mt-bench."""
    num_prompts: int = 0
    """Most prompts of each set, its first ones; 0 takes all."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 decodes greedily; above, answers are sampled."""
    draft_policy: Literal["argmax", "sample"] = "argmax"
    """How the drafter proposes when sampling: its likeliest token, as engines do, or a draw from its own distribution.
    Either way answers are distributed as the target's own."""
    template_kwargs: Mapping[str, bool | int | str] = field(default_factory=dict[str, "bool | int | str"])
    """Arguments of the chat template, such as `enable_thinking False`; recorded, since the figures depend on them."""
    plain: bool = True
    """Decodes every prompt plainly too: for the speed-up, and to check that drafting changes no token."""
    max_drafts: int | Literal["auto"] = 0
    """Verify only this many of each block's drafts, its first ones; 0 verifies all. auto times steps of every size on
    this device and takes the number that pays best for what the drafter gets right."""
    batch: int = 1
    """Prompts decoded together, for hundreds of them on a GPU; greedy only. tokens/s is then the whole batch's, and
    `plain` still decodes one by one."""
    seed: int = 0
    """Of sampling and of the bootstrap."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("no prompts to evaluate on: name a JSONL file or a set with --prompts")
        if self.num_prompts < 0:
            raise ConfigError(f"--num-prompts {self.num_prompts} is below 0; 0 takes all")
        if self.draft_policy == "sample" and self.temperature == 0:
            raise ConfigError("--draft-policy sample needs --temperature above 0: greedy decoding drafts by argmax")
        DecodeLimits(max_new_tokens=self.max_new_tokens, max_drafts=0 if self.max_drafts == "auto" else self.max_drafts)
        if self.temperature < 0:
            raise ConfigError(f"--temperature {self.temperature} is below 0; 0 decodes greedily")
        if self.batch < 1:
            raise ConfigError(f"--batch {self.batch} is below 1; 1 decodes one by one")
        if self.batch > 1 and self.temperature > 0:
            raise ConfigError(f"--batch {self.batch} decodes greedily only: drop it or --temperature")
        if self.batch > 1 and self.max_drafts == "auto":
            raise ConfigError("--max-drafts auto times steps of one prompt: drop --batch, or give a number")

    def load(self) -> list[Prompt]:
        """All prompts of all sets, in order.

        Raises:
            DataError: as `load_prompts`.
        """
        return [prompt for source in self.prompts for prompt in load_prompts(source, self.num_prompts)]

    def sampler(self, index: int) -> Sampler:
        """Of prompt number `index`: each has its own draws, so that one drafter's lengths don't shift another's."""
        if self.temperature == 0:
            return Sampler()
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + index) % 2**63)
        return Sampler(temperature=self.temperature, draft_policy=self.draft_policy, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One drafter's answers to one list of prompts."""

    name: str
    target: str
    config: EvalConfig
    answers: tuple[Answered, ...]
    pace: Pace | None = None
    """Where steps of every size were timed: what each number of drafts costs and brings."""

    @property
    def summary(self) -> Summary:
        return summarize(self.answers, self.config.seed)

    def groups(self) -> dict[str, Summary]:
        """Summaries per set, and per domain within a set that states more than one."""
        found: dict[str, Summary] = {}
        for source in dict.fromkeys(answer.source for answer in self.answers):
            chosen = [answer for answer in self.answers if answer.source == source]
            found[source] = summarize(chosen, self.config.seed)
            domains = list(dict.fromkeys(answer.domain for answer in chosen))
            for domain in domains if len(domains) > 1 else []:
                part = [answer for answer in chosen if answer.domain == domain]
                found[f"{source} / {domain or 'other'}"] = summarize(part, self.config.seed)
        return found

    def with_costs(self, costs: Sequence[float]) -> EvalResult:
        """The same, with what each number of drafts would give where steps cost this much (in plain steps)."""
        return replace(self, pace=Pace.of(costs, self.summary.survival))

    def to_dict(self) -> dict[str, Any]:
        """Everything that a report or a later comparison needs, as plain JSON values."""
        return {
            "drafter": self.name,
            "target": self.target,
            "config": asdict(self.config) | {"template_kwargs": dict(self.config.template_kwargs)},
            "pace": None if self.pace is None else asdict(self.pace),
            "summary": _figures(self.summary),
            "groups": {name: _figures(summary) for name, summary in self.groups().items()},
            "answers": [
                {
                    "source": answer.source,
                    "domain": answer.domain,
                    "num_prompt_tokens": answer.num_prompt_tokens,
                    "token_ids": list(answer.decoded.token_ids),
                    "committed": [step.committed for step in answer.decoded.steps],
                    "accepted": [step.accepted for step in answer.decoded.steps],
                    "seconds": answer.decoded.seconds,
                    "identical": None if answer.agreement is None else str(answer.agreement),
                }
                for answer in self.answers
            ],
        }


def _figures(summary: Summary) -> dict[str, Any]:
    return asdict(summary) | {"speedup": summary.speedup, "identical": summary.identical}


def plain_answers(target: Target, prompts: Sequence[Prompt], config: EvalConfig) -> list[Plain]:
    """The target's own answers: decode them once, whichever number of drafters is measured against them.

    Raises:
        DataError: a prompt that the chat template refuses.
    """
    limits = DecodeLimits(max_new_tokens=config.max_new_tokens, stop_ids=target.facts.eos_token_ids)
    return [
        plain_decode(target, encode_prompt(target, prompt, config.template_kwargs), limits, config.sampler(index))
        for index, prompt in enumerate(prompts)
    ]


def evaluate_prompts(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    config: EvalConfig,
    progress: Progress | None = None,
    plains: Sequence[Plain] | None = None,
    name: str = "drafter",
) -> EvalResult:
    """Answer every prompt by drafting and verifying.

    Args:
        target, drafter: on their devices; both are left as they are.
        prompts: `config.load()`, or any others.
        config: lengths, temperature, template arguments.
        progress: told after each prompt.
        plains: the target's own answers to the same prompts; None decodes them here if `config.plain`.
        name: of the drafter, for tables.

    Raises:
        DataError: a prompt that the chat template refuses.
    """
    answers: list[Answered] = []
    committed = steps = 0
    encoded = [encode_prompt(target, prompt, config.template_kwargs) for prompt in prompts]
    stop_ids, pace = target.facts.eos_token_ids, None
    if config.max_drafts == "auto":
        with packed_products(target.model, drafter):
            pace = measure_pace(target, drafter, encoded, config.max_new_tokens, stop_ids)
        config = replace(config, max_drafts=pace.num_drafts)
    assert config.max_drafts != "auto"
    limits = DecodeLimits(max_new_tokens=config.max_new_tokens, stop_ids=stop_ids, max_drafts=config.max_drafts)
    for index, decoded in _decoded(target, drafter, encoded, limits, config):
        prompt, ids = prompts[index], encoded[index]
        if plains is not None:
            plain = plains[index]
        else:
            plain = plain_decode(target, ids, limits, config.sampler(index)) if config.plain else None
        same = compare_answers(decoded.token_ids, plain) if plain is not None and config.temperature == 0 else None
        answers.append(
            Answered(
                source=prompt.source,
                domain=prompt.domain,
                num_prompt_tokens=len(ids),
                decoded=decoded,
                plain=plain,
                agreement=same,
            )
        )
        committed, steps = committed + decoded.committed, steps + len(decoded.steps)
        if progress is not None:
            progress(index + 1, len(prompts), committed / max(1, steps))
    return EvalResult(name=name, target=target.facts.name, config=config, answers=tuple(answers), pace=pace)


def _decoded(
    target: Target, drafter: Drafter, encoded: Sequence[Sequence[int]], limits: DecodeLimits, config: EvalConfig
) -> Iterator[tuple[int, Decoded]]:
    """Answers with the number of their prompt, as they come."""
    ends = target.ends()
    with packed_products(target.model, drafter):
        for low in range(0, len(encoded), config.batch):
            prompts = encoded[low : low + config.batch]
            if config.batch == 1:
                yield low, decode(target, drafter, ends, prompts[0], limits, config.sampler(low))
            else:
                together = decode_many(target, drafter, ends, prompts, limits, config.batch)
                yield from enumerate(together, start=low)


def differences(results: Sequence[EvalResult]) -> list[Difference]:
    """The first drafter against each other one, on the same prompts.

    Raises:
        ConfigError: other prompts.
    """
    first = results[0]
    seed = first.config.seed
    return [compare(first.name, first.answers, other.name, other.answers, seed) for other in results[1:]]


def render(results: EvalResult | Sequence[EvalResult]) -> RenderableType:
    """A table with a row per drafter and set, survival by place below, and who is better; 80 columns are enough."""
    every = [results] if isinstance(results, EvalResult) else list(results)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("drafter", overflow="ellipsis", no_wrap=True)
    for column, width in (("tau [95%]", 17), ("tokens/s", 8), ("plain", 6), ("speed-up", 8), ("identical", 9)):
        table.add_column(column, justify="right", no_wrap=True, min_width=width)
    for result in every:
        groups = result.groups()
        table.add_row(result.name, *_cells(result.summary))
        for group, summary in groups.items() if len(groups) > 1 else ():
            table.add_row(f"  {group} ({summary.num_prompts})", *_cells(summary))
    lines = [f"{result.name} identical to greedy: {result.summary.identical}" for result in every if _compared(result)]
    lines += [f"{result.name}: {result.pace}" for result in every if result.pace is not None]
    verdicts = [difference.verdict for difference in differences(every)]
    return Group(_title(every[0]), "", table, "", PLACES, _places(every), "", *lines, *verdicts)


def _title(result: EvalResult) -> str:
    config, summary = result.config, result.summary
    mode = "greedy" if config.temperature == 0 else f"temperature {config.temperature}, drafts by {config.draft_policy}"
    template = ", ".join(f"{key}={value}" for key, value in config.template_kwargs.items()) or "default"
    size = f"{summary.num_prompts} answers, {summary.num_tokens:,} tokens"
    return f"Acceptance on {result.target}: {size}; {mode}; template {template}"


def _compared(result: EvalResult) -> bool:
    return result.summary.num_identical is not None


def _places(every: Sequence[EvalResult]) -> Table:
    """Survival and conditional acceptance by place, in per cent: a block of 16 fits a terminal."""
    places = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    places.add_column("k", overflow="ellipsis", no_wrap=True, max_width=16)
    for place in range(1, max(len(result.summary.survival) for result in every) + 1):
        places.add_column(str(place), justify="right", no_wrap=True)
    for result in every:
        whole = result.summary
        for label, shares in ((result.name, whole.survival), ("", whole.conditional)):
            places.add_row(label, *(f"{100 * share:.0f}" for share in shares))
    return places


def _cells(summary: Summary) -> list[str]:
    plain, speedup, same = summary.plain_tokens_per_second, summary.speedup, summary.num_identical
    return [
        str(summary.tau),
        f"{summary.tokens_per_second:.1f}",
        "-" if plain is None else f"{plain:.1f}",
        "-" if speedup is None else f"{speedup:.2f}x",
        "-" if same is None else "yes" if same == summary.num_prompts else f"{same} of {summary.num_prompts}",
    ]
