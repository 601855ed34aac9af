"""The radix tree by itself: matching, splitting, pins, eviction order and cost, continuations."""

import random

import pytest

from spec_serve.cache import radix
from spec_serve.cache.radix import RadixTree


def test_match_is_exact_to_the_token() -> None:
    tree = RadixTree()
    assert tree.insert([1, 2, 3, 4], "", [11, 12, 13, 14]) == 0
    for length in range(5):
        path = [1, 2, 3, 4][:length]
        assert tree.matched([*path, 9]) == length
        lease = tree.match([*path, 9])
        assert lease.length == length
        assert tree.slots(lease) == [11, 12, 13, 14][:length]
        assert tree.tokens(lease) == path
        assert tree.pinned == length
        tree.release(lease)
        tree.check([])
    assert tree.size == 4


@pytest.mark.parametrize("kind", [list, tuple])
def test_any_sequence_matches(kind: type) -> None:
    tree = RadixTree()
    tree.insert(kind([1, 2, 3]))
    assert tree.matched(kind([1, 2, 3, 4])) == 3
    assert tree.continuations(kind([1]), limit=2) == [([2, 3], 1)]


def test_long_runs_agree_up_to_the_first_difference() -> None:
    tree = RadixTree()
    path = [token % 7 for token in range(1000)]
    tree.insert(path)
    for place in (1, 2, 3, 499, 500, 511, 512, 998, 999):
        assert tree.matched([*path[:place], 8, *path[place + 1 :]]) == place
    assert tree.matched(path[:777]) == 777


def test_salts_share_nothing() -> None:
    tree = RadixTree()
    tree.insert([1, 2, 3], "a", [1, 2, 3])
    assert tree.matched([1, 2, 3], "b") == 0
    assert tree.matched([1, 2, 3]) == 0
    assert tree.continuations([1], "b", 4) == []
    assert tree.insert([1, 2, 3], "b", [4, 5, 6]) == 0
    lease = tree.match([1, 2, 3], "a")
    assert tree.slots(lease) == [1, 2, 3]
    assert tree.clear() == [4, 5, 6]
    tree.release(lease)
    tree.check([])


def test_bare_namespaces_leave_nothing_behind() -> None:
    tree = RadixTree()
    for user in range(100):
        tree.release(tree.match([1, 2], f"user {user}"))
        tree.insert([1, 2], f"user {user}")
    tree.clear()
    assert tree._roots == {} and tree.size == 0
    tree.check([])


def test_graft_reports_what_the_tree_held_already() -> None:
    tree = RadixTree()
    tree.insert([1, 2, 3, 4, 5], "", [1, 2, 3, 4, 5])
    lease = tree.match([1, 2])
    lease, held = tree.graft(lease, [3, 4, 9], [13, 14, 19])
    assert held == [3, 4]
    assert lease.length == 5 and tree.slots(lease) == [1, 2, 3, 4, 19]
    assert (tree.size, tree.pinned) == (6, 5)
    tree.check([lease])


def test_growing_one_path_stays_one_node() -> None:
    tree = RadixTree()
    lease = tree.match([])
    for token in range(50):
        lease, held = tree.graft(lease, [token])
        assert held == []
    assert tree.tokens(lease) == list(range(50))
    assert len(lease.node.tokens) == 50
    tree.release(lease)
    tree.insert(list(range(60)))
    assert len(tree.match(list(range(60))).node.tokens) == 60


def test_growing_a_leaf_that_others_lease_pins_them_no_further() -> None:
    tree = RadixTree()
    tree.insert([1, 2])
    other = tree.match([1, 2])
    mine, _ = tree.graft(tree.match([1, 2]), [3, 4])
    assert tree.pinned == 4
    tree.release(mine)
    assert tree.pinned == 2 and tree.evictable == 2
    tree.check([other])


def test_case_26_partial_match_pins_exactly_the_matched_piece() -> None:
    tree = RadixTree()
    tree.insert(list(range(100)), "", list(range(1, 101)))
    lease = tree.match([*range(50), 777])
    assert (tree.pinned, tree.evictable) == (50, 50)
    assert tree.clear() == list(range(51, 101))
    assert tree.slots(lease) == list(range(1, 51))
    tree.release(lease)
    assert (tree.pinned, tree.evictable) == (0, 50)
    assert tree.clear() == list(range(1, 51))


def test_case_26_the_matched_node_itself_is_pinned() -> None:
    tree = RadixTree()
    tree.insert([1, 2], "", [1, 2])
    lease = tree.match([1, 2])
    assert tree.evict(1) == []
    again = tree.match([1, 2])
    tree.release(lease)
    assert tree.evict(2) == []
    tree.release(again)
    assert tree.evict(2) == [1, 2]


