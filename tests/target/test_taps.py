"""Default taps are the paper's; taps that a target lacks are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import TargetError
from draftsmith.target.taps import check_taps, default_taps
from tests.families import tiny_target


@pytest.mark.parametrize(
    ("layers", "taps"),
    [(28, (1, 7, 13, 19, 25)), (36, (1, 9, 17, 25, 33)), (64, (1, 16, 31, 46, 61)), (30, (1, 8, 14, 20, 27))],
)
def test_default_taps_are_the_papers(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers) == taps


def test_one_tap_is_the_middle_layer() -> None:
    assert default_taps(28, 1) == (14,)


def test_shallow_targets_lose_repeated_taps() -> None:
    assert default_taps(6) == (1, 2, 3)
    assert default_taps(4) == (1,)
    assert default_taps(2) == (0,)


@given(st.integers(2, 200), st.integers(1, 8))
def test_default_taps_always_pass_the_check(layers: int, taps: int) -> None:
    facts = replace(tiny_target("qwen3").facts, num_layers=layers)
    check_taps(default_taps(layers, taps), facts)


def test_B08_taps_out_of_range_are_refused_naming_the_layers_there_are() -> None:
    facts = replace(tiny_target("qwen3").facts, num_layers=32, name="small")
    with pytest.raises(TargetError, match=r"\[1, 9, 17, 25, 33\] don't exist in small, which has layers 0 to 31"):
        check_taps([1, 9, 17, 25, 33], facts)
    with pytest.raises(TargetError, match="don't exist"):
        check_taps([-1, 2], facts)


def test_B05_B07_B09_the_last_layer_is_refused() -> None:
    facts = tiny_target("qwen3").facts
    with pytest.raises(TargetError, match="include the last layer 5"):
        check_taps([1, 3, 5], facts)


@pytest.mark.parametrize("taps", [(2, 1), (1, 1, 2)])
def test_taps_must_rise_strictly(taps: tuple[int, ...]) -> None:
    with pytest.raises(TargetError, match=r"rise strictly.*use \[1, 2\]"):
        check_taps(taps, tiny_target("qwen3").facts)


def test_no_taps_and_too_few_layers_are_refused() -> None:
    with pytest.raises(TargetError, match="no taps given"):
        check_taps([], tiny_target("qwen3").facts)
    with pytest.raises(TargetError, match="at least 2"):
        default_taps(1)
    with pytest.raises(TargetError, match="--num-taps must be at least 1"):
        default_taps(28, 0)
