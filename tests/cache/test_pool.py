"""The pool: shapes, sizes and table writes."""

import torch

from spec_serve.cache.pool import TRASH, KVPool, KVSpec, bytes_per_slot


def test_layers_have_a_trash_slot_in_front() -> None:
    specs = [KVSpec(2, 8, torch.float32), KVSpec(1, 4, torch.bfloat16)]
    pool = KVPool(specs, slots=10, rows=3, positions=6)
    assert [layer.k.shape for layer in pool.layers] == [(11, 2, 8), (11, 1, 4)]
    assert [layer.v.dtype for layer in pool.layers] == [torch.float32, torch.bfloat16]
    assert pool.layers[0].k.data_ptr() != pool.layers[0].v.data_ptr()
    assert pool.table.shape == (3, 7) and pool.table.dtype == torch.int64
    assert bytes_per_slot(specs) == 2 * 2 * 8 * 4 + 2 * 1 * 4 * 2
    assert TRASH == 0


def test_assign_writes_its_positions_only() -> None:
    pool = KVPool([], slots=10, rows=2, positions=4)
    pool.assign(1, 1, [7, 3])
    pool.assign(0, 0, [])
    assert pool.table.tolist() == [[0, 0, 0, 0, 0], [0, 7, 3, 0, 0]]
    pool.assign(1, 2, (9, 8))
    assert pool.table[1].tolist() == [0, 7, 9, 8, 0]