def test_case_26_a_lease_survives_splits_above_and_below_its_end() -> None:
    tree = RadixTree()
    tree.insert([1, 2, 3, 4, 5, 6], "", [1, 2, 3, 4, 5, 6])
    lease = tree.match([1, 2, 3, 4])
    tree.insert([1, 2, 9], "", [1, 2, 7])
    tree.insert([1, 2, 3, 4, 5, 8], "", [1, 2, 3, 4, 5, 8])
    assert tree.slots(lease) == [1, 2, 3, 4] and tree.pinned == 4
    tree.check([lease])
    assert sorted(tree.clear()) == [5, 6, 7, 8]
    assert tree.slots(lease) == [1, 2, 3, 4]
    tree.release(lease)
    tree.check([])


def test_releasing_twice_asserts() -> None:
    tree = RadixTree()
    tree.insert([1])
    lease = tree.match([1])
    tree.release(lease)
    with pytest.raises(AssertionError, match="released more often"):
        tree.release(lease)


def test_release_cuts_the_tail_unless_others_use_it() -> None:
    tree = RadixTree()
    lease, _ = tree.graft(tree.match([]), [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    other = tree.match([1, 2, 3])
    assert tree.release(lease, keep=1) == [4, 5]
    assert tree.paths() == [("", [1, 2, 3])]
    tree.release(other)
    lease = tree.match([1, 2, 3])
    tree.insert([1, 2, 3, 7], "", [1, 2, 3, 7])
    assert tree.release(lease, keep=0) == []
    assert tree.paths() == [("", [1, 2, 3, 7])]
    lease = tree.match([1, 2, 3, 7])
    assert sorted(tree.release(lease, keep=0)) == [1, 2, 3, 7]
    assert tree.size == 0 and tree._roots == {}
    tree.check([])


def test_eviction_takes_the_least_recently_used_from_the_tail() -> None:
    tree = RadixTree()
    tree.insert([1, 2, 3, 4], "", [1, 2, 3, 4])
    tree.insert([1, 2, 8, 9], "", [1, 2, 5, 6])
    tree.insert([7, 7], "x", [7, 8])
    tree.release(tree.match([1, 2, 3, 4]))
    assert tree.evict(1) == [6]
    assert tree.evict(2) == [5, 8]
    assert tree.evict(1) == [7]
    assert tree.paths() == [("", [1, 2, 3, 4])]
    tree.check([])


def test_evicting_one_by_one_equals_evicting_at_once() -> None:
    def build() -> RadixTree:
        rng = random.Random(5)
        tree = RadixTree()
        for _ in range(200):
            tree.insert([rng.randrange(3) for _ in range(rng.randrange(1, 12))])
        return tree

    single, bulk = build(), build()
    for _ in range(150):
        single.evict(1)
    bulk.evict(150)
    assert sorted(single.paths()) == sorted(bulk.paths())
    assert single.size == bulk.size
    single.check([])
    bulk.check([])


def test_eviction_from_a_big_tree_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 nodes: the heap operations follow the tokens evicted, not the size of the tree."""
    tree = RadixTree()
    for number in range(100_000):
        tree.insert([number % 300, number, 7], "", [3 * number + 1, 3 * number + 2, 3 * number + 3])
    assert tree.size == 100_000 * 2 + 300
    steps = 0

    def counted(operation):  # type: ignore[no-untyped-def]
        def run(*arguments):  # type: ignore[no-untyped-def]
            nonlocal steps
            steps += 1
            return operation(*arguments)

        return run

    for name in ("heappop", "heappush", "heapreplace"):
        monkeypatch.setattr(radix, name, counted(getattr(radix, name)))
    for number in range(1000):
        assert tree.evict(2) == [3 * number + 2, 3 * number + 3]
    assert steps <= 3 * 1000
    steps = 0
    for number in range(1000, 2000):  # touched: each entry is put back once, then in order again
        tree.release(tree.match([number % 300, number, 7]))
    assert tree.evict(2) == [3 * 2000 + 2, 3 * 2000 + 3]
    assert steps <= 3 * 1000


def test_the_heap_does_not_grow_without_evictions() -> None:
    tree = RadixTree()
    tree.insert([1, 5000])
    for number in range(2000):
        tree.insert([1, number])  # a leaf known to the heap ...
        tree.release(tree.match([1, number]), keep=1)  # ... that leaves without an eviction
    assert tree.size == 2
    assert tree._buried > 0, "no leaf left behind its entry: nothing was tried"
    assert len(tree._heap) < 200
    tree.check([])
    assert tree.evict(5) == [] and tree.size == 0
    tree.check([])


def test_continuations_latest_first() -> None:
    tree = RadixTree()
    tree.insert([1, 2, 3, 4, 5])
    tree.insert([1, 2, 6, 7])
    tree.insert([1, 2, 3, 8])
    assert tree.continuations([1, 2], limit=8) == [([3, 8], 2), ([6, 7], 1), ([3, 4, 5], 1)]
    assert tree.continuations([1, 2], limit=1) == [([3], 2), ([6], 1)]
    assert tree.continuations([1], limit=3) == [([2, 3, 8], 3), ([2, 6, 7], 1), ([2, 3, 4], 1)]
    tree.release(tree.match([1, 2, 6, 7]))
    assert tree.continuations([1, 2], limit=8)[0] == ([6, 7], 2)
    lease = tree.match([1, 2, 3, 4])  # a lease counts as use before it ends
    assert tree.continuations([1, 2], limit=8)[0][0] == [3, 4, 5]
    tree.release(lease)
    assert tree.continuations([1, 2, 9], limit=8) == []
    assert tree.continuations([1, 2, 3, 8], limit=8) == []
    assert tree.continuations([1, 2], limit=0) == []


def test_at_most_a_few_continuations() -> None:
    tree = RadixTree()
    for token in range(50):
        tree.insert([1, token, token])
    runs = [run for run, _ in tree.continuations([1], limit=2)]
    assert runs == [[49, 49], [48, 48], [47, 47], [46, 46]]


def test_cursor_follows_token_by_token() -> None:
    tree = RadixTree()
    path = list(range(40))
    tree.insert(path)
    tree.insert([*path[:20], 99, 98])
    cursor = tree.cursor("", path[:5])
    for at in range(5, 40):
        assert [run for run, _ in tree.continuations(path[:at], limit=4)] == cursor.guess(4)
        assert path[at : at + 4] in cursor.guess(4)
        cursor.extend([path[at]])
    assert cursor.guess(4) == []


def test_cursor_survives_a_split_and_an_eviction_under_it() -> None:
    tree = RadixTree()
    tree.insert([1, 2, 3, 4, 5, 6])
    cursor = tree.cursor("", [1, 2, 3])
    tree.insert([1, 2, 9])  # the node under the cursor is cut in two
    assert cursor.guess(9) == [[4, 5, 6]]
    tree.release(tree.match([1, 2, 9]))
    tree.evict(2)  # its tail goes
    assert cursor.guess(9) == [[4]]
    cursor.extend([4])
    tree.clear()
    assert cursor.guess(9) == []
    tree.insert([1, 2, 3, 4, 7, 8])
    assert cursor.guess(9) == [[7, 8]]
    cursor.extend([7])
    assert cursor.guess(9) == [[8]]


def test_cursor_that_left_the_tree_returns_when_others_grow_it() -> None:
    tree = RadixTree()
    cursor = tree.cursor("s")
    cursor.extend([1, 2])
    cursor.extend([3])
    assert cursor.guess(4) == []
    tree.insert([1, 2, 3, 4], "")
    assert cursor.guess(4) == []  # another namespace
    tree.insert([1, 2, 5], "s")
    assert cursor.guess(4) == []
    tree.insert([1, 2, 3, 4], "s")
    assert cursor.guess(4) == [[4]]


def test_check_finds_wrong_books() -> None:
    tree = RadixTree()
    tree.insert([1, 2, 3])
    lease = tree.match([1, 2])
    tree.check([lease])
    with pytest.raises(AssertionError, match="leases counted"):
        tree.check([])
    with pytest.raises(AssertionError, match="leases counted"):
        tree.check([lease, lease])
    lease.node.lock += 1
    with pytest.raises(AssertionError):
        tree.check([lease])


def test_what_is_kept_is_passed_over_once() -> None:
    tree = RadixTree()
    for path in ([1, 2, 3, 4], [5, 6, 7], [8, 9]):
        tree.insert(path)
    tree.keep([1, 2, 9])  # of which two are cached
    tree.keep([7])  # and nothing of this
    tree.keep([1], "nobody")
    tree.evict(2)
    assert tree.matched([1, 2, 3, 4]) == 2
    tree.check([])
    tree.evict(3)
    assert [tree.matched(path) for path in ([1, 2], [5, 6, 7], [8, 9])] == [2, 0, 2]
    tree.evict(2)
    assert [tree.matched(path) for path in ([1, 2], [8, 9])] == [2, 0]
    tree.check([])
    tree.insert([3, 3])
    tree.evict(2)
    assert [tree.matched(path) for path in ([1, 2], [3, 3])] == [0, 2]
    tree.keep([3, 3])
    tree.clear()
    assert tree.size == 0
    tree.check([])
