"""What holds for every test: seeds, one thread per process, and who needs a GPU.

Knows nothing of models or of the engine; fixtures that build those stand beside the tests that
use them. `SPEC_SERVE_CACHE` is left alone, so that real models are fetched once, not once a run.
"""

import random

import numpy
import pytest
import torch
from hypothesis import settings

# Test processes run side by side and their tensors are tiny: threads would only fight.
torch.set_num_threads(1)

# The same examples in every run, and no verdict that depends on how busy the machine is.
settings.register_profile("spec_serve", derandomize=True, deadline=None)
settings.load_profile("spec_serve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch finds no NVIDIA GPU on this machine")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same random numbers, in whatever order and process it runs."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
