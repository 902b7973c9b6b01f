"""What every test shares: one thread, fixed seeds, no network, and the packaged data."""

from __future__ import annotations

import os
import random
from importlib.resources import files
from pathlib import Path

# Read once when huggingface_hub is imported, so it stands before any import of it.
os.environ["HF_HUB_OFFLINE"] = "1"
# Each worker of pytest-xdist computes on one core; more threads would also change the order of sums.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings

torch.set_num_threads(1)

# The same examples on every run, and no time limit for one: the first call of a kernel is slow, a busy machine slower.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
# For injected faults (tests/mutate.py): that an example fails is all that is asked, not which is the simplest.
settings.register_profile(
    "unshrunk", parent=settings.get_profile("repeatable"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Each test starts from the same global generators, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of data that the package ships."""
    return Path(str(files("draftsmith") / "assets"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Files share expensive fixtures, so one stays with one worker; faults share nothing.
        name = item.name if item.name.startswith("test_is_caught[") else item.path.relative_to(item.config.rootpath)
        item.add_marker(pytest.mark.xdist_group(str(name)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
