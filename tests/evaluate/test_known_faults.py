"""Faults that others met in checkpoints, exports and evaluation, which no other test is named after."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from draftsmith.data.buckets import OrderConfig, choose_buckets
from draftsmith.data.loader import BatchOrder, shard_numbers
from draftsmith.errors import ExportError
from draftsmith.evaluate.acceptance import EvalConfig, evaluate_prompts
from draftsmith.evaluate.decode import DecodeLimits, decode, plain_greedy
from draftsmith.evaluate.export import export_zlab, load_zlab, read_json
from draftsmith.evaluate.layout import ExportInfo
from draftsmith.evaluate.prompts import Prompt
from draftsmith.evaluate.sampling import Sampler
from draftsmith.target.capture import get_hidden_states_packed
from draftsmith.train.checkpoint import CheckpointConfig, best_checkpoint
from draftsmith.train.checkpoint_writer import CheckpointWriter
from draftsmith.train.metrics import summarise_sums
from tests.evaluate.overfit import PROMPTS, drafter_config, overfit, random_drafter
from tests.families import documents_of, tiny_target
from tests.train.killed import RECORD
from tests.train.saved import at
from tests.train.tiny import Tiny


def exported(out: Path, family: str = "qwen3") -> Path:
    target = tiny_target(family)
    drafter = random_drafter(drafter_config(target))
    return export_zlab(drafter, None, ExportInfo.of(target.facts, target.ends()), out / "drafter", torch.float32)


def with_extra(folder: Path, **extra: torch.Tensor) -> None:
    named = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(named | extra, folder / "model.safetensors")


def test_B04_the_last_hidden_state_is_what_the_head_reads() -> None:
    """Not the last layer's output, nor one layer early: its product with the head is the model's own logits."""
    target = tiny_target("qwen3")
    document = documents_of([12])[0]
    batch = get_hidden_states_packed(target, [document], (1, 4), last_hidden=True)
    assert batch.last_hidden_TH is not None
    with torch.no_grad():
        logits = target.model(input_ids=document.token_ids[None]).logits[0]
        ours = batch.last_hidden_TH[:12] @ target.ends().head_VH.T
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_F07_weights_under_another_prefix_never_take_a_branch_of_their_own(tmp_path: Path, prefix: str) -> None:
    folder = exported(tmp_path)
    named = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file({prefix + name: w for name, w in named.items()}, folder / "model.safetensors")
    if prefix:
        with pytest.raises(ExportError, match="lacks"):
            load_zlab(folder)
    else:
        load_zlab(folder)


def test_F09_a_pruned_vocabulary_is_refused_not_served_as_the_first_ids(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    with_extra(folder, d2t=torch.zeros(8, dtype=torch.int64), t2d=torch.zeros(272, dtype=torch.bool))
    with pytest.raises(ExportError, match="holds d2t, t2d"):
        load_zlab(folder)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_F19_a_drafter_with_ends_of_its_own_is_refused_not_scored_with_the_targets(tmp_path: Path, name: str) -> None:
    folder = exported(tmp_path)
    with_extra(folder, **{name: torch.zeros(272, 32)})
    with pytest.raises(ExportError, match=name):
        load_zlab(folder)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5", "gpt_oss", "gemma3"])
def test_F17_the_engines_own_config_class_reads_what_was_meant(tmp_path: Path, family: str) -> None:
    """vLLM and SGLang read config.json through transformers' Qwen3Config."""
    folder = exported(tmp_path, family)
    ours = load_zlab(folder)[0]
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert type(theirs) is transformers.Qwen3Config
    assert theirs.rope_parameters["rope_theta"] == ours.rope.theta
    assert {key: theirs.rope_parameters[key] for key in ours.rope.scaling} == dict(ours.rope.scaling)
    assert theirs.dflash_config["target_layer_ids"] == list(ours.taps)
    assert theirs.dflash_config["mask_token_id"] == ours.mask_token_id
    assert (theirs.block_size, theirs.num_hidden_layers, theirs.head_dim) == (8, 2, ours.head_dim)
    assert list(theirs.layer_types) == list(ours.layer_types)
    assert theirs.sliding_window == ours.sliding_window
    assert read_json(folder / "config.json")["num_target_layers"] == ours.num_target_layers


