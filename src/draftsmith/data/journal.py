"""The journal of a regeneration: `OUT.partial`, to which every answer is appended as it comes.

A first line holds the settings; then comes one JSON line an answer, and one a finished row, in the order they finished.
Lines reach the operating system at once (a killed process loses none) and the disk every `SYNC_SECONDS`. At the end the
rows are written to `OUT` in input order and renamed into place.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from draftsmith.data.conversations import CUT_REASONS, encodable
from draftsmith.errors import DataError

FORMAT = 2
"""Part of the settings line: raised when the lines change their meaning."""
SYNC_SECONDS = 1.0
"""What a power cut may take, at most; a killed process takes nothing."""
ABSENT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateReport:
    """What became of the rows."""

    rows_in: int
    rows_out: int
    skipped: Mapping[str, int]
    num_cut: int


class Journal:
    """Answers and finished rows on disk, found again by the number of their input row.

    A half-written or damaged line, as a kill or a power cut leaves it, is passed over and its answer asked for again;
    so are rows that a server refused, since the next run may ask it better (another model's name, a longer context).
    Memory: 8 bytes a row.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._rows = array("q")
        """By row number: where its last line begins, or `ABSENT`."""
        self._answers: dict[int, list[int]] = {}
        """Of rows not finished yet: where the lines of their answers begin, first turn first."""
        mark = json.dumps({"format": FORMAT, "settings": settings}, sort_keys=True, default=str).encode() + b"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            self._open(mark)
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def _open(self, mark: bytes) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"another draftsmith regenerate is writing {self._path}: let it end, or choose another --out"
            ) from None
        first = self._file.readline()
        if first.endswith(b"\n") and first != mark:
            raise DataError(
                f"{self._path} was begun with other data or settings: give the same ones to go on, or remove it"
            )
        whole = self._read() if first == mark else 0
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._write(mark)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def _read(self) -> int:
        """Note where each line begins; returns where the last whole line ends."""
        whole = self._file.tell()
        while (line := self._file.readline()).endswith(b"\n"):
            try:
                entry = cast(dict[str, Any], json.loads(line))
                self._note(int(entry["index"]), entry, whole)
            except (ValueError, KeyError, TypeError):
                pass  # its answer is asked for again
            whole = self._file.tell()
        return whole

    def _note(self, index: int, entry: Mapping[str, Any], offset: int) -> None:
        if "answer" in entry:
            self._answers.setdefault(index, []).append(offset)
        elif not entry.get("asked"):
            self._answers.pop(index, None)
            self._place(index, offset)

    def _place(self, index: int, offset: int) -> None:
        if index >= len(self._rows):
            self._rows.extend([ABSENT] * (index + 1 - len(self._rows)))
        self._rows[index] = offset

    def is_done(self, index: int) -> bool:
        return index < len(self._rows) and self._rows[index] != ABSENT

    def answers(self, index: int) -> list[dict[str, Any]]:
        """The answers, first turn first, that an earlier run had to a row which it didn't finish."""
        end = self._file.tell()
        lines = [self._line(offset) for offset in self._answers.pop(index, [])]
        self._file.seek(end)
        return [line["answer"] for turn, line in enumerate(lines) if line["turn"] == turn]

    def add_answer(self, index: int, turn: int, answer: Mapping[str, Any]) -> None:
        """Keep the answer to a row's turn (counted from 0) that more turns follow."""
        self._append({"index": index, "turn": turn, "answer": answer})

    def add_row(self, index: int, line: Mapping[str, Any]) -> None:
        """Keep a finished row: {"row": ...} or {"skipped": reason, "detail": ...}."""
        self._place(index, self._append({"index": index, **line}))

    def _append(self, line: Mapping[str, Any]) -> int:
        offset = self._file.tell()
        self._write(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()
        return offset

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()

    def _line(self, offset: int) -> dict[str, Any]:
        self._file.seek(offset)
        return cast(dict[str, Any], json.loads(self._file.readline()))

    def finish(self, target: Path) -> RegenerateReport:
        """Rows in input order into `target`, settings and counts beside it; the journal goes.

        Raises:
            DataError: not one row.
        """
        skipped: Counter[str] = Counter()
        examples: dict[str, str] = {}
        num_out = num_cut = 0
        fresh = target.with_name(target.name + ".new")
        settings = self._line(0)["settings"]
        done = [offset for offset in self._rows if offset != ABSENT]
        with fresh.open("wb") as output:
            for entry in map(self._line, done):
                if "row" not in entry:
                    skipped[entry["skipped"]] += 1
                    examples.setdefault(entry["skipped"], encodable(entry.get("detail", "")))
                    continue
                num_out += 1
                num_cut += entry["row"]["finish_reason"] in CUT_REASONS
                output.write(json.dumps(entry["row"], ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
            output.flush()
            os.fsync(output.fileno())
        report = RegenerateReport(
            rows_in=len(done), rows_out=num_out, skipped=dict(skipped.most_common()), num_cut=num_cut
        )
        if not num_out:
            fresh.unlink()
            raise DataError(f"no row could be regenerated: {_reasons(skipped, examples)} (see {self._path})")
        account = target.with_name(target.name + ".account.json")
        account.write_text(json.dumps({**asdict(report), "settings": settings}, indent=2), encoding="utf-8")
        os.replace(fresh, target)
        self._path.unlink()
        return report


def _reasons(skipped: Counter[str], examples: Mapping[str, str]) -> str:
    listed: Sequence[str] = [f"{reason} ({count}) {examples[reason]}" for reason, count in skipped.most_common(3)]
    return "; ".join(listed) or "the source is empty"
