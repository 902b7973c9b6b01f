"""The optimizer against plain AdamW, and its schedules against hand-worked numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.train.optim import OptimConfig, Optimizer, adamw_pass, compiled_pass, learning_rate
from draftsmith.train.parameters import FlatParameters


class Small(nn.Module):
    """A matrix and a norm weight."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        self.norm = nn.Parameter(torch.ones(64))


def build(
    dtype: torch.dtype = torch.float32, one_pass: bool = False, **options: Any
) -> tuple[FlatParameters, Optimizer]:
    settings: dict[str, Any] = {"lr": 0.1, "schedule": "constant", "warmup": 0.0, "clip": 1e9} | options
    parameters = FlatParameters.install(Small(), dtype, "cpu")
    optimizer = Optimizer.build(OptimConfig(**settings), parameters, total_steps=100)
    return parameters, replace(optimizer, in_one_pass=adamw_pass if one_pass else None)


def gradient(seed: int, size: int = 128) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def apply(parameters: FlatParameters, optimizer: Optimizer, grad_N: Tensor, denominator: float = 1.0) -> None:
    parameters.grad_N.copy_(grad_N)
    optimizer.apply(parameters, torch.tensor(denominator))


def snapshot(parameters: FlatParameters, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights, moments and Adam's own step counts."""
    adam = {name: value for name, value in optimizer.tensors().items() if name.startswith("adamw")}
    return {name: value.clone() for name, value in (adam | {"master": parameters.master_N}).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def at(config: OptimConfig, step: int, total: int) -> float:
    return float(learning_rate(config, torch.tensor(step), total))


Schedule = Literal["cosine", "wsd", "constant"]


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        # 100 steps, 10 of warm-up, the last 20 of wsd decaying; zero would come at step 101
        ("constant", 1, 0.1),
        ("constant", 10, 1.0),
        ("constant", 100, 1.0),
        ("wsd", 1, 0.1),
        ("wsd", 10, 1.0),
        ("wsd", 80, 1.0),
        ("wsd", 81, 1.0),
        ("wsd", 82, 0.95),
        ("wsd", 91, 0.5),
        ("wsd", 100, 0.05),
        ("cosine", 1, 0.1),
        ("cosine", 10, 1.0),
        ("cosine", 11, 0.5 * (1 + math.cos(math.pi * 1 / 91))),
        ("cosine", 40, 0.5 * (1 + math.cos(math.pi * 30 / 91))),
        ("cosine", 100, 0.5 * (1 + math.cos(math.pi * 90 / 91))),
        ("cosine", 101, 0.0),
        ("wsd", 101, 0.0),
    ],
)
def test_schedules_by_hand(schedule: Schedule, step: int, expected: float) -> None:
    config = OptimConfig(lr=2.0, schedule=schedule, warmup=0.1, decay=0.2)
    assert at(config, step, 100) == pytest.approx(2 * expected, abs=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3, 10])
