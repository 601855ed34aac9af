"""Reported log-probabilities: right, of the raw logits, finite, in a fixed order."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from spec_serve.spec import logprobs
from spec_serve.spec.logprobs import FLOOR, score


def exact(row: torch.Tensor) -> np.ndarray:
    x = row.double().numpy()
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


@pytest.mark.parametrize("block", [1, 100, 1 << 24])
def test_values_and_order(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs._BLOCK, "cpu", block)
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 4
    before = logits.clone()
    at = torch.tensor([4, 0, 0, 2])
    tokens = torch.tensor([7, 39, 0, 11])
    own, ids, best = score(logits, at, tokens, 3)
    assert torch.equal(logits, before)
    for i, (row, token) in enumerate(zip(at.tolist(), tokens.tolist(), strict=True)):
        lp = exact(logits[row])
        assert own[i].item() == pytest.approx(lp[token], abs=1e-5)
        order = np.argsort(-lp, kind="stable")[:3]
        assert ids[i].tolist() == order.tolist()
        assert best[i].tolist() == pytest.approx(lp[order].tolist(), abs=1e-5)


def test_lower_id_first_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, 3.0]])
    _, ids, best = score(logits, torch.tensor([0]), torch.tensor([0]), 6)
    assert ids.tolist() == [[1, 3, 5, 0, 2, 4]]
    assert best[0, 0] == best[0, 2]


@pytest.mark.parametrize("top", [0, 1, 2, 9])
def test_shapes(top: int) -> None:
    own, ids, best = score(torch.zeros(3, 4), torch.tensor([2, 1]), torch.tensor([0, 3]), top)
    assert own.shape == (2,) and ids.shape == best.shape == (2, min(top, 4))
    assert ids.dtype == torch.int64 and own.tolist() == pytest.approx([-math.log(4)] * 2)
    none = torch.empty(0, dtype=torch.int64)
    own, ids, best = score(torch.zeros(3, 4), none, none, top)
    assert own.shape == (0,) and ids.shape == best.shape == (0, min(top, 4))


def test_never_infinite() -> None:
    hole = -math.inf
    logits = torch.tensor([[0.0, hole, -1e30], [hole, hole, hole], [1e38, 0.0, -1e38]])
    own, _, best = score(logits, torch.arange(3), torch.tensor([1, 0, 2]), 3)
    assert own.tolist() == [FLOOR, FLOOR, FLOOR]
    assert best[0].tolist() == [0.0, FLOOR, FLOOR]
    assert torch.isfinite(best).all() and (best >= FLOOR).all() and (best <= 0).all()
    json.dumps([own.tolist(), best.tolist()], allow_nan=False)


def test_half_precision_logits_are_scored_in_float32() -> None:
    logits = (torch.randn(2, 64, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    own, _, _ = score(logits, torch.tensor([0, 1]), torch.tensor([5, 6]), 0)
    want = [exact(logits[0].float())[5], exact(logits[1].float())[6]]
    assert own.dtype == torch.float32 and own.tolist() == pytest.approx(want, abs=1e-5)
