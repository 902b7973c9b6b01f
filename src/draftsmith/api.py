"""draftsmith from a notebook or a script: the command line's calls, with configurations instead of flags.

    from draftsmith.api import DataOptions, EvalConfig, RunConfig, TargetConfig, evaluate, train

    result = train(RunConfig(out="run", target=TargetConfig(target="smollm2"), data=DataOptions(data="chats.jsonl")))
    print(result.after.summary.tau)
    print(evaluate(["run"], TargetConfig(target="smollm2"), EvalConfig(prompts=("quickstart",)))[0].summary.tau)

(The packages `draftsmith.train` and `draftsmith.evaluate` hold the parts these are made of, hence a module of its own.)
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from draftsmith.evaluate.acceptance import EvalConfig, EvalResult, evaluate_prompts, plain_answers
from draftsmith.evaluate.source import open_drafter
from draftsmith.pipeline.placement import place
from draftsmith.pipeline.run import RunConfig, RunResult
from draftsmith.pipeline.run import train as run_training
from draftsmith.pipeline.settings import (
    AnswerOptions,
    BatchOptions,
    DataOptions,
    DrafterOptions,
    MeasureOptions,
    PipelineConfig,
)
from draftsmith.target.model import TargetConfig, load_target

__all__ = [
    "AnswerOptions",
    "BatchOptions",
    "DataOptions",
    "DrafterOptions",
    "EvalConfig",
    "EvalResult",
    "MeasureOptions",
    "PipelineConfig",
    "RunConfig",
    "RunResult",
    "TargetConfig",
    "evaluate",
    "train",
]


def train(config: RunConfig, *, quiet: bool = False) -> RunResult:
    """Train as `draftsmith train` does: load, prepare, choose, train, measure, export.

    Args:
        config: what the command line's flags or a recipe would say.
        quiet: show nothing.

    Raises:
        DraftsmithError: whatever went wrong first, after what could be saved was saved.
    """
    return run_training(config, Console(quiet=quiet))


def evaluate(
    drafters: Sequence[str], target: TargetConfig, config: EvalConfig, *, block_size: int = 0
) -> list[EvalResult]:
    """Measure drafters by the draft-verify loop, as `draftsmith evaluate` does; all answer the same prompts.

    Args:
        drafters: runs, drafters' folders, hub ids, or `smollm2-drafter`.
        target: the model they draft for.
        config: prompts and lengths.
        block_size: draft smaller blocks than trained; 0 takes the trained size.

    Raises:
        DraftsmithError: a drafter or target that can't be loaded, or prompts that can't be read.
    """
    named = [open_drafter(source, block_size) for source in drafters]
    loaded = load_target(target, place(PipelineConfig()).targets[0])
    prompts = config.load()
    plains = plain_answers(loaded, prompts, config) if config.plain else None
    return [
        evaluate_prompts(loaded, one.drafter.to(loaded.device), prompts, config, None, plains, one.name)
        for one in named
    ]
