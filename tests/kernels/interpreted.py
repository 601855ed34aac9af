"""Where tests run Triton's programs: on a GPU if there is one, else in Triton's interpreter.

tests/conftest.py switches the interpreter on, before anything can import Triton. Modules that
import this are skipped where Triton is not installed.
"""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from spec_serve.kernels import attention_programs  # noqa: E402

INTERPRETED = type(attention_programs.attend_tile).__name__ == "InterpretedFunction"
assert (DEVICE == "cpu") == INTERPRETED
