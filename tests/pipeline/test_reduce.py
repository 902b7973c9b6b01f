"""LocalReducer: sums of 1, 2 and 3 drafters, bounded waits, one drafter's end or failure told to all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.errors import StalledError
from draftsmith.pipeline import reduce as reduce_module
from draftsmith.pipeline.reduce import LocalGroup, LocalReducer, NoReduce
from draftsmith.pipeline.stop import Stop, StoppedError
from draftsmith.train.step import TrainState, accumulate, update
from tests.train.tiny import Tiny, no_totals, relative, tiny_batch, uniforms


def states(count: int) -> list[TrainState]:
    generator = torch.Generator().manual_seed(5)
    built = [Tiny().build() for _ in range(count)]
    for state in built:
        state.parameters.grad_N.copy_(torch.randn(state.parameters.grad_N.shape, generator=generator))
        state.sums.copy_(torch.rand(state.sums.shape, generator=generator) * 100)
    return built


def together(jobs: list[Callable[[], object]]) -> list[object]:
    """Each job in a thread; what it returned or raised."""
    results: list[object] = [None] * len(jobs)

    def work(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except (StalledError, StoppedError) as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return results


def reduce_all(built: list[TrainState], ends: list[bool]) -> list[object]:
    group = LocalGroup(len(built), Stop(), 20.0)
    reducers = [LocalReducer(group, index, state) for index, state in enumerate(built)]

    def job(index: int) -> Callable[[], object]:
        return lambda: reducers[index].reduce(built[index], ends[index])

    return together([job(index) for index in range(len(built))])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1 << 24, 1000])
def test_every_drafter_gets_the_sum_in_drafter_order(count: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_module, "CHUNK", chunk)
    built = states(count)

    def in_order(parts: list[Tensor]) -> Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    gradient = in_order([state.parameters.grad_N for state in built])
    sums = in_order([state.sums for state in built])
    assert reduce_all(built, [False] * count) == [False] * count
    for state in built:
        assert torch.equal(state.parameters.grad_N, gradient)
        assert torch.equal(state.sums, sums)


def test_C15_a_label_weighs_the_same_on_a_drafter_with_few_of_them() -> None:
    """Ten times the labels on one drafter: together they step as one drafter over both batches does."""
    many = tiny_batch((150, 100, 80), seed=1)
    few = tiny_batch((6,), seed=2, supervised=1.0)
    built, alone = [Tiny().build() for _ in range(2)], Tiny().build()
    for state, batch in zip(built, (many, few), strict=True):
        accumulate(state, batch, uniforms(batch))
        accumulate(alone, batch, uniforms(batch))
    labels = [float(state.sums[3]) for state in built]
    assert labels[0] > 10 * labels[1] > 0
    own = [state.parameters.grad_N / state.sums[1] for state in built]
    reduce_all(built, [False, False])
    together_N = built[0].parameters.grad_N / built[0].sums[1]
    # A second draw's products start from the first one's sum: another order of additions than adding two sums.
    assert relative(together_N, alone.parameters.grad_N / alone.sums[1]) < 1e-6
    mean_of_means = (own[0] + own[1]) / 2
    assert (mean_of_means - together_N).norm() > 0.05 * together_N.norm(), "a mean of means is another gradient"
    for state in built:
        update(state, no_totals(state))
    update(alone, no_totals(alone))
    for state in built:
        assert relative(state.parameters.master_N, alone.parameters.master_N) < 1e-6


def test_two_drafters_sum_to_the_same_bits_either_way_round() -> None:
    one, other = states(2), states(2)[::-1]
    reduce_all(one, [False, False])
    reduce_all(other, [False, False])
    assert torch.equal(one[0].parameters.grad_N, other[0].parameters.grad_N)


def test_many_steps_in_a_row_mix_no_two() -> None:
    built = states(3)
    group = LocalGroup(3, Stop(), 20.0)
    reducers = [LocalReducer(group, index, state) for index, state in enumerate(built)]
    bad: list[tuple[int, int]] = []

    def job(index: int) -> Callable[[], object]:
        def work() -> None:
            state = built[index]
            for step in range(100):
                state.parameters.grad_N.fill_(step * (index + 1))
                state.sums.fill_(step * (index + 1))
                reducers[index].reduce(state, False)
                if not ((state.parameters.grad_N == 6 * step).all() and (state.sums == 6 * step).all()):
                    bad.append((index, step))

        return work

    together([job(index) for index in range(3)])
    assert bad == []


def test_one_drafters_end_is_everybodys() -> None:
    assert reduce_all(states(3), [False, True, False]) == [True, True, True]


def test_a_single_drafter_adds_nothing_up() -> None:
    (state,) = states(1)
    before = state.parameters.grad_N.clone()
    assert NoReduce().reduce(state, True)
    assert not NoReduce().reduce(state, False)
    assert torch.equal(state.parameters.grad_N, before)


def test_a_drafter_that_never_comes_ends_the_wait_with_who_waits() -> None:
    built = states(2)
    group = LocalGroup(2, Stop(), 0.3)
    reducers = [LocalReducer(group, index, state) for index, state in enumerate(built)]
    started = time.monotonic()
    with pytest.raises(StalledError, match=r"drafter 1 waited over 0.3 s for the others to finish their gradients"):
        reducers[1].reduce(built[1], False)
    assert time.monotonic() - started < 5


def test_a_failed_drafter_wakes_the_others_at_once() -> None:
    built, stop = states(3), Stop()
    group = LocalGroup(3, stop, 60.0)
    reducers = [LocalReducer(group, index, state) for index, state in enumerate(built)]

    def fail() -> None:
        time.sleep(0.2)
        stop.fail("drafter 2", ValueError("broken"))

    started = time.monotonic()
    results = together([lambda: reducers[0].reduce(built[0], False), lambda: reducers[1].reduce(built[1], False), fail])
    assert time.monotonic() - started < 5
    assert [type(result) for result in results] == [StoppedError, StoppedError, type(None)]
