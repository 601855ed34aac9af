"""What holds for every test: seeds, one thread per process, and who needs a GPU.

Knows nothing of models or of the engine; fixtures that build those stand beside the tests that
use them. `SPEC_SERVE_CACHE` is left alone, so that real models are fetched once, not once a run.
"""

import gc
import os
import random

import numpy
import pytest
import torch
from hypothesis import settings

# Test processes run side by side and their tensors are tiny: threads would only fight.
torch.set_num_threads(1)

# Without a GPU Triton's programs run in its interpreter, which is chosen when Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples in every run, and no verdict that depends on how busy the machine is.
settings.register_profile("spec_serve", derandomize=True, deadline=None)
settings.load_profile("spec_serve")


# Begun last, one of these would keep a process busy after all others are through.
SLOWEST = (
    "test_real_models.py", "test_public_bugs_transports.py", "test_lint.py",
    "test_faults_inside.py", "test_public_bugs.py", "test_lossless.py", "test_public_bugs_cache.py",
    "test_page_faults.py", "test_faults.py", "test_engine.py", "test_triton_attention.py",
    "test_verify.py", "test_constraints_hostile.py", "test_constraints_live.py",
    "test_process_server.py", "test_end_to_end_clients.py", "test_gpu.py", "test_constraint.py",
    "test_page.py", "test_page_looks.py", "test_other_python.py", "test_soak.py",
    "test_peers.py", "test_program.py", "test_architecture.py", "test_grpc_fuzz.py",
    "test_grpc_calls.py", "test_faults_storm.py", "test_run.py", "test_triton_fused.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first; skip tests marked `gpu` where torch sees no GPU."""
    place = {name: i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(SLOWEST)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch finds no NVIDIA GPU on this machine")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage walks it again.

    Every server that starts in this process asks for one, and there are hundreds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same random numbers, in whatever order and process it runs."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
