"""The log of blocks: replayed, it gives exactly the whole blocks the tree holds."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_serve.cache.blocks import BlockLog, Change, Cleared, Removed, Stored, block_hashes
from spec_serve.cache.radix import Lease, RadixTree
from spec_serve.cache.store import KVStore, RowKV


class Mirror:
    """What a router knows: block -> (parent, tokens), from changes alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def hear(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Cleared):
                self.blocks.clear()
            elif isinstance(change, Removed):
                for held in change.hashes:
                    del self.blocks[held]
            else:
                assert len(change.tokens) == self.size * len(change.hashes) > 0
                parent = change.parent
                assert parent is None or parent in self.blocks, "a block before its parent"
                for i, held in enumerate(change.hashes):
                    assert held not in self.blocks, "a block stored twice"
                    tokens = change.tokens[i * self.size : (i + 1) * self.size]
                    self.blocks[held] = parent, tuple(tokens)
                    parent = held
        for parent, _ in self.blocks.values():
            assert parent is None or parent in self.blocks, "a block without its parent"


def expected(tree: RadixTree, size: int) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    held: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    for salt, path in tree.paths():
        parent = None
        for i, block in enumerate(block_hashes(path, size) if not salt else ()):
            held[block] = parent, tuple(path[i * size : (i + 1) * size])
            parent = block
    return held


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32), st.booleans())
def test_a_tree_under_random_changes(size: int, seed: int, often: bool) -> None:
    rng = random.Random(seed)
    tree, log, mirror = RadixTree(), BlockLog(size), Mirror(size)
    tree.log = log
    leases: list[tuple[Lease, list[int]]] = []
    for _ in range(60):
        path = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        salt = rng.choice(["", "", "", "secret"])
        what = rng.randrange(7)
        if what < 2:
            tree.insert(path, salt)
        elif what == 2:
            lease = tree.match(path, salt)
            leases.append((lease, path[: lease.length]))
        elif what == 3 and leases:
            lease, known = leases.pop(rng.randrange(len(leases)))
            lease, _ = tree.graft(lease, path)
            leases.append((lease, known + path))
        elif what == 4 and leases:
            lease, _ = leases.pop(rng.randrange(len(leases)))
            tree.release(lease, rng.choice([None, rng.randrange(lease.length + 1)]))
        elif what == 5:
            tree.evict(rng.randrange(1, 12))
        elif rng.random() < 0.2:
            tree.clear()
        if often or rng.random() < 0.2:
            mirror.hear(log.take())
            assert mirror.blocks == expected(tree, size)
    tree.check([lease for lease, _ in leases])
    for lease, _ in leases:
        tree.release(lease)
    mirror.hear(log.take())
    assert mirror.blocks == expected(tree, size)
    tree.clear()
    mirror.hear(log.take())
    assert mirror.blocks == {} == expected(tree, size)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_store_whose_rows_run_out_of_slots(seed: int) -> None:
    rng = random.Random(seed)
    store, log, mirror = KVStore(60, 4), BlockLog(4), Mirror(4)
    store.tree.log = log
    rows: list[RowKV] = []
    for _ in range(80):
        what = rng.randrange(6)
        if what == 0:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
            row = store.open(prompt, rng.choice(["", "", "salt"]))
            if row is not None:
                rows.append(row)
        elif what < 3 and rows:
            row = rng.choice(rows)
            count = rng.randrange(1, 9)
            slots = store.grant(row, count)
            if slots is not None:
                kept = rng.randrange(count + 1)
                store.commit(row, [rng.randrange(2) for _ in range(kept)], slots[:kept])
        elif what == 3 and rows:
            store.share(rng.choice(rows))
        elif what == 4 and rows:
            row = rows.pop(rng.randrange(len(rows)))
            store.close(row, rng.choice([None, len(row.tokens) // 2]))
        elif rng.random() < 0.1:
            store.clear()
        mirror.hear(log.take())
        assert mirror.blocks == expected(store.tree, 4)
    store.check()


def test_what_is_told() -> None:
    tree, log = RadixTree(), BlockLog(2)
    tree.log = log
    a, b, c = block_hashes([1, 2, 3, 4, 5, 6], 2)
    tree.insert([1, 2, 3, 4, 5])
    assert log.take() == [Stored([a, b], None, [1, 2, 3, 4])]
    tree.insert([1, 2, 3, 4, 5, 6, 7])
    assert log.take() == [Stored([c], b, [5, 6])]
    tree.insert([1, 2, 3, 9])
    [d] = block_hashes([1, 2, 3, 9], 2)[1:]
    assert log.take() == [Stored([d], a, [3, 9])]
    tree.insert([1, 2, 3, 9], "salt")
    tree.insert([1])
    assert log.take() == []
    assert tree.evict(2) == [] and log.take() == [Removed([c])]
    tree.clear()
    assert log.take() == [Cleared()]
    tree.clear()
    assert log.take() == [] and tree.log is log


def test_what_is_pinned_is_not_cleared() -> None:
    tree, log = RadixTree(), BlockLog(2)
    tree.log = log
    tree.insert([1, 2, 3, 4])
    log.take()
    lease = tree.match([1, 2, 3])
    tree.clear()
    assert log.take() == [Removed(block_hashes([1, 2, 3, 4], 2)[1:])]
    tree.release(lease)


def test_hashes_are_of_all_that_came_before() -> None:
    first, second = block_hashes([1, 2, 3, 4], 2), block_hashes([9, 2, 3, 4], 2)
    assert first[1] != second[1] and len({*first, *second}) == 4
    assert block_hashes([1, 2, 3, 4, 5], 2) == first and block_hashes([1], 2) == []
    assert all(0 <= value < 2**63 for value in block_hashes(list(range(4000)), 4))
    assert block_hashes([1, 2, 3, 4], 4) != block_hashes([1, 2, 3, 4], 2)[1:]
    with pytest.raises(ValueError, match="block size"):
        BlockLog(0)


def test_a_taker_in_another_thread_misses_nothing() -> None:
    tree, log, mirror = RadixTree(), BlockLog(2), Mirror(2)
    tree.log = log
    due, over = threading.Event(), threading.Event()
    log.changed = due.set

    def listen() -> None:
        while not over.is_set() or due.is_set():
            if due.wait(0.05):
                due.clear()
                mirror.hear(log.take())

    listener = threading.Thread(target=listen)
    listener.start()
    rng = random.Random(3)
    for _ in range(3000):
        tree.insert([rng.randrange(3) for _ in range(rng.randrange(2, 10))])
        tree.evict(rng.randrange(5))
    over.set()
    listener.join()
    assert mirror.blocks == expected(tree, 2)
