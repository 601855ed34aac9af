"""Whole models over matrices held as codes, by Triton's programs, against the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spec_serve.target.linears import QuantisedLinear
from spec_serve.target.model import load_model
from spec_serve.target.weights import open_checkpoint
from tests import engines
from tests.kernels import interpreted
from tests.quantised_files import FLOATS, FORMATS, Floats, Format, write
from tests.target.test_native import TOKENS, Run

assert interpreted.DEVICE  # importing it skips this file where there is no Triton


@pytest.mark.parametrize("form", (FORMATS[3], FLOATS[3]), ids=lambda form: form.name)
def test_a_model_runs_on_codes(tmp_path: Path, form: Format | Floats) -> None:
    plain = write(tmp_path, form)
    model = load_model(open_checkpoint(tmp_path), keep=True)
    assert model.precision == f"{form.config['quant_method']}, float32"
    attention, mlp = model.blocks[0].attention, model.blocks[0].mlp
    for held in (attention.qkv, attention.out, mlp.gate_up, mlp.down):  # type: ignore[attr-defined]
        assert isinstance(held, QuantisedLinear)
        assert held.nbytes < 2.2 * held.inputs * held.outputs  # float32 scales of small groups
    wanted, _ = Run(load_model(plain)).prompt(TOKENS[:5])
    found, _ = Run(model).prompt(TOKENS[:5])
    assert torch.allclose(found, wanted, atol=2e-4)


@pytest.mark.skipif(interpreted.DEVICE != "cpu", reason="its cache is on the CPU")
def test_speculation_changes_no_token_of_it(tmp_path: Path) -> None:
    write(tmp_path, FORMATS[2])
    model = load_model(open_checkpoint(tmp_path), keep=True)
    wanted = engines.tokens(engines.engine(model=model), engines.PROMPT[:9], 4)
    drafted = engines.engine("near", model=model, depth=2, width=2, nodes=6)
    assert engines.tokens(drafted, engines.PROMPT[:9], 4) == wanted
    assert drafted.stats().drafted > 0
