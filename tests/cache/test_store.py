"""The store: rows, grants, sharing, what remains, and the public bug cases it must not repeat."""

import random

import pytest

from spec_serve.cache.pool import KVPool
from spec_serve.cache.store import Books, KVStore, RowKV


def put(store: KVStore, row: RowKV, tokens: list[int]) -> list[int]:
    """Grant and commit a chain; its slots."""
    slots = store.grant(row, len(tokens))
    assert slots is not None
    store.commit(row, tokens, slots)
    return slots


def serve(store: KVStore, tokens: list[int], salt: str = "") -> RowKV:
    """A row that runs through `tokens` and ends."""
    row = store.open(tokens, salt)
    assert row is not None
    put(store, row, tokens[row.cached :])
    store.close(row)
    store.check()
    return row


def begin(store: KVStore, tokens: list[int], salt: str = "") -> RowKV:
    row = store.open(tokens, salt)
    assert row is not None
    return row


def test_a_closed_row_is_found_again() -> None:
    store = KVStore(10, 2)
    first = serve(store, [5, 6, 7])
    row = begin(store, [5, 6, 7, 8])
    assert row.cached == 3 and row.tokens == [5, 6, 7] and row.slots == first.slots
    assert store.books() == Books(free=7, evictable=0, pinned=3, rows=0, granted=0, total=10)
    other = begin(store, [5, 6, 7, 8], "salt")
    assert other.cached == 0 and other.slots == []
    assert store.open([5]) is None, "both table rows are taken"
    assert store.vacant() == 0
    store.close(row)
    store.close(other)
    assert store.vacant() == 2 and store.available() == 10
    store.check()


def test_commit_takes_the_path_and_returns_the_rest() -> None:
    store = KVStore(10, 1)
    row = begin(store, [])
    slots = store.grant(row, 6)
    assert slots == [1, 2, 3, 4, 5, 6] == row.granted
    store.commit(row, [11, 12], [2, 5], keep=[6, 3])
    assert row.tokens == [11, 12] and row.slots == [2, 5]
    assert row.granted == [3, 6], "kept grants keep their order"
    assert store.grant(row, 2) == [1, 4]
    store.commit(row, [13], [6])
    assert row.granted == [] and row.slots == [2, 5, 6]
    assert len(store._free) == 7
    store.check()


@pytest.mark.parametrize(
    ("tokens", "slots", "keep"),
    [
        ([1], [9], []),  # not granted
        ([1, 2], [1, 1], []),  # twice
        ([1], [1], [1]),  # joins and stays granted
        ([1], [1], [9]),  # keeps what it does not have
        ([1, 2], [1], []),  # one slot per token
    ],
)
def test_commit_of_wrong_slots_asserts(
    tokens: list[int], slots: list[int], keep: list[int]
) -> None:
    store = KVStore(10, 1)
    row = begin(store, [])
    store.grant(row, 3)
    with pytest.raises(AssertionError):
        store.commit(row, tokens, slots, keep)


