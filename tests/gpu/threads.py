"""Five targets and two drafters as threads of one process on one GPU, started cold and warm many times.

    python -m tests.gpu.threads                                  20 processes at once: 1 cold + 5 warm starts each
    python -m tests.gpu.threads --processes 4 --warm 25          fewer processes, more warm starts in each

Each process gets empty compile caches of its own, so its first start compiles everything. A start builds rings,
targets, drafters and graphs, runs all threads for 20 steps and reports every step's loss. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

COLD, WARM, LIMIT_SECONDS = 20, 100, 240.0
TARGETS, DRAFTERS, STEPS = 5, 2, 20
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one process reported."""

    returncode: int
    starts: list[dict[str, Any]]
    """`losses` of every step and `seconds`, the cold start first."""
    errors: str


def spawn(warm: int, caches: Path, device: str, steps: int) -> subprocess.Popen[str]:
    """A process of its own with compile caches in `caches`: a first start, cold if they are empty, then `warm` more."""
    caches.mkdir(exist_ok=True)
    fresh = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # as many processes as cores compile at once
        "OMP_NUM_THREADS": "1",
    }
    given = ["--starts", str(1 + warm), "--device", device, "--steps", str(steps)]
    command = [sys.executable, "-m", "tests.gpu.threads", *given]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | fresh, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_processes(
    processes: int,
    warm: int,
    device: str = "cuda",
    limit: float = LIMIT_SECONDS,
    steps: int = STEPS,
    shared: bool = False,
) -> list[Outcome]:
    """All processes at once; one that is not done in `limit` seconds is killed and reports what it had printed.

    With `shared` the first fills the caches alone and the others start from them.
    """
    outcomes: list[Outcome] = []
    with TemporaryDirectory() as folder:
        if shared:
            first = spawn(warm, Path(folder) / "shared", device, steps)
            outcomes.append(finish(first, time.monotonic() + limit))
        names = ["shared"] * (processes - 1) if shared else [str(index) for index in range(processes)]
        deadline = time.monotonic() + limit
        running = [spawn(warm, Path(folder) / name, device, steps) for name in names]
        outcomes += [finish(process, deadline) for process in running]
    return outcomes


def finish(process: subprocess.Popen[str], deadline: float) -> Outcome:
    """Wait for a process until `deadline` (time.monotonic), then kill it."""
    try:
        out, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        errors += "\nnot done in time"
    starts = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return Outcome(process.returncode, starts, errors)


def start_repeatedly(starts: int, device_name: str, steps: int) -> None:
    """In a process of its own: build the team and run it, `starts` times; one JSON line each."""
    from tests.gpu.threads_team import run_team

    # A hang tells where every thread stands before it is killed.
    faulthandler.dump_traceback_later(LIMIT_SECONDS - 10, exit=True)
    for _ in range(starts):
        started = time.perf_counter()
        losses = run_team(device_name, TARGETS, DRAFTERS, steps)
        print(json.dumps({"seconds": time.perf_counter() - started, "losses": losses}), flush=True)
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=COLD)
    parser.add_argument("--warm", type=int, default=WARM // COLD, help="warm starts in each process after its cold one")
    parser.add_argument("--starts", type=int, default=0, help="be one of the processes: start so often")
    parser.add_argument("--shared-caches", action="store_true", help="all but the first start from the first's caches")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS)
    arguments = parser.parse_args()
    if arguments.starts:
        start_repeatedly(arguments.starts, arguments.device, arguments.steps)
        return
    started = time.perf_counter()
    outcomes = run_processes(
        arguments.processes,
        arguments.warm,
        arguments.device,
        arguments.limit,
        arguments.steps,
        arguments.shared_caches,
    )
    for number, outcome in enumerate(outcomes):
        seconds = " ".join(f"{start['seconds']:.1f}" for start in outcome.starts)
        print(f"process {number}: exit {outcome.returncode}, seconds a start: {seconds}")
    for outcome in outcomes:
        if outcome.returncode:
            print(outcome.errors[-3000:])
            break
    print(json.dumps(summary(outcomes) | {"seconds": time.perf_counter() - started}))


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """How many starts ended, and how many different curves of losses they gave."""
    starts = [start for outcome in outcomes for start in outcome.starts]
    curves = {tuple(start["losses"]) for start in starts}
    per_process = [len({tuple(start["losses"]) for start in outcome.starts}) for outcome in outcomes]
    last = [start["losses"][-1] for start in starts]
    return {
        "cold": sum(bool(outcome.starts) for outcome in outcomes),
        "warm": sum(max(0, len(outcome.starts) - 1) for outcome in outcomes),
        "failed_processes": sum(outcome.returncode != 0 for outcome in outcomes),
        "different_curves": len(curves),
        "most_curves_in_one_process": max(per_process, default=0),
        "last_loss_low": min(last, default=None),
        "last_loss_high": max(last, default=None),
    }


if __name__ == "__main__":
    main()
