"""What the first drafter does besides training: log, measure, save. Called after every step, in its thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import CaptureError, DraftsmithError, StalledError
from draftsmith.pipeline.assemble import Team
from draftsmith.pipeline.buffers import POLL_SECONDS
from draftsmith.pipeline.drafter_loop import DrafterTrainLoop
from draftsmith.pipeline.stop import Stop
from draftsmith.pipeline.utilisation import GpuSampler
from draftsmith.records import EMPTY
from draftsmith.target.compute import compiled_graphs
from draftsmith.train.checkpoint import Position
from draftsmith.train.checkpoint_writer import CheckpointWriter
from draftsmith.train.metrics import MetricsWriter, read_step

Measured = tuple[float, Mapping[str, Any]]
"""A score (higher is better) and the numbers of an evaluation for the log."""
Measure = Callable[[int, dict[str, Tensor]], Measured]
"""(step, masters by name on the CPU) -> what the true loop measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Steps between log lines, checkpoints and evaluations (0 turns evaluation during training off)."""

    log_every: int
    save_every: int
    eval_every: int
    total_steps: int
    strict: bool = False
    """Whether a graph compiled after warm-up ends the run."""


class Chief:
    """Owns the run's log and checkpoints while it trains; `after_step` runs in the first drafter's thread."""

    def __init__(
        self,
        rhythm: Rhythm,
        writer: MetricsWriter,
        measure: Measure | None,
        show: Callable[[Mapping[str, Any]], None],
        stop: Stop,
    ) -> None:
        self._rhythm, self._writer, self._measure, self._show, self._stop = rhythm, writer, measure, show, stop
        self._team: Team | None = None
        self._checkpoints: CheckpointWriter | None = None
        self._sampler: GpuSampler | None = None
        self._last_saved = -1
        self._logged_at, self._logged_step, self._logged_tokens = time.perf_counter(), 0, 0
        self._graphs, self._late = 0, 0
        self.last: Mapping[str, Any] = {}
        """The last log line's numbers."""

    def join(self, team: Team, checkpoints: CheckpointWriter, sampler: GpuSampler | None = None) -> None:
        """Take up work once the team stands; `sampler` tells how busy its GPUs are."""
        self._team, self._checkpoints, self._sampler = team, checkpoints, sampler
        self._graphs = compiled_graphs()
        self._logged_at, self._logged_step = time.perf_counter(), team.drafters[0].step

    @property
    def _drafter(self) -> DrafterTrainLoop:
        assert self._team is not None
        return self._team.drafters[0]

    def after_step(self, step: int, last: bool) -> None:
        """Log, measure and save where this step is due, and always after the last."""
        if last or step % self._rhythm.log_every == 0:
            self._log(step)
        score: float | None = None
        if self._measure is not None and self._rhythm.eval_every and step % self._rhythm.eval_every == 0 and not last:
            score = self._evaluate(step, self._measure)
        if last or score is not None or step % self._rhythm.save_every == 0:
            self.save(score)

    def _look_for_late_compiles(self) -> None:
        """Count graphs compiled since the team stood: each stalls a worker, and means a shape nobody planned.

        Raises:
            CaptureError: there is one, under --strict.
        """
        self._late = compiled_graphs() - self._graphs
        if self._late and self._rhythm.strict:
            raise CaptureError(
                f"{self._late} graph(s) were compiled after warm-up, which --strict forbids: run with "
                "TORCH_LOGS=recompiles to see why, or without --strict to count them"
            )

    def _log(self, step: int) -> None:
        assert self._team is not None
        self._look_for_late_compiles()
        stepper = self._drafter.stepper
        numbers = read_step(stepper.state, stepper.inputs.totals)
        stepper.inputs.totals.zero_()
        now = time.perf_counter()
        seconds, steps = max(1e-9, now - self._logged_at), step - self._logged_step
        tokens = sum(producer.clock.tokens for producer in self._team.producers)
        line: dict[str, Any] = {
            **numbers,
            "batch": self._drafter.draws_done // self._drafter.plan.draws_per_batch,
            "draws": self._drafter.draws_done,
            "steps_per_s": steps / seconds,
            "tokens_per_s": (tokens - self._logged_tokens) / seconds,
            "labels_per_s": float(numbers["labels"]) / seconds,
            "step_ms": 1e3 * seconds / max(1, steps),
        }
        self._logged_at, self._logged_step, self._logged_tokens = now, step, tokens
        self._writer.write("train", step, line)
        busy = {} if self._sampler is None else self._sampler.take()
        system = {**system_line(self._team, busy), "late_compiles": self._late}
        self._writer.write("system", step, system)
        self.last = line
        self._show({"step": step, **line, "system": system})

    def _evaluate(self, step: int, measure: Measure) -> float:
        """Run the true loop in the first target's thread and wait for it; the drafter stands still meanwhile."""
        assert self._team is not None
        weights = masters_on_cpu(self._drafter)
        box: list[Measured] = []
        if self._team.placement.joint or self._team.is_remote:
            box.append(measure(step, weights))
        else:
            done = threading.Event()

            def work() -> None:
                box.append(measure(step, weights))
                done.set()

            self._team.producers[0].requests.append(work)
            self._wait(done)
        score, numbers = box[0]
        self._writer.write("eval", step, numbers)
        self._show({"step": step, "tau": score})
        return score

    def _wait(self, done: threading.Event) -> None:
        assert self._team is not None
        started, limit = time.monotonic(), self._team.rings[0].place.stall_seconds
        while not done.wait(POLL_SECONDS):
            self._stop.check()
            if time.monotonic() - started > limit:
                raise StalledError(
                    f"the first target didn't come to an evaluation within {limit:g} s (--stall-seconds)"
                )

    def rescue(self) -> None:
        """After a failure: keep the last whole step, where the first drafter still has one.

        A half-done step's gradients are not part of a checkpoint, so it doesn't matter where in a step it stood; its
        own unforeseen error (out of memory, a lost device) leaves nothing to trust.
        """
        if self._team is None or self._checkpoints is None:
            return
        worker, error = self._team.chief_worker, self._stop.error
        if self._stop.is_working(worker) or (self._stop.is_from(worker) and not isinstance(error, DraftsmithError)):
            return
        if self._drafter.step > 0:
            self.save()

    def save(self, score: float | None = None) -> None:
        """Checkpoint the step just finished, in the background."""
        assert self._checkpoints is not None
        drafter = self._drafter
        if drafter.step == self._last_saved:
            return
        batch, draw = divmod(drafter.step * drafter.plan.accumulation, drafter.plan.draws_per_batch)
        position = Position(step=drafter.step, batch=batch, draw=draw, metrics_bytes=self._writer.sync())
        self._checkpoints.save(position, score)
        self._last_saved = drafter.step


