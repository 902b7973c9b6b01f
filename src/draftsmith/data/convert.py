"""Raw rows -> token rows, in this process or in several, always in order."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from draftsmith.data.conversations import Conversation, Skip, parse_row
from draftsmith.data.duplicates import Duplicates, Signature, signature_of
from draftsmith.data.sources import RawRow
from draftsmith.data.tokenize import ConversationTokenizer, TokenizeConfig, Tokenized, TokenRow
from draftsmith.errors import WorkerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_ROWS = 128
"""Rows that go to a worker process at a time."""
CHUNKS_AHEAD = 3
"""Chunks waiting per worker: bounds memory, hides the reader."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One document as it is written: int32 ids and int8 mask."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.int8]

    @classmethod
    def of(cls, row: TokenRow) -> PackedRow:
        return cls(np.asarray(row.ids, dtype=np.int32), np.asarray(row.mask, dtype=np.int8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What one raw row became."""

    position: str
    outcome: Tokenized | Skip
    packed: tuple[PackedRow, ...] = ()
    signature: Signature | None = None
    template_arguments: str = "{}"
    is_repeat: bool = False
    """Whether a weight above 1 brought the row again: it shares the fate of the row before it."""


class RowConverter:
    """Decode, normalise and tokenise one raw row after another."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TokenizeConfig, duplicates: Duplicates) -> None:
        self._tokenize = ConversationTokenizer(tokenizer, options)
        self._options = options
        self._duplicates: Duplicates = duplicates

    def convert(self, raw: RawRow) -> Converted:
        conversation = decode_row(raw)
        if isinstance(conversation, Skip):
            return Converted(position=raw.position, outcome=conversation, is_repeat=raw.is_repeat)
        outcome = self._tokenize.tokenize(conversation)
        if isinstance(outcome, Skip):
            return Converted(position=raw.position, outcome=outcome, is_repeat=raw.is_repeat)
        packed = tuple(PackedRow.of(row) for row in outcome.rows)
        return Converted(
            position=raw.position,
            outcome=Tokenized(
                rows=(),
                turns_left_out=outcome.turns_left_out,
                whole_tokens=outcome.whole_tokens,
                total_tokens=outcome.total_tokens,
                rows_cut=outcome.rows_cut,
            ),
            packed=packed,
            signature=None if raw.is_repeat else signature_of(conversation, self._duplicates),
            template_arguments=json.dumps(
                {**conversation.template_kwargs, **self._options.template_kwargs}, sort_keys=True, default=str
            ),
            is_repeat=raw.is_repeat,
        )

    def convert_all(self, rows: list[RawRow]) -> list[Converted]:
        return [self.convert(row) for row in rows]


def decode_row(raw: RawRow, *, unanswered: bool = False) -> Conversation | Skip:
    """The conversation of a raw row, `unanswered` ones if asked for; a line that isn't JSON is a Skip that says where
    it breaks."""
    if isinstance(raw.value, Skip):
        return raw.value
    value = raw.value
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except RecursionError:
            return Skip("broken JSON line", "nested too deep")
        except ValueError as error:
            return Skip("broken JSON line", str(error)[:120])
    return parse_row(value, raw.position, unanswered=unanswered)


def convert_rows(rows: Iterable[RawRow], converter: RowConverter, num_workers: int) -> Iterator[Converted]:
    """Convert in input order; `num_workers` processes, 1 for this one, 0 for as many as there are cores.

    Raises:
        WorkerError: a process died (killed for memory, say).
    """
    num_workers = num_workers or os.cpu_count() or 1
    if num_workers == 1:
        yield from map(converter.convert, rows)
        return
    iterator = iter(rows)
    waiting: deque[Future[list[Converted]]] = deque()
    # A fork of this process would inherit locked thread pools of the tokenizer; one of a fork server inherits nothing
    # but modules, whose import would otherwise cost every worker seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.tokenization_utils_tokenizers"])
    with ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(converter,)) as pool:
        while True:
            while len(waiting) < num_workers * CHUNKS_AHEAD and (chunk := list(islice(iterator, CHUNK_ROWS))):
                waiting.append(pool.submit(_convert_chunk, chunk))
            if not waiting:
                return
            try:
                converted = waiting.popleft().result()
            except BrokenProcessPool as error:
                raise WorkerError(
                    "a process that tokenises died, often for want of memory: run the same command again with fewer "
                    "--workers; finished shards are kept"
                ) from error
            yield from converted


_worker_converter: list[RowConverter] = []
"""The converter of this worker process, put there once by `_start_worker`."""


def _start_worker(converter: RowConverter) -> None:
    _worker_converter.append(converter)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker holds both ends of the queue that it reads, so it would wait for ever for a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _convert_chunk(rows: list[RawRow]) -> list[Converted]:
    return _worker_converter[0].convert_all(rows)
