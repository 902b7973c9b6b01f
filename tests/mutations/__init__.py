"""Every named fault, one list a part of the package."""

from __future__ import annotations

from tests.mutations import data, reports, serving, step
from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (*step.MUTATIONS, *serving.MUTATIONS, *reports.MUTATIONS, *data.MUTATIONS)

__all__ = ["MUTATIONS", "Mutation"]
