"""The chief: what is logged, measured and saved when, and what a failure or a stop leaves on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.errors import CaptureError, DraftsmithError, StalledError, WorkerError
from draftsmith.pipeline.assemble import Team
from draftsmith.pipeline.chief import Chief, Measure, Rhythm, idle_report, masters_on_cpu, system_line
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.team import run_workers
from draftsmith.train.checkpoint import CheckpointConfig, RunRecord, load_checkpoint
from draftsmith.train.checkpoint_writer import CheckpointWriter
from draftsmith.train.metrics import MetricsWriter
from tests.pipeline.tiny import Sizes, blueprint, run_by_hand, targets_of, team_of

SIZES = Sizes(targets=2, drafters=1, draws=3, accumulation=2, steps=8, stall=15)


class Run:
    """A team with a chief, over a folder; `before_step` may break things."""

    def __init__(
        self,
        folder: Path,
        sizes: Sizes = SIZES,
        measure: Measure | None = None,
        eval_every: int = 0,
        strict: bool = False,
    ) -> None:
        self.folder, self.stop = folder, Stop()
        self.shown: list[Mapping[str, Any]] = []
        rhythm = Rhythm(log_every=3, save_every=5, eval_every=eval_every, total_steps=sizes.steps, strict=strict)
        self.writer = MetricsWriter(folder)
        self.chief = Chief(rhythm, self.writer, measure, self.shown.append, self.stop)
        self.models = targets_of(sizes.targets)
        self.watch: Callable[[int], None] = lambda _step: None
        self.team: Team = team_of(blueprint(sizes, self.models[0], self.stop), self.models, self.after_step)

    def after_step(self, step: int, is_last: bool) -> None:
        self.chief.after_step(step, is_last)
        self.watch(step)

    def go(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.writer)
            state = self.team.drafters[0].stepper.state
            record = RunRecord(config={}, data_fingerprint="f")
            saver = stack.enter_context(CheckpointWriter(self.folder, CheckpointConfig(keep=9), state, record))
            self.chief.join(self.team, saver)
            try:
                run_workers(self.team.workers(), self.stop, lambda: None)
            finally:
                if self.stop.failed:
                    self.chief.rescue()
                self.team.close()

    def lines(self, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def saved(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir() if path.is_dir())


def weights_after(step: int, sizes: Sizes = SIZES) -> torch.Tensor:
    """The schedule follows the whole run, so the run by hand is cut, not shortened."""
    return run_by_hand(sizes, last_step=step).master_N


def same_weights(run: Run, step: int, sizes: Sizes = SIZES) -> bool:
    found = load_checkpoint(run.folder).masters
    expected = run.team.drafters[0].stepper.state.parameters.named(weights_after(step, sizes))
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_logs_and_saves_when_due_and_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.go()
    assert [line["step"] for line in run.lines("train")] == [3, 6, 8]
    assert run.saved() == ["step-00000005", "step-00000008"]
    position = load_checkpoint(tmp_path).position
    assert (position.step, position.batch, position.draw) == (8, 5, 1)
    assert same_weights(run, 8)
    assert set(run.lines("system")[0]["workers"]) == {"target 0", "target 1", "drafter 0"}


def test_a_stop_saves_the_step_it_ends_with(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.watch = lambda step: run.stop.request() if step == 2 else None
    run.go()
    assert run.saved() == ["step-00000003"]
    assert same_weights(run, 3)


def test_a_target_that_dies_in_the_middle_of_a_step_costs_that_step_only(tmp_path: Path) -> None:
    """Its gradients are half there; what is saved are the weights of the last whole step, under its number."""
    sizes = replace(SIZES, steps=60, slots=1)
    run = Run(tmp_path, sizes)

    def strike(*_: object) -> None:
        if run.team.drafters[0].step >= 6:
            raise ValueError("lost")

    for model in run.models:
        model.layers[0].register_forward_pre_hook(strike)
    with pytest.raises(WorkerError, match=r"target \d failed: ValueError: lost"):
        run.go()
    step = run.team.drafters[0].step
    assert 6 <= step < 60
    assert run.saved()[-1] == f"step-{step:08d}"
    assert same_weights(run, step, sizes)


def test_a_reduce_that_fails_after_all_draws_is_not_counted_as_a_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    loop = run.team.drafters[0]

    class Broken:
        def reduce(self, state: object, is_last: bool) -> bool:
            if loop.step == 4:
                raise StalledError("drafter 0 waited")
            return is_last

    loop._reducer = Broken()
    with pytest.raises(StalledError):
        run.go()
    assert run.saved() == ["step-00000004"]
    assert same_weights(run, 4)
    position = load_checkpoint(tmp_path).position
    assert (position.step, position.batch, position.draw) == (4, 2, 2), "not the draws that were lost"


def test_the_drafters_own_unforeseen_error_leaves_nothing_to_save(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def strike(*_: object) -> None:
        if run.team.drafters[0].step == 4:
            raise MemoryError("out of memory")

    run.team.drafters[0].stepper.state.drafter.layers[0].register_forward_pre_hook(strike)
    with pytest.raises(WorkerError, match="drafter 0 failed: MemoryError"):
        run.go()
    assert run.saved() == []


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("slots", [1, 4])
def test_measuring_during_training_never_waits_for_a_waiting_target(tmp_path: Path, joint: bool, slots: int) -> None:
    """Targets faster than the drafter wait for room, and with many slots they are done before the end."""
    measured: list[tuple[int, float]] = []

    def measure(step: int, weights: dict[str, torch.Tensor]) -> tuple[float, Mapping[str, Any]]:
        measured.append((step, float(weights["norm.weight"].sum())))
        return float(step), {"tau": step}

    sizes = replace(SIZES, targets=1, slots=slots, joint=joint)
    run = Run(tmp_path, sizes, measure, eval_every=1)
    run.go()
    assert [step for step, _ in measured] == list(range(1, sizes.steps))
    assert [line["step"] for line in run.lines("eval")] == list(range(1, sizes.steps))
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["score"] == sizes.steps - 1


def test_an_evaluation_that_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    def measure(_step: int, _weights: dict[str, torch.Tensor]) -> tuple[float, Mapping[str, Any]]:
        raise ValueError("no answer")

    run = Run(tmp_path, SIZES, measure, eval_every=2)
    with pytest.raises(DraftsmithError, match="target 0 failed: ValueError: no answer"):
        run.go()


def test_masters_are_copies(tmp_path: Path) -> None:
    run = Run(tmp_path)
    weights = masters_on_cpu(run.team.drafters[0])
    run.team.drafters[0].stepper.state.parameters.master_N.zero_()
    assert any(tensor.any() for tensor in weights.values())
    run.writer.close()
    run.team.close()


def test_idle_roles_are_named_with_what_would_help(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for loop in (*run.team.producers, *run.team.drafters):
        loop.clock.started -= 100
    assert idle_report(run.team) == []
    run.team.producers[0].clock.waiting_room = 100
    run.team.drafters[0].clock.waiting_input = 50
    targets, drafters = idle_report(run.team)
    assert targets.startswith("targets waited 50% of the time for the drafters: fewer draws (--draws-per-batch)")
    assert drafters.startswith("drafters waited 50% of the time for features")
    run.writer.close()
    run.team.close()


@pytest.mark.parametrize("strict", [False, True])
def test_a_late_compile_is_counted_or_under_strict_the_end(tmp_path: Path, strict: bool) -> None:
    run = Run(tmp_path, strict=strict)

    def compile_late(step: int) -> None:
        if step == 4:
            torch._dynamo.utils.counters["stats"]["unique_graphs"] += 1

    run.watch = compile_late
    if strict:
        with pytest.raises(CaptureError, match=r"1 graph.* compiled after warm-up, which --strict forbids"):
            run.go()
        return
    run.go()
    assert [line["late_compiles"] for line in run.lines("system")] == [0, 1, 1]


def test_the_system_line_says_how_busy_each_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's numbers and the driver's stand side by side; a GPU that wasn't sampled has the first only."""
    team = team_of(blueprint(SIZES, targets_of(1)[0]), targets_of(2))
    place = replace(team.placement, targets=(torch.device("cuda", 0),), drafters=(torch.device("cuda", 1),))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 100 + device.index)
    line = system_line(replace(team, placement=place), {"cuda:1": {"utilisation": 0.5, "used_bytes": 7.0}})
    own = {"allocated_bytes": 100.0, "reserved_bytes": 100.0, "peak_bytes": 100.0}
    other = {"allocated_bytes": 101.0, "reserved_bytes": 101.0, "peak_bytes": 101.0}
    assert line["gpus"] == {"cuda:0": own, "cuda:1": {**other, "utilisation": 0.5, "used_bytes": 7.0}}
    team.close()