def test_F14_and_F15_documents_after_a_resume_continue_the_sequence_in_every_epoch() -> None:
    """Whatever step a run stops at, also the last of an epoch, what follows is what would have followed."""
    lengths = [20, 33, 9, 41, 12, 27, 18, 38, 14, 30]
    config = OrderConfig(token_budget=96, max_documents=8, seed=3)

    def order() -> BatchOrder:
        return BatchOrder(lengths, choose_buckets(lengths, 3), config)

    whole = [order().batch(number).documents for number in range(order().first_number(3))]
    for start in range(len(whole)):
        resumed = order()
        assert [resumed.batch(n).documents for n in shard_numbers(0, 1, start, len(whole))] == whole[start:]
    for epoch in range(3):
        first, end = order().first_number(epoch), order().first_number(epoch + 1)
        assert sorted(document for one in whole[first:end] for document in one) == list(range(len(lengths)))


def test_G03_acceptance_is_measured_on_the_answers_own_prefix() -> None:
    """Where an answer leaves a fixed reference, drafts after it are still right or wrong by the target itself."""
    case = overfit("llama")
    limits = DecodeLimits(max_new_tokens=40)
    found = 0
    for prompt in PROMPTS:
        greedy = plain_greedy(case.target, prompt, 40)
        for seed in range(4):
            sampler = Sampler(temperature=0.5, generator=torch.Generator().manual_seed(seed))
            decoded = decode(case.target, case.drafter, case.target.ends(), prompt, limits, sampler)
            place = 1
            for step in decoded.steps:
                parted = list(decoded.token_ids[:place]) != greedy[:place]
                found += step.accepted if parted else 0
                place += step.committed
    assert found > 0


def test_G05_place_0_is_known_and_counted_nowhere() -> None:
    """Anchor-first layout: places 1..B-1 make up accuracy and tau, whatever stands at place 0."""
    block = 4
    sums = torch.zeros(4 + 3 * block)
    sums[:4] = torch.tensor([3.0, 6.0, 3.0, 6.0])
    by_place = sums[4:].view(3, block)
    by_place[0] = torch.tensor([99.0, 2.0, 2.0, 2.0])
    by_place[1] = torch.tensor([99.0, 2.0, 1.0, 0.0])
    by_place[2] = torch.tensor([99.0, 2.0, 1.0, 0.0])
    said = summarise_sums(sums, block)
    assert said["accuracy"] == 0.5
    assert said["uniform_tau"] == 1 + 1.0 + 0.5
    assert said["place_accuracy"] == [1.0, 0.5, 0.0]


def test_G08_the_best_checkpoint_is_chosen_by_measured_acceptance_not_by_age(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, CheckpointConfig(keep=1), Tiny().build(), RECORD) as writer:
        for step, tau in enumerate([2.1, 2.6, 2.4, 2.2], start=1):
            writer.save(at(step), tau)
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert best.name == "step-00000002"


def test_G11_acceptance_is_reported_by_language() -> None:
    case = overfit("llama")
    prompts = [
        Prompt(source="set", token_ids=tuple(PROMPTS[0]), domain="en"),
        Prompt(source="set", token_ids=tuple(PROMPTS[1]), domain="zh"),
    ]
    config = replace(EvalConfig(), max_new_tokens=12, plain=False)
    result = evaluate_prompts(case.target, case.drafter, prompts, config)
    groups = result.groups()
    assert list(groups) == ["set", "set / en", "set / zh"]
    for number, name in enumerate(["set / en", "set / zh"]):
        alone = evaluate_prompts(case.target, case.drafter, [prompts[number]], config)
        assert groups[name].tau.value == alone.summary.tau.value
