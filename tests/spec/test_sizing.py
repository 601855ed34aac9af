"""The cost curve that is measured at start."""

from __future__ import annotations

import torch

from spec_serve.cache.pool import KVPool
from spec_serve.kernels.reference import TorchAttention
from spec_serve.spec.sizing import measure
from spec_serve.spec.step import TorchDevice
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
