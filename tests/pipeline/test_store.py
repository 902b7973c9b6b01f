"""Features on disk: what is read back trains to the same bits; a killed capture goes on; a damaged shard is named."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.errors import DataError, StalledError
from draftsmith.pipeline.assemble import Team, build_drafters, build_rings
from draftsmith.pipeline.inputs import capture_features
from draftsmith.pipeline.store import (
    INDEX,
    Origin,
    ShardReadLoop,
    StoreIndex,
    StoreWriter,
    index_of,
    read_index,
    shard_path,
    stored_batch,
)
from draftsmith.pipeline.team import run_workers
from draftsmith.target.capture import PackedCapture
from tests.families import FAMILIES, fresh_target
from tests.pipeline.tiny import (
    FAMILY,
    SEED,
    SHAPE,
    TAPS,
    LossLog,
    Sizes,
    blueprint,
    documents,
    order,
    run_threads,
)

assert FAMILY in FAMILIES
ORIGIN = Origin(target="tiny", taps=TAPS, data_fingerprint="f", num_supervised=100)


def captured(folder: Path, done: list[int] | None = None, stop_after: int = 1000) -> StoreIndex:
    index = index_of(SHAPE, order().num_batches(0), ORIGIN)

    def tell(number: int, _total: int, _tokens: int) -> None:
        if done is not None:
            done.append(number)
            if len(done) >= stop_after:
                raise KeyboardInterrupt

    with PackedCapture(fresh_target(FAMILY), TAPS, index.shape) as capture:
        return capture_features(folder, capture, documents(), order(), index, tell)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "features"
    captured(folder)
    return folder


def train_from(folder: Path, sizes: Sizes) -> LossLog:
    plan, log = blueprint(sizes, fresh_target(FAMILY)), LossLog()
    rings = build_rings(plan)
    drafters, streams = build_drafters(plan, rings, log)
    producers = [ShardReadLoop(f"reader {i}", folder, read_index(folder), rings, SEED) for i in range(sizes.targets)]
    log.team = team = Team(
        producers=list(producers),
        drafters=drafters,
        streams=streams,
        rings=rings,
        placement=plan.placement,
        stop=plan.stop,
    )
    run_workers(team.workers(), plan.stop, lambda: None)
    team.close()
    return log


@pytest.mark.parametrize("drafters", [1, 2])
def test_training_from_a_store_equals_the_online_run_to_the_bit(store: Path, drafters: int) -> None:
    draws = 2
    steps = order().num_batches(0) // drafters * draws
    assert steps >= 4
    sizes = Sizes(targets=1, drafters=drafters, steps=steps, draws=draws)
    assert train_from(store, sizes).losses == run_threads(sizes).losses


def test_later_epochs_read_every_batch_in_a_fresh_order(store: Path) -> None:
    count = read_index(store).num_batches
    epochs = [[stored_batch(epoch * count + place, count, 0) for place in range(count)] for epoch in range(4)]
    assert epochs[0] == list(range(count))
    assert all(sorted(epoch) == epochs[0] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    log = train_from(store, Sizes(steps=count + 2, draws=1))
    assert len(log.losses) == count + 2


def test_every_row_of_a_slot_is_written(store: Path) -> None:
    """A slot that held a longer batch must not keep its rows."""
    plan = blueprint(Sizes(slots=1), fresh_target(FAMILY))
    (ring,) = build_rings(plan)
    reader = ShardReadLoop("reader 0", store, read_index(store), [ring], SEED)
    lengths = [document.length for document in documents()]
    fill = [sum(lengths[document] for document in order().batch(n).documents) for n in range(order().num_batches(0))]
    shortest = fill.index(min(fill))
    ring.start_at(shortest)
    for tensor in ring.acquire(shortest).batch.tensors().values():
        tensor.fill_(1)
    reader.produce(shortest)
    batch = ring.receive(shortest).batch
    used = int(batch.num_tokens)
    assert 0 < used < SHAPE.num_tokens
    assert not batch.features_TFH[used:].any()
    assert not batch.token_ids_T[used:].any()
    assert int(batch.lengths_D.sum()) == used
    assert reader.clock.tokens == used


def test_a_killed_capture_goes_on_where_it_stopped(store: Path, tmp_path: Path) -> None:
    folder, first, second = tmp_path / "features", list[int](), list[int]()
    with pytest.raises(KeyboardInterrupt):
        captured(folder, first, stop_after=2)
    with pytest.raises(DataError, match=r"lacks \d+ of \d+ batches \(the first: 2\).*it goes on where it stopped"):
        read_index(folder)
    captured(folder, second)
    count = read_index(folder).num_batches
    assert second == list(range(3, count + 1))
    for number in range(count):
        assert shard_path(folder, number).read_bytes() == shard_path(store, number).read_bytes()


@pytest.mark.parametrize("leftover", ["features.json.tmp", "batch-000001.safetensors.tmp"])
def test_what_a_kill_leaves_is_written_over(tmp_path: Path, leftover: str) -> None:
    folder = tmp_path / "features"
    index = index_of(SHAPE, 3, ORIGIN)
    if leftover.startswith("batch"):
        StoreWriter(folder, index)
    folder.mkdir(exist_ok=True)
    (folder / leftover).write_bytes(b"half")
    assert StoreWriter(folder, index).missing == [0, 1, 2]


def test_a_shard_without_its_checksum_is_captured_again(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "features"
    captured(folder)
    shard_path(folder, 1).with_suffix(".sha256").unlink()
    done: list[int] = []
    captured(folder, done)
    assert len(done) == 1
    assert shard_path(folder, 1).read_bytes() == shard_path(store, 1).read_bytes()


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped bit":
        content[-3] ^= 1
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flipped bit", "cut", "gone"])
def test_a_damaged_shard_ends_the_run_and_is_named(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "features"
    captured(folder)
    damage(shard_path(folder, 1), how)
    with pytest.raises(DataError, match=r"shard .*batch-000001.safetensors is damaged .*delete it and run"):
        train_from(folder, Sizes(steps=4, draws=1))


def test_another_captures_folder_is_refused(store: Path, tmp_path: Path) -> None:
    index = read_index(store)
    with pytest.raises(DataError, match=r"another capture \(taps, target differ\): give another --out"):
        StoreWriter(store, replace(index, target="other", taps=(0, 1)))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="is not empty and holds no features"):
        StoreWriter(tmp_path, index)


def test_no_store_and_a_torn_index_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no captured features: run draftsmith capture --out"):
        read_index(tmp_path)
    for text in ("{", "{}", json.dumps({"taps": [1], "unknown": 2})):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(DataError, match="can't be read"):
            read_index(tmp_path)


def test_the_index_knows_its_shape(store: Path) -> None:
    assert read_index(store).shape == SHAPE
    assert replace(read_index(store), dtype="bfloat16").shape.dtype == torch.bfloat16


def test_a_reader_serves_requests_while_it_waits_for_room(store: Path) -> None:
    (ring,) = build_rings(blueprint(Sizes(slots=1, stall=1.5), fresh_target(FAMILY)))
    reader = ShardReadLoop("reader 0", store, read_index(store), [ring], SEED)
    reader.produce(0)
    served = threading.Event()
    reader.requests.append(served.set)
    with pytest.raises(StalledError, match="reader 0 waits for the ring of drafter 0"):
        reader.produce(1)
    assert served.is_set()
