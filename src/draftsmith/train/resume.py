"""What may differ between a checkpoint and the run that continues it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from typing import Any, cast

from draftsmith.errors import CheckpointError

PARTS: Mapping[str, str] = {
    "data": "the data set",
    "target": "the target model",
    "mask-token": "the mask token",
    "architecture": "the drafter's architecture",
    "objective": "the objective",
}
"""Names that `--allow-changed` takes, and what each stands for."""


def compare_resume(saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Set[str]) -> tuple[str, ...]:
    """Refuse to continue a run with something else than it was trained with.

    Args:
        saved: per name of PARTS (and "gpus"), any JSON value that pins it down, as read from the checkpoint.
        now: the same, as it would be.
        allowed: names that may differ.

    Returns:
        A remark on each difference that is let pass: the allowed ones, and another number of GPUs (which changes the
        last bits of sums from three drafters on, nothing else).

    Raises:
        CheckpointError: a part differs and isn't allowed to, or `allowed` holds an unknown name.
    """
    unknown = sorted(allowed - PARTS.keys())
    if unknown:
        raise CheckpointError(f"--allow-changed {unknown[0]} is unknown; known: {', '.join(PARTS)}")
    refused: list[str] = []
    remarks: list[str] = []
    for part, name in PARTS.items():
        changes = list(_differences(saved.get(part), _plain(now.get(part)), ""))
        if not changes:
            continue
        text = f"{name} changed ({'; '.join(changes)})"
        if part in allowed:
            remarks.append(f"{text}, as --allow-changed {part} permits")
        else:
            refused.append(f"{text}: resume with the same, or say --allow-changed {part}")
    if refused:
        raise CheckpointError("this run can't be continued so: " + ". ".join(refused))
    if saved.get("gpus") != now.get("gpus"):
        remarks.append(f"GPUs changed ({saved.get('gpus')} -> {now.get('gpus')})")
    return tuple(remarks)


def _plain(value: Any) -> Any:
    """As it comes back from a file: tuples are lists."""
    return json.loads(json.dumps(value))


def _differences(saved: Any, now: Any, path: str) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        before, after = cast(dict[str, Any], saved), cast(dict[str, Any], now)
        for key in sorted({*before, *after}):
            yield from _differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif saved != now:
        yield f"{path + ' ' if path else ''}{json.dumps(saved)} -> {json.dumps(now)}"
