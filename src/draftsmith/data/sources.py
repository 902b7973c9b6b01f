"""Files, folders and data sets -> raw rows, streamed. What kind a file is, is read from its bytes, not from its name.

A source is a path or hub id, with an optional weight after a colon: `chats.jsonl:0.3` takes 30% of its rows,
`math.jsonl:2` takes each twice. Lines of JSON stay bytes here, so that worker processes decode them.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import zstandard

from draftsmith.data.arrow import ArrowError, parquet
from draftsmith.data.conversations import Skip, encodable
from draftsmith.errors import DataError

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".gz", ".zst")
GZIP_MAGIC, ZSTD_MAGIC, PARQUET_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
BUFFER = 1 << 20
MAX_ELEMENT = 1 << 26
"""Characters of one array element past which it is taken for broken, so that memory stays bounded."""
READ_ERRORS = (OSError, EOFError, zlib.error, zstandard.ZstdError, UnicodeDecodeError, ArrowError)
MESSAGES_HEAD = re.compile(rb'\[[ \t]*\{[ \t]*"(role|from|content|value)"[ \t]*:')
"""How a line begins that is a bare list of messages: one conversation, where an array's elements would be rows."""
SAVED_MARKS = ("state.json", "dataset_dict.json")


@dataclass(frozen=True, slots=True)
class Source:
    """One member of a mixture."""

    location: str
    weight: float = 1.0

    @property
    def path(self) -> Path:
        return Path(self.location)


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row not yet decoded: a line of JSON, a decoded value, or the reason why neither could be had."""

    position: str
    value: bytes | object | Skip
    is_repeat: bool = False
    """Whether a weight above 1 brought the row again (no duplicate to drop)."""


def parse_sources(spec: str | Path | Sequence[str | Path]) -> tuple[Source, ...]:
    """`path`, `path:weight` or a list of these.

    Raises:
        DataError: nothing given, a weight that isn't positive, or a place that isn't there.
    """
    given = [spec] if isinstance(spec, (str, Path)) else list(spec)
    if not given:
        raise DataError("no conversations given: name a file, a folder or a data set, e.g. --data chats.jsonl")
    return tuple(_parse_source(str(item)) for item in given)


def _parse_source(text: str) -> Source:
    match = re.fullmatch(r"(.+):([0-9]*\.?[0-9]+)", text)
    location, weight = text, 1.0
    if match and not Path(text).exists():
        location, weight = match.group(1), float(match.group(2))
    if weight <= 0:
        raise DataError(f"weight 0 in {text!r} leaves nothing: give a weight above 0 or leave the source out")
    source = Source(location, weight)
    if not source.path.exists() and not is_hub_id(location):
        raise DataError(f"no such file or folder: {location}: check the path, or give a data set id like owner/name")
    return source


def is_hub_id(location: str) -> bool:
    """owner/name[@split], not the name of a conversation file."""
    named = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w\[\]:%+.-]+)?", location) is not None
    return named and not location.startswith((".", "~")) and not location.endswith(SUFFIXES)


def data_files(source: Source) -> list[Path]:
    """The files of a source on disk, in name order.

    Raises:
        DataError: an empty folder, or an empty file given by name.
    """
    path = source.path
    if path.is_file():
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty: give a file with one conversation a line")
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
    if not found:
        raise DataError(f"{path} holds no conversation file: it needs files ending in {', '.join(SUFFIXES)}")
    return found


def is_saved_dataset(path: Path) -> bool:
    return path.is_dir() and any((path / mark).is_file() for mark in SAVED_MARKS)


def read_source(source: Source) -> Iterator[RawRow]:
    """Every row of one source, in order, before weights. A damaged end of a file is a row of its own: a Skip."""
    if not source.path.exists():
        yield from _read_hub(source.location)
    elif is_saved_dataset(source.path):
        yield from _read_saved(source.path)
    else:
        for file in data_files(source):
            yield from _read_file(file)


def read_mixture(sources: Sequence[Source], seed: int) -> Iterator[RawRow]:
    """The rows of all sources after weights: a row that its weight leaves out comes as a Skip, a repeated one comes
    again."""
    for source in sources:
        whole, part = divmod(source.weight, 1.0)
        for index, row in enumerate(read_source(source)):
            copies = int(whole) + (part > 0 and _share(seed, source.location, index) < part)
            if copies == 0:
                yield RawRow(row.position, Skip("left out by the weight of its source"))
            for copy in range(copies):
                yield RawRow(row.position, row.value, is_repeat=copy > 0)


def _share(seed: int, location: str, index: int) -> float:
    """A uniform number in [0, 1) that depends on these alone, so that resuming or sharding draws the same rows."""
    digest = hashlib.blake2b(f"{seed}\0{location}\0{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def content_digest(source: Source) -> tuple[str, int | None]:
    """(hash of all bytes or of the data set's own fingerprint, number of lines where rows are lines)."""
    digest = hashlib.blake2b(digest_size=16)
    if not source.path.exists():
        digest.update(source.location.encode())
        return digest.hexdigest(), None
    files = data_files(source) if not is_saved_dataset(source.path) else _all_files(source.path)
    lines = 0
    for file in files:
        digest.update(os.fsencode(file.name) + b"\0")
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
                lines += block.count(b"\n")
    are_plain_lines = all(file.name.endswith((".jsonl", ".ndjson")) for file in files)
    return digest.hexdigest(), lines if are_plain_lines else None


def _all_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _read_file(file: Path) -> Iterator[RawRow]:
    number, name = 0, encodable(file.name)
    try:
        with io.BufferedReader(file.open("rb", buffering=0), BUFFER) as raw:
            magic = raw.peek(4)[:4]
            if magic == PARQUET_MAGIC:
                rows = _read_parquet(file)
            else:
                rows = _read_text(_decompressed(raw, magic), name)
            for row in rows:
                number += 1
                yield row
    except READ_ERRORS as damage:
        yield RawRow(f"{name} after row {number}", Skip("the rest of the file can't be read", str(damage)[:120]))


def _decompressed(raw: io.BufferedReader[Any], magic: bytes) -> io.BufferedReader[Any]:
    if magic.startswith(GZIP_MAGIC):
        # It buffers by itself; a larger buffer around it would lose whole blocks before a damaged place.
        return cast(io.BufferedReader, gzip.GzipFile(fileobj=raw))
    if magic == ZSTD_MAGIC:
        return io.BufferedReader(_ZstdReader(raw), BUFFER)
    return raw


class _ZstdReader(io.RawIOBase):
    """All frames of a zstd file; unlike the library's own reader, a file that ends inside a frame is an error."""

    def __init__(self, compressed: io.BufferedReader[Any]) -> None:
        self._compressed = compressed
        self._frame: Any = None
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._pending:
            block = self._compressed.read(1 << 16)
            if not block:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self._pending = self._decompress(block)
        size = min(len(buffer), len(self._pending))
        buffer[:size], self._pending = self._pending[:size], self._pending[size:]
        return size

    def _decompress(self, block: bytes) -> bytes:
        parts: list[bytes] = []
        while block:
            frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(block))
            self._frame, block = (None, frame.unused_data) if frame.eof else (frame, b"")
        return b"".join(parts)


