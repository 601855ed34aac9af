"""KVStore against a naive model: random lives of rows, all checked after each operation.

The model keeps a set of cached prefixes and, per slot, the prefix whose K/V was written there last.
Whatever the store matches must still lie in its slot: this is what an eviction of pinned tokens, a
slot handed out twice or a foreign namespace would break. Knows the store by its public face only.
"""

import random
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spec_serve.cache.paths import BRANCHES
from spec_serve.cache.pool import KVPool
from spec_serve.cache.radix import Cursor
from spec_serve.cache.store import KVStore, RowKV

Prefix = tuple[str, tuple[int, ...]]  # salt and tokens


@dataclass
class Life:
    """What the model believes of one row."""

    row: RowKV
    salt: str
    cursor: Cursor
    tokens: list[int]
    leased: int
    cached: int
    granted: list[int] = field(default_factory=list)

    def prefix(self, length: int) -> Prefix:
        return self.salt, tuple(self.tokens[:length])


class Model:
    """Runs each operation on a store and on plain sets, and compares."""

    def __init__(self, slots: int, rows: int, positions: int) -> None:
        self.positions = positions
        self.pool = KVPool([], slots, rows, positions)
        self.store = KVStore(slots, rows, self.pool)
        self.rows = rows
        self.lives: list[Life] = []
        self.written: dict[int, Prefix] = {}
        self.held: dict[Prefix, int] = {}  # cached prefix -> when it was last used
        self.drafted: set[int] = set()
        self.clock = 0
        self.evicted = 0

    # ---------------------------------------------------------------- naive views

    def pinned(self, but: Life | None = None) -> set[Prefix]:
        return {
            life.prefix(n)
            for life in self.lives
            if life is not but
            for n in range(1, life.leased + 1)
        }

    def children(self, prefix: Prefix) -> list[Prefix]:
        salt, tokens = prefix
        return [p for p in self.held if p[0] == salt and p[1][:-1] == tokens and p[1]]

    def dump(self) -> set[Prefix]:
        return {
            (salt, tuple(path[:n]))
            for salt, path in self.store.tree.paths()
            for n in range(1, len(path) + 1)
        }

    def touch(self, life: Life, length: int) -> None:
        for n in range(1, length + 1):
            self.held[life.prefix(n)] = self.clock

    def expect_evicted(self, count: int) -> None:
        """`count` tokens must have gone: the least recently used ones that nobody stood on."""
        left = self.dump()
        gone = self.held.keys() - left
        assert left <= self.held.keys(), "eviction added something"
        assert len(gone) == count, f"{len(gone)} tokens evicted, {count} expected"
        pinned = self.pinned()
        assert not gone & pinned, "a pinned token was evicted"
        stay = [used for p, used in self.held.items() if p in left and p not in pinned]
        if gone and stay:
            assert max(self.held[p] for p in gone) <= min(stay), "not the least recently used"
        for prefix in gone:
            del self.held[prefix]
        self.evicted += count

    # ----------------------------------------------------------------- operations

    def open(self, tokens: list[int], salt: str) -> None:
        row = self.store.open(tokens, salt)
        if len(self.lives) == self.rows:
            assert row is None
            return
        assert row is not None
        hit = 0
        while hit < len(tokens) and (salt, tuple(tokens[: hit + 1])) in self.held:
            hit += 1
        assert row.cached == hit and row.tokens == tokens[:hit] and row.granted == []
        self.clock += 1
        life = Life(row, salt, self.store.cursor(salt, tokens[:hit]), tokens[:hit], hit, hit)
        self.lives.append(life)
        self.touch(life, hit)

    def grant(self, life: Life, count: int) -> None:
        before, free = self.store.available(), self.store.books().free
        slots = self.store.grant(life.row, count)
        if count > before:
            assert slots is None and self.store.available() == before
            return
        assert slots is not None and len(set(slots)) == len(slots) == count
        life.granted += slots
        self.drafted -= set(slots)
        for slot in slots:
            self.written.pop(slot, None)
        if count > free:
            self.expect_evicted(count - free)
        assert life.row.granted == life.granted

    def commit(self, life: Life, order: list[int], tokens: list[int], keep: int) -> None:
        """Commit granted slots in any order; keep some of the others."""
        assert sorted(order) == sorted(life.granted)
        room = self.positions - len(life.tokens)
        tokens = tokens[: min(len(order), room)]
        slots, rest = order[: len(tokens)], order[len(tokens) :]
        kept = rest[:keep]
        self.store.commit(life.row, tokens, slots, kept)
        self.pool.assign(life.row.row, len(life.tokens), slots)  # the device's part
        for token, slot in zip(tokens, slots, strict=True):
            life.tokens.append(token)
            self.written[slot] = life.prefix(len(life.tokens))
        life.granted = [slot for slot in life.granted if slot in kept]
        life.cursor.extend(tokens)

    def share(self, life: Life) -> None:
        self.store.share(life.row)
        for n in range(life.leased + 1, len(life.tokens) + 1):
            self.held.setdefault(life.prefix(n), self.clock)
        life.leased = len(life.tokens)

    def close(self, life: Life, keep: int | None) -> None:
        self.store.close(life.row, keep)
        count = len(life.tokens) if keep is None else keep
        self.lives.remove(life)
        self.clock += 1
        self.touch(life, max(count, life.leased))
        pinned = self.pinned()
        for n in range(life.leased, max(count, life.cached), -1):
            prefix = life.prefix(n)
            if prefix in pinned or self.children(prefix):
                break
            del self.held[prefix]

    def mark(self, life: Life, slots: list[int]) -> None:
        self.store.mark_drafted(slots)
        self.drafted |= set(slots)

    def clear(self) -> None:
        self.store.clear()
        self.expect_evicted(len(self.held.keys() - self.pinned()))

    # --------------------------------------------------------------- what must hold

    def check(self) -> None:
        store = self.store
        store.check()
        assert self.dump() == self.held.keys(), "the tree does not hold what it should"
        books, pinned = store.books(), self.pinned()
        assert books.pinned == len(pinned)
        assert books.evictable == len(self.held) - len(pinned)
        assert books.granted == sum(len(life.granted) for life in self.lives)
        assert books.rows == sum(len(life.tokens) - life.leased for life in self.lives)
        places = books.free + books.evictable + books.pinned + books.rows + books.granted
        assert places == books.total and store.available() == books.free + books.evictable
        assert store.vacant() == self.rows - len(self.lives)
        for life in self.lives:
            row = life.row
            assert row.tokens == life.tokens and row.granted == life.granted
            for n, slot in enumerate(row.slots, 1):
                assert self.written[slot] == life.prefix(n), "a slot holds something else"
            assert self.pool.table[row.row, : len(row.slots)].tolist() == row.slots
            marked = [slot in self.drafted for slot in row.slots] + [False]
            assert store.drafted_prefix(row) == marked.index(False)
            self.check_guesses(life)

    def check_guesses(self, life: Life) -> None:
        """Cursor and look-up agree, and with the set of prefixes."""
        limit = 3
        guesses = life.cursor.guess(limit)
        known = self.store.continuations(life.tokens, life.salt, limit)
        assert guesses == [run for run, _ in known]
        assert all(hits > 0 for _, hits in known)
        path = tuple(life.tokens)
        ends = [
            p
            for p in self.held
            if p[0] == life.salt and p[1][: len(path)] == path
            if 0 < len(p[1]) - len(path) <= limit
            if len(p[1]) - len(path) == limit or not self.children(p)
        ]
        assert len(guesses) == min(BRANCHES, len(ends))
        assert {(life.salt, path + tuple(run)) for run in guesses} <= set(ends)
        assert len({tuple(run) for run in guesses}) == len(guesses)


