"""Runs that train a drafter's layers alone: the target's side sends the context, and nothing else changes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.drafter.model import CONTEXT
from draftsmith.errors import CheckpointError, ConfigError, TargetError
from draftsmith.evaluate.export import load_zlab
from draftsmith.pipeline.inputs import context_id, context_of
from draftsmith.pipeline.run import capture_only, train
from draftsmith.pipeline.settings import DrafterOptions
from draftsmith.pipeline.stage import RunConfig
from draftsmith.pipeline.store import INDEX
from draftsmith.records import BatchShape
from draftsmith.target.capture import PackedCapture, get_hidden_states_packed, reference_plan
from tests.families import documents_of, tiny_target
from tests.pipeline.runs import losses, quiet, write_inputs


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A tiny run to adapt with a frozen context, and the drafter that it goes on from."""
    folder = tmp_path_factory.mktemp("stock")
    config = write_inputs(folder)
    config = replace(config, measure=replace(config.measure, num_prompts=0, prompts=(), eval_every=0))
    start = train(replace(config, out=str(folder / "run"), batch=replace(config.batch, max_steps=3)), quiet())
    adapted = replace(config, drafter=DrafterOptions(init_from=str(start.drafter), freeze_context=True))
    return adapted, start.drafter


def run(config: RunConfig, out: Path, steps: int, **changes: Any) -> dict[str, Tensor]:
    """Weights that a run of `steps` exported."""
    changed = replace(config, out=str(out), batch=replace(config.batch, max_steps=steps), **changes)
    return load_file(train(changed, quiet()).drafter / "model.safetensors")


def test_the_context_stays_and_the_layers_learn(stock: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, start = stock
    before, after = load_file(start / "model.safetensors"), run(config, tmp_path / "run", 4)
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {*CONTEXT} <= same
    moved = [name for name in before if name.endswith("_proj.weight")]
    assert len(moved) > 4
    assert not same & set(moved)


def test_from_disk_it_trains_to_the_same_losses_on_a_fifth_of_the_bytes(
    stock: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, start = stock
    whole = replace(config, drafter=DrafterOptions(init_from=str(start)))
    context = capture_only(replace(config, out=str(tmp_path / "context")), quiet())
    features = capture_only(replace(whole, out=str(tmp_path / "features")), quiet())
    _, drafter = load_zlab(start)
    index = json.loads((context / INDEX).read_text())
    assert index["context"] == context_id(drafter)
    assert (index["num_taps"], len(index["taps"])) == (1, len(drafter.config.taps))
    sizes = [sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in (context, features)]
    assert sizes[0] < sizes[1] / (len(drafter.config.taps) - 0.9)
    online = run(config, tmp_path / "online", 4)
    fed = run(config, tmp_path / "fed", 4, data=replace(config.data, features=str(context)))
    assert losses(tmp_path / "fed") == losses(tmp_path / "online")
    assert all(torch.equal(fed[name], online[name]) for name in online)
    with pytest.raises(ConfigError, match="holds the context of a drafter, and this run needs features"):
        run(whole, tmp_path / "no", 4, data=replace(config.data, features=str(context)))
    with pytest.raises(ConfigError, match="holds features, and this run needs the context of a drafter"):
        run(config, tmp_path / "nor", 4, data=replace(config.data, features=str(features)))
    with torch.no_grad():
        drafter.hidden_norm.weight[0] += 1
    assert context_id(drafter) != index["context"]


def test_it_resumes_bit_for_bit_and_not_with_the_context_thawed(stock: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, start = stock
    saving = replace(config, checkpoint=replace(config.checkpoint, save_every=2))
    whole = run(saving, tmp_path / "whole", 6)
    run(saving, tmp_path / "cut", 4)
    thawed = replace(saving, drafter=DrafterOptions(init_from=str(start)))
    with pytest.raises(CheckpointError, match=r"the objective changed \(context \"frozen\" -> null\)"):
        run(thawed, tmp_path / "cut", 6, resume=True)
    resumed = run(saving, tmp_path / "cut", 6, resume=True)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_the_batch_carries_what_the_drafter_makes_of_the_features(stock: tuple[RunConfig, Path]) -> None:
    _, start = stock
    _, drafter = load_zlab(start)
    target, documents = tiny_target("qwen3"), documents_of([9, 20, 5], seed=4)
    taps, cpu = drafter.config.taps, torch.device("cpu")
    features = get_hidden_states_packed(target, documents, taps, pad_to=48)
    shape = BatchShape(
        num_tokens=48, num_documents=3, num_taps=1, hidden_size=features.shape.hidden_size, dtype=torch.float32,
        last_hidden=False,
    )  # fmt: skip
    context = context_of(drafter, cpu, torch.float32)
    with PackedCapture(target, taps, shape, context) as capture:
        found = capture.run(reference_plan(documents), documents)
        capture.check(documents)
        with torch.no_grad():
            expected = drafter.context(features.features_TFH)
        torch.testing.assert_close(found.features_TFH, expected, rtol=1e-4, atol=1e-5)
        assert (found.features_TFH[34:] == 0).all()
        assert torch.equal(found.token_ids_T, features.token_ids_T)
    with pytest.raises(TargetError, match="a batch of 2 taps"):
        PackedCapture(target, taps, replace(shape, num_taps=len(taps)), context)


def test_what_makes_no_sense_with_it_is_refused(stock: tuple[RunConfig, Path]) -> None:
    config, start = stock
    with pytest.raises(ConfigError, match="--freeze-context keeps what a drafter has learnt of features: name one"):
        DrafterOptions(freeze_context=True)
    with pytest.raises(ConfigError, match="--feature-noise is for features, and with --freeze-context none come"):
        replace(config, pipeline=replace(config.pipeline, feature_noise=0.1))
    assert DrafterOptions(init_from=str(start), freeze_context=True).init_from


def test_the_run_says_what_it_trains(stock: tuple[RunConfig, Path], tmp_path: Path) -> None:
    said = Console(file=io.StringIO(), width=200)
    config = replace(stock[0], out=str(tmp_path / "run"), batch=replace(stock[0].batch, max_steps=1))
    train(config, said)
    assert "fc and hidden_norm stay, as --freeze-context says" in said.file.getvalue()
