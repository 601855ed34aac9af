"""The cost curve that is measured at start."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spec_serve.cache.pool import KVPool
from spec_serve.kernels.reference import TorchAttention
from spec_serve.spec.sizing import measure
from spec_serve.spec.step import TorchDevice
from spec_serve.target import experts
from tests.engines import target


def test_what_is_measured_ascends_and_leaves_the_table_as_it_was() -> None:
    model = target()
    pool = KVPool(model.kv_specs, 400, 2, 400)
    pool.table[0] = torch.arange(7, 7 + pool.table.shape[1])
    device = TorchDevice(model, pool, TorchAttention())
    cost = measure(device, [1, 2, 4, 16], seconds=0.0)
    assert 0 < cost.at(1) <= cost.at(2) <= cost.at(4) <= cost.at(16) < 10_000
    assert cost.per_row >= 0 and cost.per_node >= 0
    assert cost.at(4, 300) >= cost.at(4)
    cached = torch.arange(7, 7 + pool.table.shape[1])
    assert torch.equal(pool.table[0, 100:392], cached[100:392])


def test_tokens_of_a_timed_step_are_spread_over_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """n equal tokens would cost a mixture what one does, and trees would look cheap."""
    touched: dict[int, int] = {}
    real = experts.gathered

    def spy(x: Tensor, chosen: Tensor, count: int, run: object) -> Tensor:
        here = len(chosen.unique())
        touched[len(x)] = min(touched.get(len(x), count), here)
        return real(x, chosen, count, run)  # type: ignore[arg-type]

    monkeypatch.setattr(experts, "gathered", spy)
    model = target("qwen2-moe")
    assert model.config.experts is not None
    pool = KVPool(model.kv_specs, 64, 1, 64)
    measure(TorchDevice(model, pool, TorchAttention()), [1, 4, 24], seconds=0.0)
    assert touched[1] == 2 and touched[4] >= 3 and touched[24] == model.config.experts.count
