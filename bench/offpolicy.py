"""Does the off-policy alarm tell a target's own answers from text by others? SmolLM2 on the CPU: ~60,000 tokens.

Own: answers that ship with the package (sampled at temperature 0.7). Foreign: docstrings of Python's standard library,
as answers to "Explain NAME in Python." Beside them, answers sampled here at temperature 1, where mean(NLL - entropy)
is 0 by definition. `--picture FILE` draws the distributions.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import inspect
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import torch
from rich.console import Console

from draftsmith.data.conversations import Conversation, Skip, parse_row
from draftsmith.data.embedded import EmbeddedGenerate
from draftsmith.data.onpolicy import OnPolicyConfig, OnPolicyReport, TokenScores, check_on_policy, sample_indices
from draftsmith.data.prepare import PrepareConfig, prepare
from draftsmith.data.regenerate import Prompt, SamplingConfig, answer_all
from draftsmith.data.tokenize import ConversationTokenizer, TokenizeConfig, as_document
from draftsmith.records import Document
from draftsmith.target.model import Target, TargetConfig, load_target
from draftsmith.target.score import score_documents

MODULES = """
argparse asyncio bisect codecs collections concurrent.futures contextlib csv ctypes datetime decimal difflib dis
email.message fractions functools gettext glob gzip heapq html http.client inspect io itertools json logging
mailbox math multiprocessing operator os os.path pathlib pickle platform queue random re sched selectors shelve
shutil signal socket socketserver sqlite3 ssl statistics string struct subprocess tarfile tempfile textwrap
threading timeit tokenize traceback turtle types unittest unittest.mock urllib.parse urllib.request uuid
warnings wave weakref xml.dom.minidom xml.sax.handler zipfile zlib
"""
MIN_CHARACTERS = 250
"""Shorter docstrings say little about their writer."""


def docstring_rows(num_rows: int) -> list[Conversation]:
    """Text by people that every Python brings along, spread over its modules."""
    found: dict[str, str] = {}
    for module_name in MODULES.split():
        for name, member in sorted(vars(importlib.import_module(module_name)).items()):
            if name.startswith("_") or not (inspect.isroutine(member) or inspect.isclass(member)):
                continue
            text = inspect.cleandoc(member.__doc__ or "") if isinstance(member.__doc__, str) else ""
            if len(text) >= MIN_CHARACTERS and text not in found.values():
                found[f"{module_name}.{name}"] = text
    names = [list(found)[place] for place in sample_indices(len(found), num_rows)]
    return [conversation(f"Explain {name} in Python.", found[name]) for name in names]


def conversation(question: str, answer: str) -> Conversation:
    return Conversation(messages=({"role": "user", "content": question}, {"role": "assistant", "content": answer}))


def sampled_rows(target: Target, questions: Sequence[str], num_tokens: int) -> list[Conversation]:
    """Answers of the target at temperature 1."""
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=num_tokens)
    generate = EmbeddedGenerate(target.model, target.tokenizer, sampling)
    prompts = [
        Prompt(messages=[{"role": "user", "content": text}], tools=(), template_kwargs={}, seed=row)
        for row, text in enumerate(questions)
    ]
    answers = [answer for answer in answer_all(generate, prompts) if not isinstance(answer, Skip)]
    return [
        Conversation(
            messages=({"role": "user", "content": text}, answer.message),
            finish_reason=answer.finish_reason,
            prompt_ids=answer.prompt_ids,
            completion_ids=answer.completion_ids,
        )
        for text, answer in zip(questions, answers, strict=True)
    ]


def documents_of(target: Target, rows: Sequence[Conversation], num_tokens: int) -> list[Document]:
    """The rows as training would see them, each cut behind its first `num_tokens` supervised tokens."""
    tokenize = ConversationTokenizer(target.tokenizer, TokenizeConfig())
    results = [tokenize.tokenize(row) for row in rows]
    whole = [as_document(row) for result in results if not isinstance(result, Skip) for row in result.rows]
    return [cut_behind(document, num_tokens) for document in whole]


def cut_behind(document: Document, num_tokens: int) -> Document:
    end = int((document.loss_mask.cumsum(0) <= num_tokens).sum())
    return Document(token_ids=document.token_ids[:end], loss_mask=document.loss_mask[:end])


def score(target: Target, documents: Sequence[Document]) -> list[TokenScores]:
    return [TokenScores(nll=nll, entropy=entropy) for nll, entropy in score_documents(target, documents)]


def separation(own: Sequence[float], foreign: Sequence[float]) -> float:
    """Probability that a foreign row lies above one of the target's own (area under the ROC curve)."""
    wins = sum((theirs > ours) + 0.5 * (theirs == ours) for theirs in foreign for ours in own)
    return wins / (len(own) * len(foreign))


