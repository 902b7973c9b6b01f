"""Every named fault, one list a part of the package."""

from __future__ import annotations

from tests.mutations import step
from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (*step.MUTATIONS,)

__all__ = ["MUTATIONS", "Mutation"]
