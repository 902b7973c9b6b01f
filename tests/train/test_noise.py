"""Feature noise: uniform, independent, a function of its keys, bounded in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.drafter.anchors import draw_uniforms
from draftsmith.train import noise
from draftsmith.train.noise import noisy, uniform_noise

ROWS, COLUMNS = 1000, 300


def sample(draw: int = 0) -> Tensor:
    return uniform_noise(draw_uniforms(0, 0, draw, ROWS), COLUMNS)


def largest_correlation(x: Tensor) -> float:
    return float(torch.corrcoef(x).fill_diagonal_(0).abs().max())


def test_is_uniform_with_mean_zero_and_variance_a_third() -> None:
    x = sample().double()
    count = x.numel()
    assert float(x.mean().abs()) < 4 * (1 / 3 / count) ** 0.5
    assert float(x.var()) == pytest.approx(1 / 3, abs=4 * (4 / 45 / count) ** 0.5)
    bins = torch.histc(x.float(), bins=50, min=-1, max=1)
    chi_square = float(((bins - count / 50).square() / (count / 50)).sum())
    assert chi_square < 85.4  # 49 degrees of freedom, p = 0.001
    assert -1 < float(x.min()) < -0.9999
    assert 0.9999 < float(x.max()) < 1


def test_rows_columns_and_draws_are_independent() -> None:
    """Correlations of n samples have deviation 1/sqrt(n); the largest of 45,000 stays below 5.5 of them."""
    x = sample()
    assert largest_correlation(x[:300]) < 5.5 / COLUMNS**0.5
    assert largest_correlation(x.T) < 5.5 / ROWS**0.5
    pair = torch.stack([x.flatten(), sample(1).flatten()])
    assert largest_correlation(pair) < 4 / x.numel() ** 0.5
    neighbours = torch.stack([x[:, :-1].flatten(), x[:, 1:].flatten()])
    assert largest_correlation(neighbours) < 4 / neighbours.shape[1] ** 0.5


def test_every_bit_of_the_rows_double_matters() -> None:
    """Doubles of `rand` have 53 random bits; rows that differ in one of them alone have unrelated noise."""
    base = 0.3141592653589793
    bits = int(base * 2**53)
    keys = torch.tensor([bits, *(bits ^ (1 << bit) for bit in range(53))], dtype=torch.float64) * 2.0**-53
    x = uniform_noise(keys, 2000)
    assert largest_correlation(x) < 5.5 / 2000**0.5


def test_no_row_is_a_shifted_copy_of_another() -> None:
    words = (sample()[:200] * 2**23).to(torch.int64)
    assert words.unique().numel() > 0.995 * words.numel()


def test_is_a_function_of_the_draw_and_the_column_alone() -> None:
    u = draw_uniforms(0, 0, 0, ROWS)
    assert torch.equal(uniform_noise(u, COLUMNS), uniform_noise(u.clone(), COLUMNS))
    assert torch.equal(uniform_noise(u[100:200], COLUMNS), uniform_noise(u, COLUMNS)[100:200])
    assert torch.equal(uniform_noise(u, 10), uniform_noise(u, COLUMNS)[:, :10])


def test_zero_and_the_largest_double_are_keys_like_others() -> None:
    x = uniform_noise(torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64), 4000)
    assert largest_correlation(x) < 4 / 4000**0.5
    assert float(x.mean(1).abs().max()) < 4 * (1 / 3 / 4000) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_makes_a_copy_and_leaves_the_buffer_alone(dtype: torch.dtype) -> None:
    u, features = draw_uniforms(0, 0, 0, 50), torch.randn(50, 40).to(dtype)
    before = features.clone()
    changed = noisy(features, u, 0.25)
    assert torch.equal(features, before)
    assert changed.dtype == dtype
    assert torch.equal(changed, (before.float() + uniform_noise(u, 40) * 0.25).to(dtype))
    assert noisy(features, u, 0.0) is features


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    u, features = draw_uniforms(0, 0, 0, 50), torch.randn(50, 40)
    whole = noisy(features, u, 0.5)
    monkeypatch.setattr(noise, "CHUNK_ELEMENTS", 7 * 40)
    assert torch.equal(noisy(features, u, 0.5), whole)
    monkeypatch.setattr(noise, "CHUNK_ELEMENTS", 1)
    assert torch.equal(noisy(features, u, 0.5), whole)


@dataclass
class Largest(TorchDispatchMode):
    """Sizes in bytes of everything that operations return."""

    sizes: list[int] = field(default_factory=list[int])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.sizes.append(out.numel() * out.element_size() if isinstance(out, Tensor) else 0)
        return out


def test_nothing_but_the_copy_is_as_large_as_the_features() -> None:
    with FakeTensorMode():
        u = torch.zeros(49_152, dtype=torch.float64)
        features = torch.zeros(49_152, 25_600, dtype=torch.bfloat16)
        mode = Largest()
        super(Largest, mode).__init__()
        with mode:
            noisy(features, u, 0.1)
    copies = [size for size in mode.sizes if size > 4 * noise.CHUNK_ELEMENTS]
    assert copies == [49_152 * 25_600 * 2]
