"""Ranks under torchrun (gloo): the same bits as threads, and every way to end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.pipeline.tiny import Sizes, run_by_hand
from tests.pipeline.torchrun import endings, run_ranks


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(Sizes(targets=1, drafters=1, slots=1), marks=pytest.mark.long),
        pytest.param(Sizes(targets=2, drafters=1), marks=pytest.mark.long),
        Sizes(targets=2, drafters=2, draws=3, accumulation=2, steps=20),
        pytest.param(Sizes(targets=5, drafters=2), marks=pytest.mark.long),
    ],
    ids=lambda sizes: f"{sizes.targets}+{sizes.drafters}",
)
def test_ranks_equal_the_loop_by_hand_to_the_bit(sizes: Sizes, tmp_path: Path) -> None:
    """The loop by hand equals threads to the bit as well (test_drafter_loop), hence ranks equal threads."""
    done = run_ranks(tmp_path, sizes, seconds=300)
    assert done.returncode == 0, done.stderr
    ranks, by_hand = torch.load(tmp_path / "chief.pt"), run_by_hand(sizes)
    assert len(by_hand.losses) == sizes.steps == 20
    assert ranks["losses"] == by_hand.losses
    assert torch.equal(ranks["master"], by_hand.master_N)


@pytest.mark.long
def test_three_drafters_agree_to_rounding(tmp_path: Path) -> None:
    sizes = Sizes(targets=1, drafters=3, steps=8)
    assert run_ranks(tmp_path, sizes, seconds=300).returncode == 0
    ranks, by_hand = torch.load(tmp_path / "chief.pt"), run_by_hand(sizes)
    assert ranks["losses"] == pytest.approx(by_hand.losses, rel=1e-6)
    torch.testing.assert_close(ranks["master"], by_hand.master_N, rtol=0, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["target:1", "drafter:1", "drafter:0"])
def test_SIGKILL_of_a_rank_ends_all_in_time_and_is_no_stop_by_a_person(victim: str, tmp_path: Path) -> None:
    """torchrun sends the survivors SIGTERM then: none of them may take it for a person's and exit with 0."""
    sizes = Sizes(targets=2, drafters=2, steps=300)
    done = run_ranks(tmp_path, sizes, f"{victim}:kill", seconds=120)
    assert done.returncode != 0
    assert time.time() - (tmp_path / "struck").stat().st_mtime < 20
    ended = endings(tmp_path)
    assert len(ended) == 3
    name = victim.replace(":", " ")
    assert all(text.startswith("PeerError") and name in text for text in ended.values()), ended


@pytest.mark.long
@pytest.mark.parametrize("victim", ["target:0", "drafter:1"])
def test_an_exception_in_a_rank_ends_all_with_that_ranks_error(victim: str, tmp_path: Path) -> None:
    sizes = Sizes(targets=2, drafters=2, steps=300)
    assert run_ranks(tmp_path, sizes, f"{victim}:raise", seconds=120).returncode != 0
    assert time.time() - (tmp_path / "struck").stat().st_mtime < 15
    message = f"{victim.replace(':', ' ')} failed: ValueError: struck by a bomb"
    ended = endings(tmp_path)
    assert sorted(ended.values()) == [f"PeerError: {message}"] * 3 + [f"WorkerError: {message}"]


@pytest.mark.long
@pytest.mark.parametrize(("who", "fewest"), [("drafter:0", 5), ("target:1", 1)])
def test_a_persons_stop_ends_every_rank_with_the_same_step_and_0(who: str, fewest: int, tmp_path: Path) -> None:
    """The stop comes at the 5th step of a drafter; the 5th forward of a target may precede the 5th step."""
    sizes = Sizes(targets=2, drafters=2, steps=5000)
    done = run_ranks(tmp_path, sizes, f"{who}:term", seconds=120)
    assert done.returncode == 0, done.stderr
    assert set(endings(tmp_path).values()) == {"finished"}
    ranks = torch.load(tmp_path / "chief.pt")
    assert fewest <= ranks["step"] < 5000
    assert len(ranks["losses"]) == ranks["step"]
