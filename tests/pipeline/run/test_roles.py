"""Roles left open: chosen by rates of the cards and a look at the data, and kept by the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.errors import DataError
from draftsmith.pipeline.launch import Hosts
from draftsmith.pipeline.run import roles
from draftsmith.pipeline.run.roles import plan_job, roles_by_rate, roles_of_ranks, settle_roles, with_roles
from draftsmith.pipeline.settings import BatchOptions, DrafterOptions, PipelineConfig
from draftsmith.pipeline.stage import CONFIG, RunConfig
from draftsmith.plan.corpus import corpus_of
from draftsmith.plan.hardware import Hardware, parse_hardware
from draftsmith.target.weigh import weigh_target
from tests.pipeline.runs import stage_in, write_inputs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Both roles left open."""
    config = write_inputs(tmp_path_factory.mktemp("inputs"))
    return replace(config, pipeline=PipelineConfig(stall_seconds=30))


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four H200s, as far as choosing goes."""

    def visible(per_host: int, hosts: int, device: torch.device) -> Hardware:
        assert device.type == "cuda"
        return parse_hardware(f"{per_host}xh200", hosts)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(roles, "visible_hardware", visible)


@pytest.mark.usefixtures("four_gpus")
def test_open_roles_become_numbers_with_a_reason(config: RunConfig) -> None:
    fixed, placement = settle_roles(config)
    assert placement is not None
    chosen = roles_by_rate(config, Hosts(per_host=4, count=1, device=torch.device("cuda", 0)))
    assert (fixed.pipeline.targets, fixed.pipeline.drafters) == (chosen.split.targets, chosen.split.drafters)
    assert len(placement.targets) + len(placement.drafters) == 4
    assert placement.why == chosen.why
    assert "targets read" in placement.why
    assert placement.remarks == chosen.remarks
    assert settle_roles(fixed) == (fixed, None), "a resume has its numbers"


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("options", [{"targets": 3}, {"drafters": 1}, {"colocate": True}, {"device": "cpu"}])
def test_what_is_not_open_is_left_alone(config: RunConfig, options: dict[str, object]) -> None:
    given = replace(config, pipeline=replace(config.pipeline, **options))
    assert settle_roles(given) == (given, None)


@pytest.mark.usefixtures("four_gpus")
def test_features_from_disk_leave_no_choice(config: RunConfig) -> None:
    given = replace(config, data=replace(config.data, features="f"))
    assert settle_roles(given) == (given, None)


def test_the_choice_is_that_of_the_plan_for_these_data(config: RunConfig, tmp_path: Path) -> None:
    """A look at the first rows tells what preparing all of them does, and so does the prepared folder."""
    hosts = Hosts(per_host=3, count=1, device=CPU)
    data = stage_in(replace(config, data=replace(config.data, hold_out=0)), tmp_path / "run").inputs.data
    assert data is not None
    corpus = corpus_of(data.train.lengths, data.num_supervised, config.batch.num_buckets, "40 documents")
    prepared = replace(config, data=replace(config.data, data=str(tmp_path / "run" / "data")))
    for seen in (config, prepared):
        assert roles.look_at(seen) == corpus
    job = plan_job(config, weigh_target(config.target), corpus, on_gpu=False)
    assert (job.shape.num_tokens, job.num_anchors, job.draws_per_batch, job.accumulation) == (512, 16, 3, 2)
    chosen = roles_by_rate(prepared, hosts)
    assert chosen.split.targets + chosen.split.drafters == 3
    assert "(rate of cpu: measured now)" in chosen.why


def test_a_job_is_what_a_run_of_it_chooses(config: RunConfig, tmp_path: Path) -> None:
    """Budget, anchors, draws and architecture of the plan's job against a run's own, with all left open."""
    bare = replace(config, batch=BatchOptions(), drafter=DrafterOptions())
    stage = stage_in(bare, tmp_path / "run")
    job = plan_job(bare, weigh_target(bare.target), roles.look_at(bare), on_gpu=False)
    assert job.shape.num_tokens == stage.batching.order.token_budget == 2048
    assert job.num_anchors == stage.batching.num_anchors
    order = stage.order()
    assert order is not None
    # Forty short rows fill batches less than the plan assumes of real data.
    fill = sum(order._lengths) / (order.num_batches(0) * 2048)
    expected = job.draws_per_batch * fill / job.corpus.fill
    assert stage.batching.draws_per_batch == pytest.approx(expected, abs=1)
    assert job.drafter.num_layers == stage.start.config.num_layers
    assert job.drafter.taps == stage.start.config.taps


def test_data_without_answers_are_taken_as_assumed(config: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "why?"}]}) + "\n")
    corpus = roles.look_at(replace(config, data=replace(config.data, data=str(file))))
    assert (corpus.tokens, corpus.source) == (200_000_000, "assumed")
    with pytest.raises(DataError, match="nowhere"):
        roles.look_at(replace(config, data=replace(config.data, data=str(tmp_path / "nowhere"))))


def write_run(out: Path, config: RunConfig, targets: object, drafters: object) -> RunConfig:
    out.mkdir(exist_ok=True)
    (out / CONFIG).write_text(json.dumps({"config": {"pipeline": {"targets": targets, "drafters": drafters}}}))
    return replace(config, out=str(out))


def test_ranks_started_anew_keep_the_roles_that_their_run_began_with(config: RunConfig, tmp_path: Path) -> None:
    hosts = Hosts(per_host=4, count=2, device=CPU)
    began = roles_of_ranks(write_run(tmp_path / "run", config, 1, 7), hosts)
    assert (began.targets, began.drafters, began.why) == (1, 7, "as this run began")
    assert began.remarks == ()


@pytest.mark.parametrize(("targets", "drafters"), [(1, 2), ("auto", "auto"), (3, "auto")])
def test_other_numbers_of_ranks_choose_anew(
    config: RunConfig, tmp_path: Path, targets: object, drafters: object
) -> None:
    hosts = Hosts(per_host=4, count=1, device=CPU)
    shares = roles_of_ranks(write_run(tmp_path / "run", config, targets, drafters), hosts)
    assert shares.targets + shares.drafters == 4
    assert shares.why.startswith("auto: targets read")
    fresh = roles_of_ranks(replace(config, out=str(tmp_path / "fresh")), hosts)
    assert fresh.why.startswith("auto: targets read")


def test_numbers_stand_in_the_configuration(config: RunConfig) -> None:
    fixed = with_roles(config, 5, 2)
    assert (fixed.pipeline.targets, fixed.pipeline.drafters) == (5, 2)
    assert not fixed.pipeline.is_open
