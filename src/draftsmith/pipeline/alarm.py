"""The off-policy alarm, run with a real target: are these answers ones that it would give itself?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from draftsmith.data.onpolicy import OnPolicyConfig, OnPolicyReport, TokenScores, check_on_policy, sample_indices
from draftsmith.pipeline.documents import Documents
from draftsmith.pipeline.inputs import write_whole
from draftsmith.pipeline.show import ProgressView
from draftsmith.records import Document
from draftsmith.target.model import Target
from draftsmith.target.score import score_documents

ROWS_ON_GPU, ROWS_ON_CPU = 200, 24


def sound_alarm(
    target: Target, documents: Documents, config: OnPolicyConfig, console: Console, out: Path | None = None
) -> OnPolicyReport | None:
    """Score a sample of the documents, read one by one, print the verdict and keep it in `out`; None where none is
    asked for."""
    auto = ROWS_ON_CPU if target.device.type == "cpu" else ROWS_ON_GPU
    count = auto if config.off_policy_rows == "auto" else config.off_policy_rows
    if not count:
        return None
    # Alike lengths share a forward: less padding.
    chosen = sorted(sample_indices(len(documents), count), key=documents.lengths.__getitem__)
    sample = [documents[index] for index in chosen]
    done = 0
    with ProgressView(console, "are these the target's own answers?", len(sample)) as view:

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            view.update(done, "")

        report = check_on_policy(sample, lambda rows: _score(target, rows), config, advance)
    report.print(console)
    if out is not None:
        write_whole(out, json.dumps({"target": target.facts.name, **report.to_dict()}, indent=1))
    return report


def _score(target: Target, documents: Sequence[Document]) -> list[TokenScores]:
    return [TokenScores(nll=nll, entropy=entropy) for nll, entropy in score_documents(target, documents)]
