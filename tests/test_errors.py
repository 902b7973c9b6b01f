"""The tree of errors is the one that its docstring draws."""

from __future__ import annotations

import inspect
import re

import pytest

from draftsmith import errors
from draftsmith.errors import ConfigError, DraftsmithError, UsageError


def test_the_drawn_tree_names_every_class_and_nothing_else() -> None:
    classes = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, DraftsmithError)}
    assert errors.__doc__ is not None
    assert set(re.findall(r"\b(\w+Error)\b(?=\(|\s{2,}|$)", errors.__doc__, re.MULTILINE)) - {"ValueError"} == classes


def test_the_persons_mistakes_are_value_errors_of_one_kind() -> None:
    with pytest.raises(UsageError):
        raise ConfigError("--lr -1 is not above 0")
    assert issubclass(UsageError, ValueError)
