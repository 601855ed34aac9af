"""Skips a module that tests Triton's programs where they can't run in its interpreter.

tests/conftest.py switches the interpreter on, before anything can import Triton. On a machine with
a GPU the programs are compiled instead, and tests/gpu runs them.
"""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("programs are compiled here; tests/gpu runs them", allow_module_level=True)

from spec_serve.kernels import attention_programs  # noqa: E402

assert type(attention_programs.attend_tile).__name__ == "InterpretedFunction"