TOKENS = st.integers(0, 2)
SALTS = st.sampled_from(["", "a"])


class StoreMachine(RuleBasedStateMachine):
    """Hypothesis chooses; the model does and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(slots=20, rows=3, positions=24)

    def pick(self, data: st.DataObject) -> Life:
        return data.draw(st.sampled_from(self.model.lives))

    @rule(tokens=st.lists(TOKENS, max_size=10), salt=SALTS)
    def open(self, tokens: list[int], salt: str) -> None:
        self.model.open(tokens, salt)

    @precondition(lambda self: self.model.lives)
    @rule(data=st.data(), count=st.integers(0, 12))
    def grant(self, data: st.DataObject, count: int) -> None:
        self.model.grant(self.pick(data), count)

    @precondition(lambda self: any(life.granted for life in self.model.lives))
    @rule(data=st.data(), tokens=st.lists(TOKENS, max_size=12), keep=st.integers(0, 3))
    def commit(self, data: st.DataObject, tokens: list[int], keep: int) -> None:
        life = data.draw(st.sampled_from([life for life in self.model.lives if life.granted]))
        order = data.draw(st.permutations(life.granted))
        self.model.commit(life, list(order), tokens, keep)

    @precondition(lambda self: self.model.lives)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        self.model.share(self.pick(data))

    @precondition(lambda self: self.model.lives)
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        life = self.pick(data)
        slots = life.row.slots
        self.model.mark(life, slots[: data.draw(st.integers(0, len(slots)))])

    @precondition(lambda self: self.model.lives)
    @rule(data=st.data(), cut=st.booleans())
    def close(self, data: st.DataObject, cut: bool) -> None:
        life = self.pick(data)
        keep = data.draw(st.integers(0, len(life.tokens))) if cut else None
        self.model.close(life, keep)

    @rule()
    def clear(self) -> None:
        self.model.clear()

    @invariant()
    def check(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        """At idle nothing is pinned and everything can go."""
        while self.model.lives:
            self.model.close(self.model.lives[0], None)
            self.model.check()
        self.model.clear()
        self.model.check()
        assert self.model.store.books().free == self.model.store.total


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestStore = StoreMachine.TestCase


def soak(seed: int, steps: int, slots: int, rows: int, alphabet: int) -> Model:
    """Random operations weighted like service: rows grow, are shared, end or are cancelled."""
    rng = random.Random(seed)
    model = Model(slots, rows, positions=slots)

    def words(most: int) -> list[int]:
        return [rng.randrange(alphabet) for _ in range(rng.randint(0, most))]

    for _ in range(steps):
        choice = rng.random()
        life = rng.choice(model.lives) if model.lives else None
        if life is None or choice < 0.15:
            model.open(words(slots // 2), rng.choice(["", "", "a", "b"]))
        elif choice < 0.45:
            model.grant(life, rng.randint(0, 6))
        elif choice < 0.75:
            order = rng.sample(life.granted, len(life.granted))
            model.commit(life, order, words(6), rng.randint(0, 2))
        elif choice < 0.82:
            model.share(life)
        elif choice < 0.87:
            model.mark(life, life.row.slots[: rng.randint(0, len(life.row.slots))])
        elif choice < 0.99:
            count = len(life.tokens)
            model.close(life, rng.choice([None, None, rng.randint(0, count)]))
        else:
            model.clear()
        model.check()
    while model.lives:
        model.close(model.lives[0], None)
        model.check()
    return model


def test_soak_binary_tokens_share_much() -> None:
    model = soak(seed=1, steps=4000, slots=32, rows=5, alphabet=2)
    assert model.evicted > 200, "the pool was too big to try eviction"


def test_soak_wider_tokens_share_little() -> None:
    model = soak(seed=2, steps=3000, slots=60, rows=6, alphabet=5)
    assert model.evicted > 200, "the pool was too big to try eviction"
    model.clear()
    assert model.store.books().free == 60