def masters_on_cpu(drafter: DrafterTrainLoop) -> dict[str, Tensor]:
    """Copies of the fp32 masters by name, on the CPU (waits for the device)."""
    parameters = drafter.stepper.state.parameters
    return parameters.named(parameters.master_N.detach().to("cpu", copy=True))


def system_line(team: Team, busy: Mapping[str, Mapping[str, float]] = EMPTY) -> dict[str, Any]:
    """Shares of busy and waiting per worker, queue depths, memory of each GPU and what `busy` says of it."""
    line: dict[str, Any] = {
        "workers": {loop.clock.name: loop.clock.shares() for loop in (*team.producers, *team.drafters)},
        "queue_depth": [ring.depth for ring in team.rings],
    }
    devices = {device for device in (*team.placement.targets, *team.placement.drafters) if device.type == "cuda"}
    if devices:
        names = sorted(map(str, devices))
        line["gpus"] = {name: {**gpu_line(torch.device(name)), **busy.get(name, {})} for name in names}
    return line


def gpu_line(device: torch.device) -> dict[str, float]:
    """Allocated, reserved and peak bytes of this process."""
    return {
        "allocated_bytes": float(torch.cuda.memory_allocated(device)),
        "reserved_bytes": float(torch.cuda.memory_reserved(device)),
        "peak_bytes": float(torch.cuda.max_memory_allocated(device)),
    }


def idle_report(team: Team) -> Sequence[str]:
    """A line for each role that idled more than 15%, with what would help."""
    lines: list[str] = []
    if team.placement.joint:
        return lines
    targets = [loop.clock.shares() for loop in team.producers]
    drafters = [loop.clock.shares() for loop in team.drafters]
    waiting_room = sum(share["waiting_room"] for share in targets) / len(targets)
    waiting_input = sum(share["waiting_input"] for share in drafters) / len(drafters)
    if waiting_room > 0.15:
        lines.append(
            f"targets waited {waiting_room:.0%} of the time for the drafters: fewer draws (--draws-per-batch), or more "
            "drafters (--drafters), would use them"
        )
    if waiting_input > 0.15:
        lines.append(
            f"drafters waited {waiting_input:.0%} of the time for features: more draws (--labels-per-token), more "
            "targets (--targets), or --target-compute fp8 would use them"
        )
    return lines