def test_no_step_of_a_short_run_is_lost(schedule: Schedule, total: int) -> None:
    config = OptimConfig(schedule=schedule)
    assert all(at(config, step, total) > 0 for step in range(1, total + 1))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"lr": 0.0}, "--lr 0.0 is not above 0"),
        ({"clip": 0.0}, "--clip 0.0 is not above 0; use a large number to turn clipping off"),
        ({"warmup": 1.0}, "--warmup 1.0"),
        ({"warmup": -0.1}, "--warmup -0.1"),
        ({"decay": 0.0}, "--decay 0.0"),
        ({"decay": 1.1}, "--decay 1.1"),
        (
            {"schedule": "wsd", "warmup": 0.5, "decay": 0.6},
            "--lr is never reached: lower one, or take --schedule cosine",
        ),
        ({"beta1": 1.0}, "--beta1 1.0 and --beta2 0.95 must be at least 0 and below 1"),
        ({"beta2": -0.1}, "--beta2 -0.1"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 is below 0; 0 turns it off"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        OptimConfig(**options)


@pytest.mark.parametrize("one_pass", [False, True], ids=["library", "one pass"])
def test_equals_plain_adamw_on_the_divided_and_clipped_gradient(one_pass: bool) -> None:
    parameters, optimizer = build(one_pass=one_pass, weight_decay=0.1, clip=1.5)
    reference = Small()
    groups = [{"params": [reference.matrix], "weight_decay": 0.1}, {"params": [reference.norm], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95))
    for step in range(5):
        grad_N = gradient(step) * 10
        reference.matrix.grad, reference.norm.grad = grad_N[:64].view(8, 8) / 7, grad_N[64:] / 7
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.5)
        plain.step()
        apply(parameters, optimizer, grad_N, 7.0)
    masters = parameters.named(parameters.master_N)
    torch.testing.assert_close(masters["matrix"], reference.matrix.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(masters["norm"], reference.norm.detach(), rtol=1e-5, atol=1e-6)


def first_moment(optimizer: Optimizer) -> Tensor:
    return torch.cat([optimizer.adamw.state[master]["exp_avg"] for master in optimizer.masters])


def test_a_gradient_above_the_clip_is_scaled_down_to_it() -> None:
    parameters, optimizer = build(clip=1.0)
    grad_N = gradient(0)
    apply(parameters, optimizer, grad_N, 2.0)
    assert float(optimizer.grad_norm) == pytest.approx(float(grad_N.norm()) / 2, rel=1e-6), "the norm before clipping"
    torch.testing.assert_close(first_moment(optimizer), 0.1 * grad_N / grad_N.norm())


def test_a_gradient_below_the_clip_is_left_alone() -> None:
    parameters, optimizer = build(clip=1.0)
    grad_N = gradient(0) * 1e-3
    apply(parameters, optimizer, grad_N, 2.0)
    torch.testing.assert_close(first_moment(optimizer), 0.1 * grad_N / 2)


def test_weight_decay_never_touches_norms() -> None:
    parameters, optimizer = build(weight_decay=0.5)
    before = {name: value.clone() for name, value in parameters.named(parameters.master_N).items()}
    apply(parameters, optimizer, torch.zeros(128))
    after = parameters.named(parameters.master_N)
    assert torch.equal(after["norm"], before["norm"])
    torch.testing.assert_close(after["matrix"], before["matrix"] * (1 - 0.1 * 0.5))


def test_fp32_masters_move_norms_that_bf16_would_hold_at_one() -> None:
    """An update of 1e-4 is far below half a bf16 step at 1.0 (2^-9); a hundred of them are not."""
    parameters, optimizer = build(torch.bfloat16, lr=1e-4)
    shadow = parameters.named(parameters.shadow_N)["norm"]
    apply(parameters, optimizer, torch.ones(128))
    assert (shadow == 1).all()
    assert (parameters.named(parameters.master_N)["norm"] < 1).all()
    for _ in range(99):
        apply(parameters, optimizer, torch.ones(128))
    assert parameters.master_N.dtype == torch.float32
    assert (shadow < 1).all()
    assert torch.equal(shadow, parameters.named(parameters.master_N)["norm"].bfloat16())
    assert all(value.dtype != torch.bfloat16 for value in optimizer.tensors().values())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_C20_a_non_finite_gradient_skips_the_step_and_leaves_no_trace(poison: float) -> None:
    parameters, optimizer = build(weight_decay=0.1)
    apply(parameters, optimizer, gradient(0))
    before = snapshot(parameters, optimizer)
    bad_N = gradient(1)
    bad_N[3] = poison
    apply(parameters, optimizer, bad_N)
    assert same(snapshot(parameters, optimizer), before)
    assert (parameters.grad_N == 0).all(), "NaN times zero would stay NaN"
    assert (int(optimizer.step), int(optimizer.skipped), int(optimizer.empty)) == (2, 1, 0)
    assert not math.isfinite(float(optimizer.grad_norm))

    apply(parameters, optimizer, gradient(2))
    clean, plain = build(weight_decay=0.1)
    for seed in (0, 2):
        apply(clean, plain, gradient(seed))
    assert same(snapshot(parameters, optimizer), snapshot(clean, plain)), "the next step is as if it never happened"


def test_a_non_finite_denominator_skips_too() -> None:
    parameters, optimizer = build()
    before = snapshot(parameters, optimizer)
    apply(parameters, optimizer, gradient(0), float("nan"))
    assert same(snapshot(parameters, optimizer), before)
    assert int(optimizer.skipped) + int(optimizer.empty) >= 1


def test_a_step_without_a_label_leaves_weights_moments_and_adams_count_alone() -> None:
    """A gradient of zeros is no skip: momentum and weight decay would still move weights."""
    parameters, optimizer = build(weight_decay=0.1)
    apply(parameters, optimizer, gradient(0))
    before = snapshot(parameters, optimizer)
    apply(parameters, optimizer, torch.zeros(128), 0.0)
    assert same(snapshot(parameters, optimizer), before)
    assert (int(optimizer.skipped), int(optimizer.empty)) == (0, 1)


def test_every_tensor_of_a_checkpoint_stays_where_it_is() -> None:
    parameters, optimizer = build()
    held = {name: value.data_ptr() for name, value in optimizer.tensors().items()}
    for seed in range(3):
        apply(parameters, optimizer, gradient(seed))
    assert {name: value.data_ptr() for name, value in optimizer.tensors().items()} == held
    assert [float(value) for name, value in optimizer.tensors().items() if name.endswith(".step")] == [3.0, 3.0]


def test_a_restored_optimizer_continues_bit_for_bit() -> None:
    parameters, optimizer = build()
    apply(parameters, optimizer, gradient(0))
    saved = {name: value.clone() for name, value in optimizer.tensors().items()}
    weights = parameters.master_N.clone()
    apply(parameters, optimizer, gradient(1))

    again, resumed = build()
    again.master_N.copy_(weights)
    for name, value in resumed.tensors().items():
        value.copy_(saved[name])
    apply(again, resumed, gradient(1))
    assert same(snapshot(again, resumed), snapshot(parameters, optimizer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_leaves_what_the_library_and_two_more_passes_leave(dtype: torch.dtype) -> None:
    """Weights, moments, step counts, shadow and zeroed gradients; a step with NaN and one without labels among them."""
    states: list[tuple[FlatParameters, Optimizer]] = []
    for one_pass in (False, True):
        parameters, optimizer = build(dtype, one_pass, weight_decay=0.1, clip=1.5)
        for step in range(8):
            grad_N = gradient(step) * 10
            if step == 3:
                grad_N[70] = float("nan")
            apply(parameters, optimizer, grad_N, 0.0 if step == 5 else 7.0)
            assert (parameters.grad_N == 0).all()
        states.append((parameters, optimizer))
    (library, by_library), (ours, by_us) = states
    torch.testing.assert_close(ours.shadow_N, library.shadow_N)
    assert torch.equal(ours.shadow_N, ours.master_N.to(dtype))
    expected, found = snapshot(library, by_library), snapshot(ours, by_us)
    assert {name for name in found if name.endswith("step")} == {"adamw.0.step", "adamw.1.step"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def test_a_skipped_step_changes_no_bit_in_one_pass() -> None:
    parameters, optimizer = build(one_pass=True)
    apply(parameters, optimizer, gradient(0))
    before = snapshot(parameters, optimizer)
    apply(parameters, optimizer, torch.full((128,), float("inf")))
    assert same(snapshot(parameters, optimizer), before)
    assert (int(optimizer.step), int(optimizer.skipped)) == (2, 1)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_the_pass_compiles_whole_and_computes_the_same() -> None:
    torch._dynamo.reset()
    plain, compiled = build(one_pass=True, weight_decay=0.1), build(one_pass=True, weight_decay=0.1)
    compiled = (compiled[0], replace(compiled[1], in_one_pass=compiled_pass()))
    for step in range(3):
        for parameters, optimizer in (plain, compiled):
            apply(parameters, optimizer, gradient(step))
    torch.testing.assert_close(compiled[0].master_N, plain[0].master_N, rtol=1e-6, atol=1e-7)
