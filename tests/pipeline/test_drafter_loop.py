"""DrafterTrainLoop: the same numbers as the loop written by hand, whatever feeds it, and where it stops."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from draftsmith.pipeline.assemble import Team
from draftsmith.pipeline.drafter_loop import DrawPlan
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.team import run_workers
from tests.pipeline.tiny import Sizes, blueprint, run_by_hand, run_threads, targets_of, team_of


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(targets=1, drafters=1),
        Sizes(targets=2, drafters=1),
        Sizes(targets=2, drafters=2),
        Sizes(targets=2, drafters=2, joint=True),
        Sizes(targets=5, drafters=2),
        Sizes(targets=1, drafters=2, draws=3, accumulation=2, steps=7, slots=1),
        Sizes(targets=2, drafters=1, draws=1, accumulation=3, steps=5),
    ],
    ids=lambda s: f"{s.targets}+{s.drafters}{'joint' * s.joint} draws {s.draws} accumulation {s.accumulation}",
)
def test_threads_equal_the_loop_by_hand_to_the_bit(sizes: Sizes) -> None:
    threads, by_hand = run_threads(sizes), run_by_hand(sizes)
    assert len(by_hand.losses) == sizes.steps
    assert threads.losses == by_hand.losses
    assert torch.equal(threads.master_N, by_hand.master_N)
    assert by_hand.losses[-1] < by_hand.losses[0]


def test_three_drafters_agree_with_the_loop_by_hand_to_rounding() -> None:
    sizes = Sizes(targets=2, drafters=3, steps=8)
    threads, by_hand = run_threads(sizes), run_by_hand(sizes)
    assert threads.losses == pytest.approx(by_hand.losses, rel=1e-6)
    torch.testing.assert_close(threads.master_N, by_hand.master_N, rtol=0, atol=2e-5)


@pytest.mark.parametrize("step", [3, 4])
def test_a_resume_takes_up_the_very_draw(step: int) -> None:
    """Draws 9 and 12 of 2 x 3 a step, 4 a batch: in the middle of a batch and at its border."""
    sizes = Sizes(targets=2, drafters=2, draws=4, accumulation=3, steps=8)

    def start(team: Team) -> None:
        for loop in team.drafters:
            loop.start_at(step)

    resumed = run_threads(sizes, start=start)
    assert resumed.losses == run_by_hand(sizes, first_step=step).losses


@pytest.mark.parametrize("joint", [False, True])
def test_a_stop_ends_all_drafters_with_one_step_which_is_told_as_the_last(joint: bool) -> None:
    """One drafter sees the request a step before the other: alone it would leave the other waiting for ever."""
    sizes = Sizes(targets=2, drafters=2, draws=2, accumulation=3, steps=500, stall=20, joint=joint)
    told: list[tuple[int, bool]] = []
    models, stop = targets_of(2), Stop()
    plan = blueprint(sizes, models[0], stop)

    def after_step(step: int, is_last: bool) -> None:
        told.append((step, is_last))
        if step == 4:
            stop.request()

    team = team_of(plan, models, after_step)
    started = time.monotonic()
    run_workers(team.workers(), stop, lambda: None)
    assert time.monotonic() - started < 15
    assert told[-1] == (5, True)
    assert not any(is_last for _, is_last in told[:-1])
    assert {loop.step for loop in team.drafters} == {5}
    masters = [loop.stepper.state.parameters.master_N for loop in team.drafters]
    assert torch.equal(*masters)


def test_a_stop_in_the_middle_of_a_step_still_gets_the_batches_that_finish_it() -> None:
    """Asked while a step of six batches has read its first: targets that left at once would strand the drafter."""
    sizes = Sizes(targets=1, drafters=1, draws=1, accumulation=6, steps=50, slots=1, stall=10)
    models, stop = targets_of(1), Stop()
    team = team_of(blueprint(sizes, models[0], stop), models)
    run_workers(team.workers(), stop, _once(lambda: team.drafters[0].draws_done > 0, stop.request))
    assert team.drafters[0].step >= 1
    assert team.drafters[0].draws_done == team.drafters[0].step * sizes.accumulation


def _once(when: Callable[[], bool], do: Callable[[], None]) -> Callable[[], None]:
    done: list[bool] = []

    def look() -> None:
        if not done and when():
            done.append(True)
            do()

    return look


def test_the_step_counts_updates_and_not_draws() -> None:
    """A step that fails in its reduce has all its draws but no update: a checkpoint must not count it."""
    sizes = Sizes(targets=1, drafters=1, draws=2, steps=6)
    models, stop = targets_of(1), Stop()
    team = team_of(blueprint(sizes, models[0], stop), models)
    loop = team.drafters[0]

    class Broken:
        def reduce(self, state: object, is_last: bool) -> bool:
            if loop.draws_done == 4:
                raise ValueError("lost")
            return is_last

    loop._reducer = Broken()
    with pytest.raises(RuntimeError, match="drafter 0 failed: ValueError: lost"):
        run_workers(team.workers(), stop, lambda: None)
    assert (loop.step, loop.draws_done) == (3, 4)


def test_plan_of_draws() -> None:
    plan = DrawPlan(seed=0, drafter=1, num_drafters=3, draws_per_batch=4, accumulation=3, total_steps=3)
    assert [plan.batch_number(sequence) for sequence in range(3)] == [1, 4, 7]
    assert plan.num_sequences() == 3
