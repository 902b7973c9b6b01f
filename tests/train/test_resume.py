"""What a resume refuses, and the override that each refusal names."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.errors import CheckpointError
from draftsmith.train.resume import PARTS, compare_resume

SAVED: dict[str, Any] = {
    "data": "abc123",
    "target": {"name": "smollm2", "weights": "f00"},
    "mask-token": 151669,
    "architecture": {"block_size": 16, "taps": [1, 9, 17], "rope": {"theta": 1e6}},
    "objective": {"loss": "ce", "weights": "decay", "gamma": 7.0},
    "gpus": 2,
}
CHANGES: list[tuple[str, Any, str]] = [
    ("data", "def456", r'the data set changed \("abc123" -> "def456"\)'),
    ("target", {"name": "smollm2", "weights": "bad"}, r'the target model changed \(weights "f00" -> "bad"\)'),
    ("architecture", {"block_size": 8, "taps": [1, 9], "rope": {"theta": 1e6}}, r"block_size 16 -> 8; taps \[1, 9, 17"),
    ("architecture", {"block_size": 16, "taps": [1, 9, 17], "rope": {"theta": 1e4}}, r"rope.theta 1000000.0 -> 10000"),
    ("objective", {"loss": "kl", "weights": "decay", "gamma": 7.0}, r'objective changed \(loss "ce" -> "kl"\)'),
    ("objective", {"loss": "ce", "weights": "dpace", "gamma": 7.0}, r'weights "decay" -> "dpace"'),
    ("objective", {"loss": "ce", "weights": "decay", "gamma": 4.0}, r"gamma 7.0 -> 4.0"),
]


@pytest.mark.parametrize(("part", "value", "words"), CHANGES)
def test_a_changed_part_is_refused_by_name_unless_allowed(part: str, value: Any, words: str) -> None:
    now = SAVED | {part: value}
    with pytest.raises(CheckpointError, match=words) as caught:
        compare_resume(SAVED, now, set())
    assert f"--allow-changed {part}" in str(caught.value)
    with pytest.raises(CheckpointError):
        compare_resume(SAVED, now, set(PARTS) - {part})
    (remark,) = compare_resume(SAVED, now, {part})
    assert remark.endswith(f"as --allow-changed {part} permits")


def test_F06_another_mask_token_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"the mask token changed \(151669 -> 0\).*--allow-changed mask-token"):
        compare_resume(SAVED, SAVED | {"mask-token": 0}, set())


def test_all_refusals_come_at_once() -> None:
    with pytest.raises(CheckpointError) as caught:
        compare_resume(SAVED, SAVED | {"mask-token": 0, "data": "x"}, set())
    assert "--allow-changed data" in str(caught.value)
    assert "--allow-changed mask-token" in str(caught.value)


def test_a_part_that_the_checkpoint_lacks_counts_as_changed() -> None:
    saved = {key: value for key, value in SAVED.items() if key != "objective"}
    with pytest.raises(CheckpointError, match=r"objective changed \(null -> "):
        compare_resume(saved, SAVED, set())


def test_another_number_of_gpus_is_allowed_and_said() -> None:
    assert compare_resume(SAVED, SAVED | {"gpus": 7}, set()) == ("GPUs changed (2 -> 7)",)


def test_the_same_run_passes_whether_lists_or_tuples() -> None:
    now = SAVED | {"architecture": {"block_size": 16, "taps": (1, 9, 17), "rope": {"theta": 1e6}}}
    assert compare_resume(SAVED, now, set()) == ()


def test_an_unknown_override_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"--allow-changed mask is unknown; known: data, target, mask-token"):
        compare_resume(SAVED, SAVED, {"mask"})
