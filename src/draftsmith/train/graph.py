"""Capture of `accumulate` and `update` as CUDA graphs, and the plain runner with the same face.

A graph holds addresses, not content: whoever feeds a captured step copies into `StepInputs` and replays. Graph outputs
are the state's own buffers (gradients, sums, weights), which live as long as the state; nothing else leaves a graph.

Rules paid for: every warm-up runs on the stream that captures, from the first step on; no autograd graph of a warm-up
may still be referenced; other threads stay free to use their own devices (`capture_error_mode="thread_local"`).
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftsmith.drafter.loss import LossSums
from draftsmith.errors import CaptureError
from draftsmith.records import BatchShape, FeatureBatch
from draftsmith.train.step import TrainState, accumulate, update

WARMUPS = 3
"""Steps before capture: compile, let libraries allocate their workspaces, then once more at rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What a step reads and where it leaves its log, allocated once; written by `copy_` only.

    `uniforms_T` float64: one draw's uniforms. `totals` float64: LossSums added up since the log last zeroed them.
    """

    batch: FeatureBatch
    uniforms_T: Tensor
    totals: Tensor

    @classmethod
    def allocate(cls, shape: BatchShape, block_size: int, device: torch.device) -> StepInputs:
        return cls(
            batch=FeatureBatch.allocate(shape, device),
            uniforms_T=torch.zeros(shape.num_tokens, dtype=torch.float64, device=device),
            totals=torch.zeros(LossSums.num_sums(block_size), dtype=torch.float64, device=device),
        )

    def tensors(self) -> dict[str, Tensor]:
        return {**self.batch.tensors(), "uniforms_T": self.uniforms_T, "totals": self.totals}


class Stepper(Protocol):
    """Runs the two pieces of a step on `inputs`, captured or not; the reduce between drafters stays outside."""

    state: TrainState
    inputs: StepInputs

    def accumulate(self) -> None: ...

    def update(self) -> None: ...


class InputGuard:
    """Remembers the inputs of a capture: a graph holds addresses, so another tensor would be ignored in silence."""

    def __init__(self, inputs: StepInputs) -> None:
        self._expected = {name: _identity(tensor) for name, tensor in inputs.tensors().items()}

    def check(self, inputs: StepInputs) -> None:
        """Refuse inputs that are not the captured ones.

        Raises:
            CaptureError: naming the input whose shape, dtype, device or address changed, from what, to what.
        """
        for name, tensor in inputs.tensors().items():
            now, then = _identity(tensor), self._expected[name]
            if now != then:
                raise CaptureError(
                    f"captured input {name} changed from {then} to {now}: copy into the buffer instead of replacing it"
                )


class PlainStep:
    """The step as it is written: on the CPU, and on a GPU with `capture = "off"`."""

    def __init__(self, state: TrainState, inputs: StepInputs) -> None:
        self.state = state
        self.inputs = inputs

    def accumulate(self) -> None:
        accumulate(self.state, self.inputs.batch, self.inputs.uniforms_T)

    def update(self) -> None:
        update(self.state, self.inputs.totals)


class CapturedStep:
    """Both pieces as CUDA graphs over one memory pool on one private stream.

    Replays run on the stream current at the call; the caller keeps that stream the one captured on (`stream`), or
    orders it by events. Building one compiles, warms up, captures and tests itself, and leaves the state as it found
    it. One capture at a time per process: the caller builds them device after device.
    """

    def __init__(self, state: TrainState, inputs: StepInputs, stream: torch.cuda.Stream) -> None:
        self.state = state
        self.inputs = inputs
        self.stream = stream
        self._guard = InputGuard(inputs)
        plain = PlainStep(state, inputs)
        before = _counters(state, inputs)
        started = time.perf_counter()
        with torch.cuda.stream(stream):
            try:
                _fill_for_self_test(inputs)
                reference = _warm_up(plain)
                self._accumulate, pool = _capture(plain.accumulate, stream, None)
                self._update, _ = _capture(plain.update, stream, pool)
                self._self_test(reference)
            except CaptureError:
                raise
            except RuntimeError as error:
                raise explained(error) from error
            finally:
                _restore(state, inputs, before)
            stream.synchronize()
        self.capture_seconds = time.perf_counter() - started

    def accumulate(self) -> None:
        """Replay one draw over `inputs`.

        Raises:
            CaptureError: an input's shape, dtype, device or address is not the captured one.
        """
        self._guard.check(self.inputs)
        self._accumulate.replay()

    def update(self) -> None:
        """Replay the update of the accumulated gradients."""
        self._update.replay()

    def _self_test(self, reference: Tensor) -> None:
        """A replay must give the very sums and gradients of the uncaptured step; else the capture is of no use."""
        self.state.parameters.grad_N.zero_()
        self.state.sums.zero_()
        self.accumulate()
        replayed = _fingerprint(self.state)
        self.stream.synchronize()
        if not torch.equal(replayed, reference):
            raise CaptureError(
                f"a replay differs from the same step uncaptured by {(replayed - reference).abs().max().item():g} "
                f'(torch {torch.__version__}); run with capture = "off" and report it'
            )


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, str(tensor.device), tensor.data_ptr()


def _counters(state: TrainState, inputs: StepInputs) -> list[tuple[Tensor, Tensor]]:
    """The small tensors that warm-up disturbs, with copies; weights and moments stay, since every update is skipped."""
    optimizer = state.optimizer
    touched = [optimizer.step, optimizer.skipped, optimizer.empty, optimizer.lr, optimizer.grad_norm, inputs.totals]
    return [(tensor, tensor.clone()) for tensor in touched]


def _restore(state: TrainState, inputs: StepInputs, before: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, copy in before:
        tensor.copy_(copy)
    state.parameters.grad_N.zero_()
    state.sums.zero_()
    for tensor in inputs.tensors().values():
        if tensor is not inputs.totals:
            tensor.zero_()


def _fill_for_self_test(inputs: StepInputs) -> None:
    """Two documents of pseudo-random features over most of the budget, every token supervised."""
    batch = inputs.batch
    half = max(1, (batch.shape.num_tokens - 7) // 2)
    batch.lengths_D.zero_()
    batch.lengths_D[:2] = half
    place = torch.arange(batch.shape.num_tokens, device=inputs.uniforms_T.device)
    batch.loss_mask_T.copy_(place < 2 * half)
    batch.token_ids_T.copy_(place % 97)
    batch.num_tokens.fill_(2 * half)
    inputs.uniforms_T.copy_(torch.frac(place.to(torch.float64) * 0.6180339887498949))
    batch.features_TFH.copy_(torch.sin(place[:, None].float()).to(batch.shape.dtype))
    if batch.last_hidden_TH is not None:
        batch.last_hidden_TH.copy_(torch.cos(place[:, None].float()).to(batch.shape.dtype))


def _warm_up(plain: PlainStep) -> Tensor:
    """Run the pieces until they allocate nothing new; returns the fingerprint of one accumulate.

    Updates run with the sums zeroed, hence without a label: they change no weight, moment or step count of Adam's.
    """
    reference = torch.zeros(0)
    for _ in range(WARMUPS):
        plain.state.parameters.grad_N.zero_()
        plain.state.sums.zero_()
        plain.accumulate()
        reference = _fingerprint(plain.state)
        plain.state.sums.zero_()
        plain.state.parameters.grad_N.zero_()
        plain.update()
    torch.cuda.current_stream().synchronize()
    # Graphs of the warm-up must be gone before the capture, and their memory is better off in the graphs' own pool.
    gc.collect()
    torch.cuda.empty_cache()
    return reference


def _fingerprint(state: TrainState) -> Tensor:
    """Sums and order-fixed reductions of the gradient: equal bits mean equal steps without a second buffer of N."""
    gradient = state.parameters.grad_N
    least, most = torch.aminmax(gradient)  # a copy of N, as abs() makes one, would stay reserved
    folded = torch.stack([gradient.norm(), gradient.sum(), torch.maximum(-least, most)])
    return torch.cat([state.sums, folded]).clone()


def _capture(piece: Any, stream: torch.cuda.Stream, pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        piece()
    return graph, graph.pool()


def explained(error: RuntimeError) -> CaptureError:
    """What couldn't be captured, as the error's first line has it, the torch version, and the way out."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    return CaptureError(
        f'the step could not be captured with torch {torch.__version__}: {reason}. Run with capture = "off" to train '
        "uncaptured (slower, not flat), or with --debug for the operation's traceback"
    )