def test_a_grant_that_cannot_be_met_takes_nothing() -> None:
    store = KVStore(8, 2)
    serve(store, [1, 2, 3, 4])
    row = begin(store, [1, 2])
    assert store.available() == 6
    assert store.grant(row, 7) is None
    assert store.matched([1, 2, 3, 4]) == 4, "nothing was evicted for it"
    assert store.available() == 6
    slots = store.grant(row, 6)
    assert slots is not None and sorted([*slots, *row.slots]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert store.matched([1, 2, 3, 4]) == 2
    store.check()


def test_whole_prompt_cached_replays_the_last_token() -> None:
    pool = KVPool([], 8, 1, 8)
    store = KVStore(8, 1, pool)
    serve(store, [1, 2, 3])
    row = begin(store, [1, 2, 3])
    assert row.cached == 3
    slots = store.grant(row, 2)  # the replayed token and a guess
    assert slots is not None
    store.commit(row, [4], slots[1:])
    assert row.tokens == [1, 2, 3, 4] and pool.table[0, :3].tolist() == row.slots[:3]
    assert slots[0] in store._free.free()
    store.check()


def test_share_lets_others_match_while_the_row_goes_on() -> None:
    store = KVStore(20, 2)
    row = begin(store, [1, 2, 3])
    put(store, row, [1, 2, 3])
    assert store.matched([1, 2, 3]) == 0
    store.share(row)
    assert store.books().pinned == 3
    other = begin(store, [1, 2, 3, 4])
    assert other.slots == row.slots
    put(store, row, [7])
    store.share(row)
    store.share(row)
    assert store.matched([1, 2, 3, 7]) == 4
    store.close(row)
    assert store.books() == Books(free=16, evictable=1, pinned=3, rows=0, granted=0, total=20)
    store.close(other)
    store.check()


def test_share_takes_over_what_the_tree_holds() -> None:
    pool = KVPool([], 20, 2, 10)
    store = KVStore(20, 2, pool)
    early, late = begin(store, [1, 2, 3]), begin(store, [1, 2, 3])
    ours = put(store, early, [1, 2, 3])
    theirs = put(store, late, [1, 2, 9])
    pool.assign(late.row, 0, theirs)
    store.mark_drafted(theirs)
    assert store.drafted_prefix(late) == 3
    store.share(early)
    store.share(late)
    assert late.slots == [ours[0], ours[1], theirs[2]]
    assert pool.table[late.row, :3].tolist() == late.slots
    assert set(theirs[:2]) <= set(store._free.free())
    assert store.drafted_prefix(late) == 0, "the tree's slots were never drafted"
    store.mark_drafted(ours[:1])
    assert store.drafted_prefix(late) == 1
    store.check()


def test_close_frees_the_duplicates() -> None:
    store = KVStore(20, 2)
    early, late = begin(store, [1, 2, 3]), begin(store, [1, 2, 3])
    ours = put(store, early, [1, 2, 3])
    put(store, late, [1, 2, 3, 4])
    store.close(early)
    store.close(late)
    store.check()
    assert store.books() == Books(free=16, evictable=4, pinned=0, rows=0, granted=0, total=20)
    assert begin(store, [1, 2, 3, 4]).slots[:3] == ours


def test_closing_twice_asserts() -> None:
    store = KVStore(4, 1)
    row = begin(store, [])
    store.close(row)
    with pytest.raises(AssertionError, match="closed once"):
        store.close(row)


def test_drafted_bits_end_with_the_grant() -> None:
    store = KVStore(4, 1)
    row = begin(store, [])
    store.mark_drafted(put(store, row, [1, 2, 3]))
    assert store.drafted_prefix(row) == 3
    store.close(row)
    row = begin(store, [1, 2, 3])
    assert store.drafted_prefix(row) == 3, "a hit keeps what the drafter has"
    store.close(row)
    store.clear()
    row = begin(store, [])
    put(store, row, [1, 2, 3, 4])
    assert store.drafted_prefix(row) == 0
    store.mark_drafted([row.slots[0], row.slots[2]])
    assert store.drafted_prefix(row) == 1


def test_table_row_is_written_at_open() -> None:
    pool = KVPool([], 8, 2, 6)
    store = KVStore(8, 2, pool)
    cached = serve(store, [1, 2, 3]).slots
    row = begin(store, [1, 2, 9])
    assert pool.table[row.row].tolist() == [*cached[:2], 0, 0, 0, 0, 0]


def test_continuations_come_from_the_namespace_only() -> None:
    store = KVStore(20, 2)
    serve(store, [1, 2, 3, 4], "a")
    assert store.continuations([1, 2], "a", 8) == [([3, 4], 1)]
    assert store.continuations([1, 2], "b", 8) == []
    cursor = store.cursor("a", [1])
    cursor.extend([2])
    assert cursor.guess(1) == [[3]]


def test_check_finds_a_lost_and_a_doubled_slot() -> None:
    store = KVStore(6, 1)
    row = begin(store, [])
    put(store, row, [1, 2])
    lost = row.slots.pop()
    row.tokens.pop()
    with pytest.raises(AssertionError, match=f"1 slots are nowhere, such as .{lost}"):
        store.check()
    row.tokens += [2, 3]
    row.slots += [lost, 6]
    with pytest.raises(AssertionError, match="slot 6 is in the free stack and in row 0"):
        store.check()


def test_case_22_the_tree_keeps_only_what_the_client_received() -> None:
    store = KVStore(100, 2)
    prompt = list(range(40))
    row = begin(store, prompt)
    put(store, row, prompt)
    store.share(row)
    slots = store.grant(row, 9)
    assert slots is not None
    store.commit(row, [50, 51, 52, 53, 54], [slots[0], slots[2], slots[3], slots[6], slots[8]])
    store.close(row, keep=43)  # a stop inside the accepted run
    store.check()
    assert store.tree.paths() == [("", [*prompt, 50, 51, 52])]
    assert store.books() == Books(free=57, evictable=43, pinned=0, rows=0, granted=0, total=100)
    assert begin(store, [*prompt, 50, 51, 52, 60, 61]).cached == 43


def test_case_22_overshoot_that_was_shared_leaves_the_tree() -> None:
    store = KVStore(100, 3)
    serve(store, [1, 2, 3])
    row = begin(store, [1, 2, 3, 4])
    put(store, row, [4, 5, 6])
    store.share(row)
    reader = begin(store, [1, 2, 3, 4, 5])
    store.close(row, keep=0)
    store.check()
    assert store.tree.paths() == [("", [1, 2, 3, 4, 5])], "what others stand on stays"
    store.close(reader)
    row = begin(store, [1, 2, 3, 4, 5, 6])
    store.close(row, keep=2)
    assert store.matched([1, 2, 3, 4, 5]) == 5, "a row cuts nothing that was there before it"
    store.check()


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("width", [1, 4])
def test_case_25_books_balance_after_each_of_500_requests(width: int, depth: int) -> None:
    """Trees of all shapes in a pool for three requests; 10 % cancelled, 5 % turned away."""
    rng = random.Random(width * 10 + depth)
    nodes = 1 + width * depth
    store = KVStore(3 * (240 + nodes), 3)
    running: list[tuple[RowKV, list[int], int]] = []
    ended = 0
    while ended < 500:
        if len(running) < 3:
            length = rng.randint(1, 200)
            prompt = [rng.randrange(2) if at < 8 else rng.randrange(50) for at in range(length)]
            row = begin(store, prompt)
            if rng.random() < 0.05:  # found invalid after it was opened
                store.close(row, keep=0)
                ended += 1
            else:
                put(store, row, prompt[row.cached :])
                running.append((row, prompt, rng.randint(1, 40)))
        entry = running[rng.randrange(len(running))] if running else None
        if entry is None:
            continue
        row, prompt, wanted = entry
        slots = store.grant(row, nodes)
        assert slots is not None, "room for three requests"
        if rng.random() < 0.01:  # cancelled with a step in flight
            running.remove(entry)
            store.close(row)
            ended += 1
            continue
        path = sorted(rng.sample(slots, rng.randint(1, min(nodes, depth + 1))))
        store.commit(row, [rng.randrange(50) for _ in path], path)
        if len(row.tokens) >= len(prompt) + wanted:
            running.remove(entry)
            store.close(row, keep=len(prompt) + wanted)
            store.check()
            ended += 1
    for row, _, _ in running:
        store.close(row)
    store.check()
    books = store.books()
    assert books.free + books.evictable == books.total and books.pinned == 0
    store.clear()
    assert store.books().free == store.total


def test_case_26_a_prefix_in_use_is_never_evicted() -> None:
    """One slow row, sixty others that force evictions and splits below it."""
    rng = random.Random(26)
    content: dict[int, tuple[int, ...]] = {}

    def write(row: RowKV, tokens: list[int]) -> None:
        for token in tokens:
            put(store, row, [token])
            content[row.slots[-1]] = tuple(row.tokens)

    def intact(row: RowKV) -> bool:
        return all(content[slot] == tuple(row.tokens[: n + 1]) for n, slot in enumerate(row.slots))

    store = KVStore(256, 2)
    common = list(range(1000, 1100))
    for cancel in (False, True):
        slow = begin(store, common + list(range(10)))
        write(slow, (common + list(range(10)))[slow.cached :])
        store.share(slow)
        for number in range(60):
            start = common[:50] if number % 3 == 0 else []
            prompt = start + [rng.randrange(900) for _ in range(80 - len(start))]
            row = begin(store, prompt)
            assert row.cached >= len(start), "the shared prefix is pinned, so it is there"
            assert intact(row)
            write(row, prompt[row.cached :])
            store.close(row)
            if number % 2 == 0 and not (cancel and number > 30):
                write(slow, [number])
            assert intact(slow)
            store.check()
        store.close(slow, keep=slow.cached if cancel else None)
        store.check()
        assert store.books().pinned == 0
    store.clear()
    assert store.books().free == 256


def test_case_28_rows_dropped_at_any_moment_return_everything() -> None:
    rng = random.Random(28)
    store = KVStore(120, 4)
    for _ in range(400):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 25))]
        row = store.open(prompt)
        assert row is not None
        moment = rng.randrange(5)
        if moment >= 1:
            granted = store.grant(row, len(prompt) - row.cached + 3)
            assert granted is not None
        if moment >= 2:
            fresh = len(prompt) - row.cached
            store.commit(row, prompt[row.cached :], granted[:fresh], keep=granted[fresh:])
        if moment >= 3:
            store.share(row)
        if moment >= 4:
            store.commit(row, [9], row.granted[1:2])
        store.close(row)
        store.check()
        assert store.available() == 120 and store.vacant() == 4
        books = store.books()
        assert (books.pinned, books.rows, books.granted) == (0, 0, 0)
