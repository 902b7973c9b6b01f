"""A thread per worker: one failure ends all in time with that worker's error once, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import psutil
import pytest
import torch
from torch import Tensor

from draftsmith.drafter.anchors import draw_uniforms, select_anchors
from draftsmith.drafter.layout import document_layout
from draftsmith.errors import StalledError, WorkerError
from draftsmith.pipeline.assemble import Team
from draftsmith.pipeline.reduce import Reducer
from draftsmith.pipeline.stop import Stop, StoppedError
from draftsmith.pipeline.team import Worker, first_number, last_number, run_workers
from draftsmith.records import FeatureBatch
from draftsmith.target.capture import PackedCapture
from draftsmith.train.build import build_state
from draftsmith.train.step import TrainState, accumulate
from tests.pipeline.tiny import (
    CONFIG,
    SEED,
    SHAPE,
    TOKENS,
    Sizes,
    blueprint,
    documents,
    no_step,
    order,
    targets_of,
    team_of,
)

CPU = torch.device("cpu")


def worker(name: str, loop: Callable[[], None]) -> Worker:
    return Worker(name=name, device=CPU, stream=None, loop=loop)


def nothing() -> None:
    return


def test_all_workers_run_at_once_and_to_their_end() -> None:
    meeting = threading.Barrier(3)
    run_workers([worker(f"worker {i}", lambda: (meeting.wait(10), None)[1]) for i in range(3)], Stop(), nothing)


def test_while_running_is_called_until_the_end() -> None:
    calls: list[int] = []
    run_workers([worker("target 0", lambda: time.sleep(0.7))], Stop(), lambda: calls.append(1))
    assert len(calls) >= 2


def test_an_error_while_running_ends_the_workers_and_is_raised() -> None:
    stop = Stop()

    def loop() -> None:
        while True:
            stop.check()
            time.sleep(0.01)

    def broken() -> None:
        if not stop.failed:
            raise ValueError("display")

    with pytest.raises(ValueError, match="display"):
        run_workers([worker("target 0", loop)], stop, broken)
    assert stop.failed
    assert not stop.is_working("target 0")


def test_a_worker_that_hears_of_the_stop_ends_quietly() -> None:
    def loop() -> None:
        raise StoppedError("stopped")

    run_workers([worker("target 0", loop)], Stop(), nothing)


def test_a_worker_stuck_after_a_failure_does_not_keep_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.pipeline.team.GRACE_SECONDS", 0.5)
    release, stop = threading.Event(), Stop()

    def broken() -> None:
        raise ValueError("broken")

    workers = [worker("target 0", lambda: (release.wait(20), None)[1]), worker("target 1", broken)]
    started = time.monotonic()
    with pytest.raises(WorkerError, match="target 1 failed: ValueError: broken"):
        run_workers(workers, stop, nothing)
    assert time.monotonic() - started < 5
    assert stop.is_working("target 0")
    release.set()


class Bomb:
    """Raises when it has been called so often."""

    def __init__(self, calls: int, error: Exception) -> None:
        self.calls, self.error = calls, error

    def __call__(self) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise self.error


def team_with_bomb(where: str, joint: bool, error: Exception) -> Team:
    sizes = Sizes(targets=2, drafters=2, steps=400, stall=120, joint=joint)
    models = targets_of(2)
    bomb = Bomb(5, error)
    team = team_of(blueprint(sizes, models[0]), models, no_step)
    if where == "target":
        models[1].layers[0].register_forward_pre_hook(lambda *_: bomb())
    else:
        team.drafters[1].stepper.state.drafter.layers[0].register_forward_pre_hook(lambda *_: bomb())
    return team


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("where", ["target", "drafter"])
def test_an_exception_in_any_worker_ends_all_within_ten_seconds(where: str, joint: bool) -> None:
    team = team_with_bomb(where, joint, ValueError("struck by a bomb"))
    name = "worker 1" if joint else f"{where} 1"
    started = time.monotonic()
    with pytest.raises(WorkerError, match=f"{name} failed: ValueError: struck by a bomb"):
        run_workers(team.workers(), team.stop, nothing)
    assert time.monotonic() - started < 10
    assert not any(thread.name.startswith(("target", "drafter", "worker")) for thread in threading.enumerate())


def test_a_stalled_target_is_reported_by_the_drafter_that_waits() -> None:
    sizes = Sizes(targets=2, drafters=1, steps=400, stall=0.3)
    models = targets_of(2)
    team = team_of(blueprint(sizes, models[0]), models)
    models[1].layers[0].register_forward_pre_hook(lambda *_: time.sleep(1))
    with pytest.raises(StalledError, match=r"drafter 0 waits for the targets|target 0 waits for the ring of drafter 0"):
        run_workers(team.workers(), team.stop, nothing)


@pytest.mark.parametrize("cycles", [8, pytest.param(50, marks=pytest.mark.long)])
def test_start_stop_cycles_leak_no_thread_file_or_hook(cycles: int) -> None:
    models = targets_of(2)
    process = psutil.Process()

    def cycle() -> None:
        team = team_of(blueprint(Sizes(targets=2, drafters=2, steps=2, draws=1), models[0]), models)
        try:
            run_workers(team.workers(), team.stop, nothing)
        finally:
            team.close()

    for _ in range(3):
        cycle()
    gc.collect()
    threads, files, memory = threading.active_count(), process.num_fds(), process.memory_info().rss
    for _ in range(cycles):
        cycle()
    gc.collect()
    assert threading.active_count() == threads
    assert process.num_fds() == files
    assert not any(layer._forward_hooks for model in models for layer in model.layers)
    assert process.memory_info().rss - memory < 40e6


class Overheard:
    """A drafter's reducer that keeps what it leaves."""

    def __init__(self, inner: Reducer) -> None:
        self.inner = inner
        self.gradient_N, self.sums = torch.zeros(0), torch.zeros(0)

    def reduce(self, state: TrainState, is_last: bool) -> bool:
        ends = self.inner.reduce(state, is_last)
        self.gradient_N, self.sums = state.parameters.grad_N.clone(), state.sums.clone()
        return ends


