"""Which decoder layers a drafter reads, and whether a target has them."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.errors import TargetError
from draftsmith.records import TargetFacts


def default_taps(num_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """The DFlash paper's taps `round(1 + i*(L-4)/(F-1))`, i = 0..F-1; `L // 2` for one tap.

    Shallow targets give repeats, which are dropped (F shrinks), and so is an id outside `0 .. L-2`.
    An id is the *output* of that decoder layer, counted from 0.

    Raises:
        TargetError: fewer than two layers, or fewer than one tap asked for.
    """
    if num_layers < 2:
        raise TargetError(f"a target of {num_layers} layer(s) can't be tapped below its last one: it needs at least 2")
    if num_taps < 1:
        raise TargetError(f"{num_taps} taps asked for: --num-taps must be at least 1")
    if num_taps == 1:
        wanted = [num_layers // 2]
    else:
        wanted = [round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps)]
    return tuple(sorted({min(max(tap, 0), num_layers - 2) for tap in wanted}))


def check_taps(taps: Sequence[int], facts: TargetFacts) -> None:
    """Refuse taps that the target lacks or that engines would capture differently.

    The last layer is excluded: Hugging Face's last hidden state is behind the final norm, engines capture before it.

    Raises:
        TargetError: naming the first mismatch.
    """
    last = facts.num_layers - 1
    given = f"taps {list(taps)}"
    if not taps:
        raise TargetError(f"no taps given: name layers between 0 and {last - 1}, such as {list(_suggest(facts))}")
    if any(not 0 <= tap <= last for tap in taps):
        raise TargetError(
            f"{given} don't exist in {facts.name}, which has layers 0 to {last}: use {list(_suggest(facts))}"
        )
    if last in taps:
        raise TargetError(
            f"{given} include the last layer {last} of {facts.name}, which engines and training capture differently: "
            f"use layers below it, such as {list(_suggest(facts))}"
        )
    if list(taps) != sorted(set(taps)):
        raise TargetError(f"{given} must rise strictly, without repeats: use {sorted(set(taps))}")


def _suggest(facts: TargetFacts) -> tuple[int, ...]:
    return default_taps(facts.num_layers)
