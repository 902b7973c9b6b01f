"""Stop: the first error wins, wakes everybody, and is raised once with its worker's name."""

from __future__ import annotations

import pytest

from draftsmith.errors import DataError, WorkerError
from draftsmith.pipeline.stop import Stop, StoppedError


def test_a_fresh_stop_stops_nobody() -> None:
    stop = Stop()
    stop.check()
    stop.raise_error()
    assert not stop.failed
    assert not stop.requested
    assert stop.error is None


def test_a_request_is_no_failure() -> None:
    stop = Stop()
    stop.request()
    stop.check()
    stop.raise_error()
    assert stop.requested


def test_the_first_error_wins_and_callbacks_run_once() -> None:
    stop, woken = Stop(), list[str]()
    stop.on_failure(lambda: woken.append("barrier"))
    first = ValueError("first")
    stop.fail("target 1", first)
    stop.fail("drafter 0", ValueError("second"))
    assert woken == ["barrier"]
    assert stop.error is first
    assert stop.is_from("target 1")
    assert not stop.is_from("drafter 0")
    with pytest.raises(StoppedError, match="another worker"):
        stop.check()


def test_a_foreign_error_is_raised_as_its_workers() -> None:
    stop, cause = Stop(), ValueError("no such layer")
    stop.fail("target 1", cause)
    with pytest.raises(WorkerError, match="target 1 failed: ValueError: no such layer") as caught:
        stop.raise_error()
    assert caught.value.__cause__ is cause


def test_an_error_of_ours_is_raised_as_it_is() -> None:
    stop, error = Stop(), DataError("shard 3 is damaged")
    stop.fail("reader 0", error)
    with pytest.raises(DataError) as caught:
        stop.raise_error()
    assert caught.value is error


def test_who_is_working() -> None:
    stop = Stop()
    stop.enter("drafter 0")
    assert stop.is_working("drafter 0")
    stop.leave("drafter 0")
    stop.leave("drafter 0")
    assert not stop.is_working("drafter 0")