def joined(batches: Sequence[FeatureBatch], uniforms: Sequence[Tensor], anchors: int) -> tuple[FeatureBatch, Tensor]:
    """Batches packed into one, and uniforms that choose in it what each batch's own choose `anchors` of."""
    used = [int(batch.num_tokens) for batch in batches]
    shape = replace(SHAPE, num_tokens=TOKENS * len(batches), num_documents=SHAPE.num_documents * len(batches))
    whole, low = FeatureBatch.allocate(shape, CPU), 0
    raised = torch.zeros(shape.num_tokens, dtype=torch.float64)
    lengths = torch.cat([batch.lengths_D[batch.lengths_D > 0] for batch in batches])
    whole.lengths_D[: len(lengths)] = lengths
    whole.num_tokens.fill_(sum(used))
    for batch, count, own_T in zip(batches, used, uniforms, strict=True):
        rows = slice(low, low + count)
        whole.token_ids_T[rows] = batch.token_ids_T[:count]
        whole.loss_mask_T[rows] = batch.loss_mask_T[:count]
        whole.features_TFH[rows] = batch.features_TFH[:count]
        ids_T = document_layout(batch.lengths_D, TOKENS).document_ids_T
        chosen = select_anchors(batch.loss_mask_T, ids_T, own_T, anchors)
        assert chosen.valid_A.all()
        raised[rows] = own_T[:count] / 2
        raised[low + chosen.index_A] += 0.5
        low += count
    return whole, raised


def test_two_colocated_drafters_make_the_gradient_of_one_on_the_joined_batch() -> None:
    models = targets_of(2)
    plan = blueprint(Sizes(targets=2, drafters=2, draws=1, steps=1, joint=True), models[0])
    team = team_of(plan, models)
    heard = [Overheard(loop._reducer) for loop in team.drafters]
    for loop, reducer in zip(team.drafters, heard, strict=True):
        loop._reducer = reducer
    start = build_state(copy.deepcopy(plan.drafter), plan.ends, plan.state, CPU)
    run_workers(team.workers(), team.stop, nothing)
    team.close()
    assert torch.equal(heard[0].gradient_N, heard[1].gradient_N)
    with PackedCapture(models[0], CONFIG.taps, SHAPE) as capture:
        batches = [copy.deepcopy(capture.run(order().batch(number), documents())) for number in (0, 1)]
    anchors = plan.state.step.num_anchors
    whole, uniforms = joined(batches, [draw_uniforms(SEED, number, 0, TOKENS) for number in (0, 1)], anchors)
    one = replace(start, config=replace(plan.state.step, num_anchors=2 * anchors))
    accumulate(one, whole, uniforms)
    torch.testing.assert_close(heard[0].sums, one.sums, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(heard[0].gradient_N, one.parameters.grad_N, rtol=1e-4, atol=1e-6)
    assert heard[0].gradient_N.abs().max() > 1e-2


def test_numbers_that_drafters_still_need() -> None:
    models = targets_of(1)
    team = team_of(blueprint(Sizes(drafters=2, draws=4, accumulation=2, steps=7), models[0]), models)
    assert (first_number(team.drafters), last_number(team.drafters)) == (0, 8)
    for loop in team.drafters:
        loop.start_at(3)
    assert first_number(team.drafters) == 2
    team.close()
