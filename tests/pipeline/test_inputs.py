"""The run's folder is never written over; data fit the target; drafters start where they are told to."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest
import torch

from draftsmith.data.prepare import PrepareConfig
from draftsmith.errors import CheckpointError, DataError
from draftsmith.pipeline import inputs as inputs_module
from draftsmith.pipeline.inputs import capture_features, claim_folder, compute_dtype, load_data, start_drafter
from draftsmith.pipeline.settings import DataOptions
from draftsmith.pipeline.store import Origin, index_of
from draftsmith.target.capture import PackedCapture
from tests.families import tiny_target
from tests.pipeline.runs import quiet, write_inputs
from tests.pipeline.tiny import CONFIG, FAMILY, SEED, SHAPE, TAPS, documents, order


def test_a_fresh_folder_is_made_and_an_empty_one_taken(tmp_path: Path) -> None:
    assert claim_folder(tmp_path / "a" / "b", resume=False).is_dir()
    assert claim_folder(tmp_path / "a" / "b", resume=False).is_dir()


@pytest.mark.parametrize("mark", ["config.json", "metrics.jsonl", "checkpoints"])
def test_a_run_is_not_written_over(mark: str, tmp_path: Path) -> None:
    (tmp_path / mark).mkdir()
    with pytest.raises(CheckpointError, match="already holds a run: give another --out, or continue it with --resume"):
        claim_folder(tmp_path, resume=False)
    assert claim_folder(tmp_path, resume=True) == tmp_path


def test_neither_is_anything_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        claim_folder(tmp_path, resume=False)
    with pytest.raises(CheckpointError, match="is a file: give --out a folder"):
        claim_folder(tmp_path / "thesis.tex", resume=False)
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        claim_folder(tmp_path, resume=True)


def test_prepared_data_of_another_template_are_refused(tmp_path: Path) -> None:
    config = write_inputs(tmp_path)
    target = tiny_target("qwen3")
    loaded = load_data(config.data, PrepareConfig(), target, tmp_path / "run", quiet())
    prepared = DataOptions(data=str(tmp_path / "run" / "data"))
    again = load_data(prepared, PrepareConfig(), target, None, quiet())
    assert again.fingerprint == loaded.fingerprint
    assert again.num_supervised == loaded.num_supervised > 0
    object.__setattr__(target.facts, "template_hash", "another")
    try:
        with pytest.raises(DataError, match="prepared with another chat template than"):
            load_data(prepared, PrepareConfig(), target, None, quiet())
    finally:
        tiny_target.cache_clear()


def test_drafters_start_from_the_target_or_at_random() -> None:
    said: list[str] = []
    target = tiny_target(FAMILY)
    copied = start_drafter(CONFIG, "target", target, SEED, said.append)
    assert any("copied" in line for line in said)
    random = start_drafter(CONFIG, "random", target, SEED, said.append)
    assert said[-1] == "drafter starts from random weights"
    again = start_drafter(CONFIG, "random", target, SEED, said.append)
    assert all(torch.equal(a, b) for a, b in zip(random.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(random.parameters(), copied.parameters(), strict=True))


def test_a_full_disk_is_said_before_anything_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(1, 1, 10)
    monkeypatch.setattr(inputs_module.shutil, "disk_usage", lambda _folder: usage)
    index = index_of(SHAPE, 3, Origin(target="t", taps=TAPS, data_fingerprint="f", num_supervised=1))
    capture = PackedCapture(tiny_target(FAMILY), TAPS, index.shape)
    with pytest.raises(DataError, match=r"the features need about 0.0 GB, .* has 0.0 GB free"):
        capture_features(tmp_path, capture, documents(), order(), index, lambda *_: None)


def test_compute_dtype() -> None:
    assert compute_dtype(True) == torch.bfloat16
    assert compute_dtype(False) == torch.float32
