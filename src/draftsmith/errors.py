"""Every error draftsmith raises on purpose, drawn as a tree.

DraftsmithError
├── UsageError(ValueError)      the person's input can be mended; says what was given, what is needed, what to do
│   ├── ConfigError             an option, a recipe key, or two that contradict each other
│   ├── DataError               a conversation file or a prepared data set
│   ├── TargetError             a target that can't be loaded, tapped or drafted for
│   ├── CheckpointError         a run folder, a checkpoint, a resume that doesn't match
│   └── ExportError             a drafter folder that would not serve as it trained
├── CapacityError(ValueError)   more tokens or documents than a fixed-shape buffer holds (names both numbers)
├── CaptureError                a step that can't be captured, or a captured input that changed
├── WorkerError                 a pipeline worker died; carries the worker's name and its own error
└── StalledError                a queue or a collective waited past its timeout; says who waits for whom

The command line prints any of them as one line and exits with 2 (`--debug` shows the traceback).
"""

from __future__ import annotations


class DraftsmithError(Exception):
    """Root of the tree."""


class UsageError(DraftsmithError, ValueError):
    """The user's mistake; the message names the remedy."""


class ConfigError(UsageError):
    """An option or recipe key that is unknown, out of range or contradicts another."""


class DataError(UsageError):
    """A conversation file or prepared data set that can't be used."""


class TargetError(UsageError):
    """A target model that can't be loaded, tapped or drafted for."""


class CheckpointError(UsageError):
    """A run folder or checkpoint that is missing, damaged or doesn't match the resume."""


class ExportError(UsageError):
    """A drafter folder that engines would load wrongly or not at all."""


class CapacityError(DraftsmithError, ValueError):
    """More tokens or documents than a fixed-shape buffer holds."""


class CaptureError(DraftsmithError, RuntimeError):
    """The step can't be captured, or a captured input changed shape, dtype, device or address."""


class WorkerError(DraftsmithError, RuntimeError):
    """A pipeline worker died; `__cause__` is its own error."""


class StalledError(DraftsmithError, RuntimeError):
    """A bounded wait ran past its timeout."""
