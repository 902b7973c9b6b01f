"""Roles that were left open, chosen by rates: the plan's for known cards, measured for others.

The first rank chooses for all ranks of torchrun. What was chosen stands in the run's own configuration, so that a
resume, or torchrun's restart, doesn't choose again.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from draftsmith.data.prepared import ACCOUNT_FILE, load_prepared
from draftsmith.data.sample import Sample, sample_rows
from draftsmith.pipeline.launch import Hosts, Shares
from draftsmith.pipeline.placement import Placement, place
from draftsmith.pipeline.resolve import Choices, resolve_drafter, usual_anchors, usual_budget
from draftsmith.pipeline.stage import CONFIG, RunConfig
from draftsmith.plan.corpus import ASSUMED_SUPERVISED, ASSUMED_TOKENS, assumed_corpus, corpus_of
from draftsmith.plan.hardware import visible_hardware
from draftsmith.plan.roles import Chosen, choose_roles
from draftsmith.plan.workload import Corpus, Job
from draftsmith.records import BatchShape
from draftsmith.target.model import load_tokenizer, locate
from draftsmith.target.weigh import TargetSize, weigh_target


def with_roles(config: RunConfig, targets: int, drafters: int) -> RunConfig:
    """The same run with these numbers of workers."""
    return replace(config, pipeline=replace(config.pipeline, targets=targets, drafters=drafters))


def settle_roles(config: RunConfig) -> tuple[RunConfig, Placement | None]:
    """Numbers in the place of roles that were left open on several GPUs of this host; None where there was no choice.

    They stand in the run's own configuration from then on, so a resume has the same.
    """
    pipeline = config.pipeline
    num_gpus = torch.cuda.device_count() if pipeline.device != "cpu" else 0
    if config.data.features or not pipeline.is_open or num_gpus < 2:
        return config, None
    chosen = roles_by_rate(config, Hosts(per_host=num_gpus, count=1, device=torch.device("cuda", 0)))
    fixed = with_roles(config, chosen.split.targets, chosen.split.drafters)
    return fixed, replace(place(fixed.pipeline), why=chosen.why, remarks=chosen.remarks)


def roles_by_rate(config: RunConfig, hosts: Hosts) -> Chosen:
    """The split whose slower side is fastest on these machines, by the plan's rates and a look at the data."""
    job = plan_job(config, weigh_target(config.target), look_at(config), on_gpu=hosts.device.type == "cuda")
    return choose_roles(job, visible_hardware(hosts.per_host, hosts.count, hosts.device))


def look_at(config: RunConfig) -> Corpus:
    """The run's data in numbers: all of a prepared folder, the first rows of anything else.

    Raises:
        DataError: there is nothing.
    """
    data = config.data.data
    if (Path(data) / ACCOUNT_FILE).is_file():
        found = load_prepared(data)
        seen = Sample(lengths=tuple(found.lengths), num_supervised=found.account.supervised_tokens)
    else:
        tokenizer = load_tokenizer(config.target, locate(config.target), required=True)
        seen = sample_rows(data, tokenizer, config.prepare.tokenize)
    if not seen.num_supervised:  # questions whose answers are yet to be written
        return assumed_corpus(ASSUMED_TOKENS, ASSUMED_SUPERVISED, "assumed")
    return corpus_of(seen.lengths, seen.num_supervised, config.batch.num_buckets, f"{len(seen.lengths)} documents")


def roles_of_ranks(config: RunConfig, hosts: Hosts) -> Shares:
    """For the first rank: the roles of all, those that the run began with where it is started anew."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        began = json.loads((Path(config.out) / CONFIG).read_text(encoding="utf-8"))["config"]["pipeline"]
        if began["targets"] + began["drafters"] == hosts.per_host * hosts.count:
            return Shares(targets=began["targets"], drafters=began["drafters"], why="as this run began")
    chosen = roles_by_rate(config, hosts)
    split = chosen.split
    return Shares(targets=split.targets, drafters=split.drafters, why=chosen.why, remarks=chosen.remarks)


def plan_job(config: RunConfig, size: TargetSize, corpus: Corpus, *, on_gpu: bool = True) -> Job:
    """Sizes and rates of a run, as it will choose them itself; its data are known only in numbers."""
    # Without a tokenizer no reserved id is known of some families; any id serves a plan.
    facts = size.facts
    if not facts.reserved_token_ids:
        facts = replace(facts, reserved_token_ids=(facts.vocab_size - 1,))
    drafter = resolve_drafter(config.drafter, facts, Choices())
    batch = config.batch
    budget = usual_budget(facts.hidden_size, on_gpu) if batch.token_budget == "auto" else batch.token_budget
    return Job(
        target=size,
        drafter=drafter,
        shape=BatchShape(
            num_tokens=budget,
            num_documents=batch.max_documents,
            num_taps=1 if config.drafter.freeze_context else len(drafter.taps),
            hidden_size=drafter.hidden_size,
            dtype=torch.bfloat16,
            last_hidden=config.loss.distilled,
        ),
        corpus=corpus,
        num_anchors=usual_anchors(budget, drafter.block_size) if batch.anchors == "auto" else batch.anchors,
        labels_per_token=batch.labels_per_token,
        draws=0 if batch.draws_per_batch == "auto" else batch.draws_per_batch,
        epochs=batch.epochs,
        max_steps=batch.max_steps,
        accumulation=batch.accumulation,
        ring_slots=config.pipeline.ring_slots,
        chunk_rows=config.loss.chunk_rows,
        fp8=config.target.target_compute == "fp8",
        checkpoint_layers=config.pipeline.checkpoint_layers,
        freeze_context=config.drafter.freeze_context,
    )
