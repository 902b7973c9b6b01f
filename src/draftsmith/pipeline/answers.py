"""The target answers first: a run whose conversations need no answers, or not the ones they have.

What it says goes into `answers.jsonl` in the run's folder, answer by answer: a run killed meanwhile goes on with what
it has, and a resumed run trains on the same text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from draftsmith.data.embedded import EmbeddedGenerate
from draftsmith.data.prepared import ACCOUNT_FILE
from draftsmith.data.regenerate import RegenerateConfig, RegenerateReport, SamplingConfig, regenerate
from draftsmith.errors import ConfigError
from draftsmith.pipeline.inputs import ANSWERS
from draftsmith.pipeline.settings import AnswerOptions, DataOptions
from draftsmith.target.model import Target
from draftsmith.target.packed import packed_products


def answer_first(
    data: DataOptions,
    options: AnswerOptions,
    template_kwargs: dict[str, bool | int | str],
    target: Target,
    run: Path | None,
    console: Console,
) -> DataOptions:
    """Let `target` answer every question of `data` (greedily at temperature 0) unless an earlier try did.

    Args:
        data: whose conversations; answers in them are replaced, and rows may end with the user's turn.
        options: how.
        template_kwargs: chat-template arguments of the requests.
        target: on its device.
        run: the run's folder.

    Returns:
        `data` with the answered conversations in place of its own.

    Raises:
        ConfigError: no folder to keep the answers in, or data that are token ids already.
        DataError: nothing in the data that can be answered.
    """
    if run is None:
        raise ConfigError("--regenerate answers in a training run only: draftsmith regenerate first, then use its file")
    if (Path(data.data) / ACCOUNT_FILE).is_file():
        raise ConfigError(f"{data.data} holds token ids, which --regenerate can't ask about: give it the conversations")
    out = run / ANSWERS
    if not out.exists():
        sampling = SamplingConfig(
            temperature=options.answer_temperature, max_new_tokens=options.answer_tokens, seed=options.answer_seed
        )
        config = RegenerateConfig(sampling=sampling, template_kwargs=template_kwargs)
        embedded = EmbeddedGenerate(
            target.model,
            target.tokenizer,
            sampling,
            end_token_ids=target.facts.eos_token_ids,
            batch_size=options.answer_batch,
        )
        sources = [part.strip() for part in data.data.split(",") if part.strip()]
        with packed_products(target.model):
            report = regenerate(sources, out, embedded, config, console)
        _say(report, out, console)
    return replace(data, data=str(out))


def _say(report: RegenerateReport, out: Path, console: Console) -> None:
    cut = f", {report.num_cut:,} of them cut at the longest length" if report.num_cut else ""
    console.print(
        f"the target answered {report.rows_out:,} of {report.rows_in:,} conversations{cut}: {escape(str(out))}",
        highlight=False,
        soft_wrap=True,
    )
    for reason, count in report.skipped.items():
        console.print(f"left out: {count:,} x {reason}", markup=False, highlight=False)