def _read_text(stream: io.BufferedReader[Any], name: str) -> Iterator[RawRow]:
    head = stream.peek(4096)[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        after = head[1:].lstrip()
        if after.startswith((b"{", b"[", b"]")) and not _begins_with_messages(head, stream.peek(BUFFER)):
            yield from _read_array(stream, name)
            return
    for number, line in enumerate(stream, start=1):
        line = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
        if line:
            yield RawRow(f"{name}:{number}", line)


def _begins_with_messages(head: bytes, block: bytes) -> bool:
    """Whether rows are bare message lists, one a line: by how the first begins, or since it is a complete JSON list
    with another after it."""
    if MESSAGES_HEAD.match(head):
        return True
    line, newline, rest = block.partition(b"\n")
    if not newline or not rest.strip().startswith(b"["):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _read_array(stream: io.BufferedReader[Any], name: str) -> Iterator[RawRow]:
    """Elements of one JSON array, decoded one after another: memory holds a block and one element."""
    decoder = json.JSONDecoder()
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()

    def read(size: int) -> str:
        block = stream.read(size)
        return utf8.decode(block, final=not block)

    buffer, number = read(1 << 16).lstrip()[1:], 0
    while True:
        buffer = buffer.lstrip(" \t\r\n,")
        if buffer.startswith("]"):
            if buffer[1:].strip() or read(1 << 16).strip():
                yield RawRow(f"{name} after [{number - 1}]", Skip("text after the end of the JSON array"))
            return
        try:
            value, end = decoder.raw_decode(buffer)
        except (ValueError, RecursionError) as error:
            block = read(max(1 << 16, len(buffer))) if len(buffer) < MAX_ELEMENT else ""
            if not block:
                yield RawRow(f"{name}[{number}]", Skip("broken JSON: the array ends here", str(error)[:120]))
                return
            buffer += block
            continue
        yield RawRow(f"{name}[{number}]", value)
        number += 1
        buffer = buffer[end:]


def _read_parquet(file: Path) -> Iterator[RawRow]:
    number = 0
    for batch in parquet.ParquetFile(file).iter_batches(batch_size=256):
        for row in cast(list[dict[str, Any]], batch.to_pylist()):
            yield RawRow(f"{encodable(file.name)}[{number}]", row)
            number += 1


def _read_saved(path: Path) -> Iterator[RawRow]:
    import datasets  # heavy, and rarely needed

    loaded: Any = datasets.load_from_disk(str(path))
    parts = cast(dict[str, Any], loaded) if isinstance(loaded, dict) else {path.name: loaded}
    for name, part in parts.items():
        for number, row in enumerate(part):
            yield RawRow(f"{name}[{number}]", row)


def _read_hub(location: str) -> Iterator[RawRow]:
    import datasets  # heavy, and rarely needed

    name, _, split = location.partition("@")
    try:
        stream: Any = datasets.load_dataset(name, split=split or "train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise DataError(
            f"{location} is no file here and the data set can't be loaded ({first}): check the path or the id and split"
        ) from error
    for number, row in enumerate(stream):
        yield RawRow(f"{location}[{number}]", row)
