"""How a run ends early: one flag that every wait looks at, and the first error with the worker it came from."""

from __future__ import annotations

import threading
from collections.abc import Callable

from draftsmith.errors import DraftsmithError, WorkerError


class StoppedError(DraftsmithError):
    """Raised inside waits after the run was stopped; ends a worker quietly."""


class Stop:
    """Shared by all workers of a run.

    `fail` is called at a worker thread's edge with its error; the first one wins. `request` asks for an orderly end
    (a signal): the drafters agree on a step to end with, everybody else goes on until they have. Waits call `check`,
    which raises only after a failure.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._requested = threading.Event()
        self._error: BaseException | None = None
        self._worker = ""
        self._working: set[str] = set()
        self._callbacks: list[Callable[[], None]] = []

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Run `callback` at the first failure (to break barriers that can't poll)."""
        self._callbacks.append(callback)

    def request(self) -> None:
        """Ask for an orderly end after the current step."""
        self._requested.set()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    @property
    def failed(self) -> bool:
        return self._failed.is_set()

    @property
    def error(self) -> BaseException | None:
        """The first error."""
        return self._error

    def enter(self, worker: str) -> None:
        """A worker's thread begins."""
        with self._lock:
            self._working.add(worker)

    def leave(self, worker: str) -> None:
        """A worker's thread ends, whichever way."""
        with self._lock:
            self._working.discard(worker)

    def is_working(self, worker: str) -> bool:
        """Whether that worker's thread still runs."""
        with self._lock:
            return worker in self._working

    def fail(self, worker: str, error: BaseException) -> None:
        """Note the first error and wake everybody."""
        with self._lock:
            first = self._error is None
            if first:
                self._error, self._worker = error, worker
        self._failed.set()
        if first:
            for callback in self._callbacks:
                callback()

    def is_from(self, worker: str) -> bool:
        """Whether the first error was this worker's."""
        return self._worker == worker

    def check(self) -> None:
        """Raise StoppedError once any worker has failed."""
        if self._failed.is_set():
            raise StoppedError("the run was stopped by another worker's error")

    def raise_error(self) -> None:
        """Raise the first worker's error, if there is one.

        Raises:
            DraftsmithError: the worker's own, if it is one of ours; otherwise a WorkerError caused by it.
        """
        if self._error is None:
            return
        if isinstance(self._error, DraftsmithError):
            raise self._error
        raise WorkerError(f"{self._worker} failed: {type(self._error).__name__}: {self._error}") from self._error
