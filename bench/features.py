"""How fast are features on disk written and read, against the disk's own rates?

    python bench/features.py --folder /data/scratch --shape qwen3-8b --batches 6

Random features of full batches through StoreWriter and ShardReadLoop (checksums, rename, fsync included), beside the
same bytes through plain writes and reads of 16 MiB. The files' pages are dropped before each read; what stands behind
the disk (a host, a controller) may still remember them, hence plain reads twice. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, Shape

from draftsmith.pipeline.buffers import FeatureRing, RingPlace
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.store import Origin, ShardReadLoop, StoreWriter, index_of, read_index
from draftsmith.records import FeatureBatch

BLOCK = 16 << 20


def random_batch(shape: Shape) -> FeatureBatch:
    """A full batch of random bits: nothing that a disk could compress."""
    batch = FeatureBatch.allocate(shape.batch, "cpu")
    batch.lengths_D[0] = shape.num_tokens
    batch.num_tokens.fill_(shape.num_tokens)
    batch.features_TFH.view(torch.int16).random_(generator=torch.Generator().manual_seed(0))
    return batch


def drop_pages(folder: Path) -> None:
    """Write back and forget every file's pages, so that the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_write(folder: Path, content: memoryview, files: int) -> None:
    for number in range(files):
        with (folder / f"plain-{number}").open("wb", buffering=0) as file:
            for low in range(0, len(content), BLOCK):
                file.write(content[low : low + BLOCK])
            os.fsync(file.fileno())


def plain_read(folder: Path, files: int) -> None:
    into = bytearray(BLOCK)
    for number in range(files):
        with (folder / f"plain-{number}").open("rb", buffering=0) as file:
            while file.readinto(into):
                pass


def rate(work: Callable[[], None], num_bytes: int) -> float:
    """GB/s."""
    started = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - started) / 1e9


def read_epoch(loop: ShardReadLoop, ring: FeatureRing, batches: int, epoch: int) -> None:
    for number in range(epoch * batches, (epoch + 1) * batches):
        loop.produce(number)
        ring.receive(number)
        ring.release(number)


def measure(folder: Path, shape: Shape, batches: int) -> dict[str, Any]:
    batch = random_batch(shape)
    content = memoryview(batch.features_TFH.view(torch.int16).numpy()).cast("B")
    plain, store = folder / "plain", folder / "store"
    plain.mkdir(parents=True)
    row: dict[str, Any] = {"gb": batches * len(content) / 1e9}
    total = batches * len(content)
    row["disk_write"] = rate(lambda: plain_write(plain, content, batches), total)
    drop_pages(plain)
    row["disk_read"] = rate(lambda: plain_read(plain, batches), total)
    drop_pages(plain)
    row["disk_read_again"] = rate(lambda: plain_read(plain, batches), total)
    shutil.rmtree(plain)
    origin = Origin(target=shape_name(shape), taps=shape.drafter.taps, data_fingerprint="", num_supervised=1)
    writer = StoreWriter(store, index_of(shape.batch, batches, origin))
    written: list[int] = []
    started = time.perf_counter()
    written.extend(writer.write(number, batch) for number in range(batches))
    row["store_write"] = sum(written) / (time.perf_counter() - started) / 1e9
    place = RingPlace(name="the ring", device=torch.device("cpu"), pin=False, num_slots=2, stall_seconds=60)
    ring = FeatureRing(shape.batch, place, Stop())
    loop = ShardReadLoop("reader 0", store, read_index(store), [ring], 0)
    drop_pages(store)
    row["store_read_first"] = rate(lambda: read_epoch(loop, ring, batches, 0), sum(written))
    drop_pages(store)
    row["store_read_later"] = rate(lambda: read_epoch(loop, ring, batches, 1), sum(written))
    row["store_read_cached"] = rate(lambda: read_epoch(loop, ring, batches, 2), sum(written))
    row["write_share"] = row["store_write"] / row["disk_write"]
    row["read_share_first"] = row["store_read_first"] / row["disk_read"]
    row["read_share_later"] = row["store_read_later"] / row["disk_read_again"]
    row["tokens_per_s_read"] = batches * shape.num_tokens * row["store_read_later"] * 1e9 / sum(written)
    return row


def shape_name(shape: Shape) -> str:
    return next(name for name, known in SHAPES.items() if known is shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="on the disk to measure; a folder in it is made and removed")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--batches", type=int, default=6)
    arguments = parser.parse_args()
    folder = Path(arguments.folder) / f"draftsmith-bench-{os.getpid()}"
    try:
        row = measure(folder, SHAPES[arguments.shape], arguments.batches)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for key, value in row.items():
        print(f"{key:20} {value:,.2f}")
    print(json.dumps({"shape": arguments.shape, "batches": arguments.batches, **row}))


if __name__ == "__main__":
    main()