def draw(reports: dict[str, OnPolicyReport], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    edges = [-2.5 + 0.125 * step for step in range(41)]
    figure, axes = pyplot.subplots(figsize=(7.2, 3.4), layout="constrained")
    for (name, report), color in zip(reports.items(), ("#2a7", "#d63", "#47c"), strict=True):
        gaps = [min(max(gap, edges[0]), edges[-1]) for gap in report.gaps]
        weights = [1 / len(gaps)] * len(gaps)
        label = f"{name}: {report.mean:+.2f} ± {2 * report.standard_error:.2f} ({len(gaps)} rows)"
        axes.hist(gaps, bins=edges, weights=weights, alpha=0.55, color=color, label=label)
        axes.axvline(report.mean, color=color, linewidth=1.5)
    axes.axvline(0.0, color="#555", linewidth=0.8, linestyle=":")
    axes.set_xlabel("mean(NLL - entropy) of a row, nats a token")
    axes.set_ylabel("share of rows")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200, help="rows of each kind")
    parser.add_argument("--tokens", type=int, default=80, help="supervised tokens scored of a row")
    parser.add_argument("--sampled-rows", type=int, default=30, help="answers sampled here at temperature 1")
    parser.add_argument("--sampled-tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(TargetConfig(target="smollm2"), "cpu")
    assets = Path(str(files("draftsmith"))) / "assets" / "quickstart"
    packaged = prepare(assets / "train.jsonl.gz", target.tokenizer, None, PrepareConfig())
    own = [packaged.document(index) for index in sample_indices(len(packaged), options.rows)]
    asked = [question for name in ("val", "train") for question in questions_of(assets / f"{name}.jsonl.gz")]
    questions = asked[: options.sampled_rows]
    documents = {
        "own, T = 0.7": [cut_behind(document, options.tokens) for document in own],
        "foreign (docstrings)": documents_of(target, docstring_rows(options.rows), options.tokens),
        "own, T = 1": documents_of(
            target, sampled_rows(target, questions, options.sampled_tokens), options.sampled_tokens
        ),
    }
    console = Console(file=sys.stderr)
    config = OnPolicyConfig(off_policy_rows=options.rows, off_policy_batch=4)
    reports: dict[str, OnPolicyReport] = {}
    for name, rows in documents.items():
        console.rule(f"{name}, {len(rows)} rows")
        reports[name] = check_on_policy(rows, lambda batch: score(target, batch), config)
        reports[name].print(console)
    if options.picture is not None:
        draw(reports, options.picture)
    gaps = [report.gaps for report in reports.values()]
    result = {name: {**asdict(report), "gaps": None, "verdict": report.verdict} for name, report in reports.items()}
    print(json.dumps({**result, "separation": round(separation(gaps[0], gaps[1]), 4), "sampled_z": sampled_z(reports)}))


def questions_of(file: Path) -> list[str]:
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        rows = [parse_row(json.loads(line)) for line in stream]
    return [str(row.messages[0]["content"]) for row in rows if isinstance(row, Conversation)]


def sampled_z(reports: dict[str, OnPolicyReport]) -> float:
    """Standard errors between 0 and the mean of the rows sampled here: within 2 in most runs."""
    report = reports["own, T = 1"]
    return round(report.mean / report.standard_error, 2) if report.standard_error else math.nan


if __name__ == "__main__":
    main()
