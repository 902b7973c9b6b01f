"""What of the capture can be tested without a GPU; tests/gpu/test_step.py has the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftsmith.drafter.loss import LossSums
from draftsmith.errors import CaptureError
from draftsmith.train.graph import InputGuard, PlainStep, StepInputs, explained
from tests.train import tiny

CPU = torch.device("cpu")


def test_inputs_are_allocated_zeroed_and_named() -> None:
    shape = tiny.tiny_shape()
    inputs = StepInputs.allocate(shape, tiny.BLOCK, CPU)
    assert inputs.uniforms_T.dtype == torch.float64
    assert inputs.totals.numel() == LossSums.num_sums(tiny.BLOCK)
    assert set(inputs.tensors()) == {*inputs.batch.tensors(), "uniforms_T", "totals"}
    assert all(not tensor.any() for tensor in inputs.tensors().values())


def test_the_plain_step_runs_both_pieces_on_its_inputs() -> None:
    state = tiny.Tiny().build()
    stepper = PlainStep(state, StepInputs.allocate(tiny.tiny_shape(), tiny.BLOCK, CPU))
    batch = tiny.tiny_batch()
    stepper.inputs.batch.copy_(batch)
    stepper.inputs.uniforms_T.copy_(tiny.uniforms(batch))
    before = state.parameters.master_N.clone()
    stepper.accumulate()
    assert state.parameters.grad_N.any()
    stepper.update()
    assert not torch.equal(state.parameters.master_N, before)
    assert stepper.inputs.totals[3] > 0


@pytest.mark.parametrize("change", ["shape", "dtype", "address"])
def test_a_changed_input_is_refused_by_name(change: str) -> None:
    inputs = StepInputs.allocate(tiny.tiny_shape(), tiny.BLOCK, CPU)
    guard = InputGuard(inputs)
    guard.check(inputs)
    uniforms = inputs.uniforms_T
    changed = {"shape": uniforms[:-1], "dtype": uniforms.float(), "address": uniforms.clone()}[change]
    with pytest.raises(CaptureError, match=r"uniforms_T changed from .* copy into the buffer"):
        guard.check(replace(inputs, uniforms_T=changed))


def test_a_failed_capture_names_operation_version_and_the_way_out() -> None:
    error = explained(
        RuntimeError("operation not permitted when stream is capturing: aten::nonzero\nCUDA kernel errors")
    )
    text = str(error)
    assert "aten::nonzero" in text
    assert torch.__version__ in text
    assert "capture" in text
    assert "off" in text
