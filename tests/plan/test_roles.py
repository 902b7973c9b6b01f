"""The split chosen by rates: the slower side fastest, by hand and against every other; what is said of who idles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftsmith.errors import ConfigError
from draftsmith.plan.hardware import Hardware, parse_hardware
from draftsmith.plan.roles import IDLE_LIMIT, best_split, choose_roles, idle_remarks
from draftsmith.plan.split import evaluate_joint, evaluate_split
from draftsmith.plan.workload import Job, drafter_rate, target_rate


def heavier(job: Job, times: float) -> Job:
    """A target that costs `times` the reference's (its ten layers have 1,000 parameters) on the H200."""
    return replace(job, target=replace(job.target, layers=(round(2e9 * times),) * 10))


def test_the_slower_side_is_as_fast_as_any_split_makes_it(reference: Job) -> None:
    hardware = parse_hardware("8xh200")
    for times in (0.1, 0.5, 1, 2, 5):
        job = heavier(reference, times)
        chosen = choose_roles(job, hardware).split
        slower = min(chosen.targets * target_rate(job, hardware.card), chosen.drafter_rate)
        for targets in range(1, 8):
            other = evaluate_split(job, hardware, targets, 8 - targets)
            assert min(other.target_rate, other.drafter_rate) <= slower
        assert chosen.targets + chosen.drafters == 8
        assert not chosen.joint
    counts = [choose_roles(heavier(reference, times), hardware).split.targets for times in (0.1, 1, 5)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_targets_half_as_fast_as_drafters_get_two_of_three(reference: Job) -> None:
    """By hand: two targets at half a drafter's rate are as fast as one drafter; the other split is half as fast."""
    hardware = parse_hardware("3xh200")
    alone = replace(reference, accumulation=10**6)
    drafter, target = drafter_rate(alone, hardware.card), target_rate(heavier(alone, 1), hardware.card)
    job = heavier(alone, 2 * target / drafter)
    assert target_rate(job, hardware.card) == pytest.approx(drafter / 2, rel=1e-6)
    chosen = choose_roles(job, hardware)
    assert (chosen.split.targets, chosen.split.drafters) == (2, 1)
    assert chosen.split.rate == pytest.approx(2 * evaluate_split(job, hardware, 1, 2).rate, rel=1e-6)
    assert chosen.remarks == ()


def test_the_reason_names_both_rates_and_their_source(reference: Job) -> None:
    chosen = choose_roles(reference, parse_hardware("7xh200"))
    assert chosen.why.startswith("auto: targets read ")
    assert f"{chosen.split.target_rate:,.0f} tokens/s" in chosen.why
    assert f"drafters use {chosen.split.drafter_rate:,.0f}" in chosen.why
    assert "(rate of h200: measured)" in chosen.why
    assert choose_roles(reference, parse_hardware("7xh200")) == chosen


def test_roles_that_are_given_are_kept(reference: Job) -> None:
    hardware = parse_hardware("7xh200")
    chosen = choose_roles(reference, hardware, 5, 2)
    assert (chosen.split.targets, chosen.split.drafters) == (5, 2)
    assert chosen.why.startswith("given: ")
    assert choose_roles(reference, hardware, drafters=3).split.targets == 4
    assert choose_roles(reference, hardware, targets=3).split.drafters == 4
    for targets, drafters in ((6, 2), (7, 0), (0, 7)):
        with pytest.raises(ConfigError, match="don't share 7 GPUs: change --targets or --drafters"):
            choose_roles(reference, hardware, targets, drafters)
    with pytest.raises(ConfigError, match="one GPU can't be split between two roles"):
        choose_roles(reference, parse_hardware("h200"))


def test_what_fits_comes_before_what_is_fast(reference: Job) -> None:
    """Without room for either role every split is as bad, and the fastest is taken."""
    hardware = parse_hardware("4x24GB")
    assert not best_split(reference, hardware).fits
    assert best_split(reference, hardware).rate == max(
        evaluate_split(reference, hardware, targets, 4 - targets).rate for targets in (1, 2, 3)
    )


def lopsided(reference: Job, targets: int, drafters: int, times: float = 1.0) -> tuple[Job, Hardware, list[str]]:
    job, hardware = heavier(reference, times), parse_hardware(f"{targets + drafters}xh200")
    return job, hardware, idle_remarks(job, hardware, evaluate_split(job, hardware, targets, drafters))


def test_idle_drafters_are_told_of_draws_fp8_colocation_and_the_better_split(reference: Job) -> None:
    job, hardware, (remark,) = lopsided(reference, 2, 3, 1)
    split = evaluate_split(job, hardware, 2, 3)
    assert remark.startswith(f"drafters would idle {split.idle_drafters:.0%}: ")
    draws = int(job.draws_per_batch * split.drafter_rate / split.target_rate)
    labels = job.density * draws / job.draws_per_batch
    assert f"{draws} draws a batch instead of 3 cost nothing (--labels-per-token {labels:.1f})" in remark
    assert "--target-compute fp8 as 3 target + 2 drafter would be" in remark
    gain = evaluate_joint(job, hardware).rate / split.rate - 1
    assert f"--colocate would be {gain:.0%} faster" in remark
    assert "--targets 3 --drafters 2 would be 50% faster" in remark


@pytest.mark.parametrize(("targets", "drafters", "times"), [(2, 3, 1), (4, 1, 1), (7, 1, 8)])
def test_the_draws_that_are_named_do_use_who_idles(reference: Job, targets: int, drafters: int, times: float) -> None:
    job, hardware, remarks = lopsided(reference, targets, drafters, times)
    draws = int(remarks[0].split(": ")[1].split(" draws a batch instead of")[0])
    before = evaluate_split(job, hardware, targets, drafters)
    after = evaluate_split(replace(job, draws=draws), hardware, targets, drafters)
    assert max(after.idle_targets, after.idle_drafters) < IDLE_LIMIT < max(before.idle_targets, before.idle_drafters)


def test_no_senseless_number_of_draws_is_named(reference: Job) -> None:
    """One target of eight times the size for two drafters: a hundred draws of a batch would teach nothing."""
    _, _, (remark,) = lopsided(reference, 1, 2, 8)
    assert "draws" not in remark
    assert "--colocate" in remark
    _, _, (remark,) = lopsided(reference, 6, 1, 1.9)
    assert remark.startswith("targets would idle 17%: --colocate"), "with a draw less the drafters would idle 19%"


def test_idle_targets_are_told_of_fewer_draws_and_not_of_a_faster_target(reference: Job) -> None:
    _, _, (remark,) = lopsided(reference, 4, 1, 1)
    assert remark.startswith("targets would idle")
    assert "2 draws a batch instead of 3 would do (--labels-per-token 1.2)" in remark
    assert "fp8" not in remark


def test_nothing_is_said_where_both_have_work(reference: Job) -> None:
    chosen = choose_roles(heavier(reference, 3), parse_hardware("8xh200"))
    assert max(chosen.split.idle_targets, chosen.split.idle_drafters) <= IDLE_LIMIT
    assert chosen.remarks == ()


def test_where_nothing_would_help_the_counts_are_named(reference: Job) -> None:
    """One draw is the least, both roles on one card don't fit, and there is no other split of two."""
    hardware = parse_hardware("2xh200")
    job = replace(heavier(reference, 0.1), draws=1)
    small = replace(hardware, card=replace(hardware.card, memory=evaluate_joint(job, hardware).memory[0].total - 1))
    (remark,) = idle_remarks(job, small, evaluate_split(job, small, 1, 1))
    assert remark.endswith("other counts (--targets, --drafters)")
