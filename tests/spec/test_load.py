"""Options of loading: what K and V are kept in, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spec_serve.kernels.cpu.native import NativeUnavailable, load
from spec_serve.spec.assemble import EngineOptions
from spec_serve.spec.load import build_engine, check_options
from tests.tiny import write_tiny_model_dir


def test_keys_and_values_of_eight_bits_need_compiled_kernels(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv-dtype: must be auto or int8, got 'int4'"):
        check_options(EngineOptions("m", kv_dtype="int4"))
    write_tiny_model_dir(tmp_path / "m")
    options = EngineOptions(
        str(tmp_path / "m"), kv_dtype="int8", quantize="q8_0", kv_tokens=300, device="cpu"
    )
    plain = EngineOptions(str(tmp_path / "m"), kv_dtype="int8", kv_tokens=300, device="cpu")
    with pytest.raises(ValueError, match="kv-dtype: only compiled kernels"):
        build_engine(plain)
    try:
        load()
    except NativeUnavailable:
        return
    threads = torch.get_num_threads()
    try:
        engine, _ = build_engine(options)
    finally:
        torch.set_num_threads(threads)
    assert {spec.dtype for spec in engine.store.pool.specs} == {torch.int8}
