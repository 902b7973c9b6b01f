"""Threads that share a GPU start and end without a race or a hang, cold and warm, always with the same losses."""

from __future__ import annotations

import math

import pytest

from tests.gpu.threads import COLD, STEPS, WARM, run_processes

pytestmark = pytest.mark.gpu


@pytest.mark.long
def test_five_targets_and_two_drafters_start_cold_and_warm_and_end_alike() -> None:
    outcomes = run_processes(COLD, WARM // COLD)
    for outcome in outcomes:
        assert outcome.returncode == 0, outcome.errors[-3000:]
        assert len(outcome.starts) == 1 + WARM // COLD
        curves = [start["losses"] for start in outcome.starts]
        assert all(len(curve) == STEPS and all(map(math.isfinite, curve)) for curve in curves)
        assert all(curve == curves[0] for curve in curves), "losses depend on the start within a process"
        assert curves[0][-1] < curves[0][0], "nothing was learned"
        # Compilers of processes with caches of their own may choose other kernels, which round otherwise.
        assert curves[0] == pytest.approx(outcomes[0].starts[0]["losses"], rel=2e-3)


@pytest.mark.long
def test_processes_that_share_a_compile_cache_give_the_same_losses_to_the_bit() -> None:
    outcomes = run_processes(4, 0, shared=True)
    for outcome in outcomes:
        assert outcome.returncode == 0, outcome.errors[-3000:]
        assert [start["losses"] for start in outcome.starts] == [outcomes[0].starts[0]["losses"]]
