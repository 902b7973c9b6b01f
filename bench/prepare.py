"""How fast are conversations prepared, beside two peers on the same file, and where do the loss masks differ?

    python bench/prepare.py chats.jsonl                               ours alone
    python bench/prepare.py chats.jsonl --peers ~/peers/bin/python    and SpecForge 0.2.0, speculators 0.9.0

The peers live in an environment of their own:

    python3 -m venv ~/peers
    ~/peers/bin/pip install torch==2.13.0
    ~/peers/bin/pip install transformers==5.17.0 datasets loguru openai pydantic typer
    ~/peers/bin/pip install --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0

Rates are rows of input a second, by the clock and of all processors together. Masks are held against ours row by row:
speculators writes one row a turn, which is compared on that turn. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt

from draftsmith.data.conversations import Conversation
from draftsmith.data.convert import decode_row
from draftsmith.data.prepared import load_prepared
from draftsmith.data.sources import parse_sources, read_mixture
from draftsmith.errors import DraftsmithError
from draftsmith.target.model import TargetConfig, load_tokenizer, locate

PEERS = ("specforge", "speculators")
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Known:
    """Where a token row of a peer lies in ours: the first tokens of a document, up to the end of one of its turns."""

    document: int
    last_turn: int
    """Where the last of these turns begins."""


@dataclass(kw_only=True)
class Differences:
    """What a peer supervises otherwise than we do."""

    counts: Counter[str] = field(default_factory=Counter[str])
    examples: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, kind: str, example: Callable[[], str]) -> None:
        """Count a row; only the first of a kind is told."""
        self.counts[kind] += 1
        if kind not in self.examples:
            self.examples[kind] = example()


def write_conversations(source: str, file: Path, num_rows: int) -> int:
    """The rows that are conversations, as the peers read them; returns how many."""
    written = 0
    with file.open("w", encoding="utf-8") as out:
        for raw in read_mixture(parse_sources(source), 0):
            row = decode_row(raw)
            if isinstance(row, Conversation) and row.messages:
                out.write(json.dumps({"conversations": row.messages}, ensure_ascii=False) + "\n")
                written += 1
            if written == num_rows:
                break
    return written


def run(name: str, python: str, folder: Path, processes: int, tokenizer: Path) -> dict[str, Any]:
    """One preparation in a process of its own; its figures."""
    command = [python, str(Path(__file__).with_name("preparers.py")), name]
    command += [str(folder / "chats.jsonl"), str(tokenizer), str(folder / name), "--processes", str(processes)]
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **settings, "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}\nthe peers are installed so:\n{__doc__}")
    return json.loads(done.stdout.splitlines()[-1])


def spans(mask: Ints) -> list[tuple[int, int]]:
    """Runs of supervised tokens: first, one past the last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def index_rows(rows: Sequence[tuple[Ints, Ints]]) -> dict[bytes, Known]:
    """Every beginning of a document that ends with a turn, with up to two tokens of the template behind it."""
    known: dict[bytes, Known] = {}
    for document, (ids, mask) in enumerate(rows):
        for start, end in spans(mask):
            for length in (end, end + 1, end + 2):
                known.setdefault(ids[:length].tobytes(), Known(document=document, last_turn=start))
    return known


def peer_rows(folder: Path) -> Iterator[tuple[Ints, Ints]]:
    loaded: Any = datasets.load_from_disk(str(folder)).with_format(None)
    for row in loaded:
        ids, mask = (np.asarray(row[name], dtype=np.int64).reshape(-1) for name in ("input_ids", "loss_mask"))
        yield ids, mask


def compare(
    rows: Sequence[tuple[Ints, Ints]], theirs: Iterator[tuple[Ints, Ints]], per_turn: bool, tokenizer: Any
) -> Differences:
    """A peer's rows against ours."""
    known, found = index_rows(rows), Differences()

    def text(ids: Ints, low: int, high: int) -> Callable[[], str]:
        return lambda: repr(tokenizer.decode(ids[max(0, low) : high]))

    for ids, mask in theirs:
        where = known.get(ids.tobytes())
        if where is None:
            found.add("other token ids", text(ids, 0, 80))
            continue
        first = where.last_turn if per_turn else 0
        own = rows[where.document][1][: len(ids)]
        more, fewer = (first + np.flatnonzero(sign * (mask - own)[first:] > 0) for sign in (1, -1))
        if per_turn and mask[:first].any():
            found.add("an earlier turn too", text(ids, 0, 80))
        elif not len(more) and not len(fewer):
            found.add("the same tokens", lambda: "all of them")
        elif not len(fewer) and own[more - 1].all():
            found.add("the token behind an end of turn too", text(ids, int(more[0]) - 3, int(more[0]) + 1))
        else:
            place = int(min([*more, *fewer]))
            kind = "more" if place in more else "fewer"
            found.add(f"{kind} tokens", text(ids, place - 12, place + 12))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="preparation beside two peers")
    parser.add_argument("chats", help="conversations, as draftsmith prepare takes them")
    parser.add_argument("--peers", default="", help="a Python that has the peers")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=0, help="the first rows alone; 0: all")
    options = parser.parse_args()
    target = TargetConfig(target=options.target)
    tokenizer = load_tokenizer(target, locate(target), required=True)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        num_rows = write_conversations(options.chats, folder / "chats.jsonl", options.rows)
        tokenizer.save_pretrained(folder / "tokenizer")
        for name in ("ours", *(PEERS if options.peers else ())):
            python = sys.executable if name == "ours" else options.peers
            figures[name] = run(name, python, folder, options.processes, folder / "tokenizer")
            print_rates(name, figures[name], num_rows, options.processes)
        data = load_prepared(folder / "ours")
        documents = (data.document(index) for index in range(len(data)))
        rows = [(document.token_ids.numpy(), document.loss_mask.numpy().astype(np.int64)) for document in documents]
        for name in PEERS if options.peers else ():
            found = compare(rows, peer_rows(folder / name), name == "speculators", tokenizer)
            figures[name]["masks"] = dict(found.counts)
            for kind, count in found.counts.most_common():
                print(f"{name}: {count:,} rows supervise {kind}; for example {found.examples[kind]}")
    rates = {name: num_rows / figure["processor_s"] for name, figure in figures.items()}
    print(json.dumps({"rows": num_rows, "processes": options.processes, **figures, "rows_a_processor_second": rates}))
    return 0


def print_rates(name: str, figure: dict[str, Any], num_rows: int, processes: int) -> None:
    print(
        f"{name:12} {num_rows / figure['processor_s']:8,.0f} rows a processor second, "
        f"{num_rows / figure['clock_s']:8,.0f} a second by the clock with {processes} processes "
        f"({figure['rows_out']:,} rows out)",
        flush=True,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DraftsmithError as error:
        sys.exit(f"error: {error}")
