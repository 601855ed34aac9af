"""The verified history: who holds which slot, and what of it others may share.

The only module that touches the pool's table, the radix tree and the free slots together. Every
slot is in exactly one place: free, in the tree, private to a row, or granted to a row for its next
twig. Does not know models, requests or who runs in a step; works without a pool (no tensors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_serve.cache.pool import KVPool
from spec_serve.cache.radix import Cursor, Lease, RadixTree
from spec_serve.cache.slots import FreeSlots


@dataclass(slots=True, eq=False)
class RowKV:
    """What a row holds. Read it; only the KVStore changes it.

    row: its row of the pool's table. tokens, slots: committed, one slot per token. cached: how many
    of them were found at `open`. granted: slots lent for the next twig, in order. lease: the part
    of the row (its first lease.length tokens) that lies in the radix tree.
    """

    row: int
    salt: str
    lease: Lease
    tokens: list[int]
    slots: list[int]
    cached: int
    granted: list[int] = field(default_factory=list)
    drafted: int = 0  # leading tokens already known to be drafted
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Books:
    """Where the slots are: free + evictable + pinned + rows + granted == total.

    evictable, pinned: tokens of the radix tree not under, and under, a lease. rows: private to
    rows (committed, not shared). granted: lent for twigs.
    """

    free: int
    evictable: int
    pinned: int
    rows: int
    granted: int
    total: int


class KVStore:
    """`slots` slots (1..slots) and `rows` table rows; `pool`, if any, has as many of both."""

    def __init__(self, slots: int, rows: int, pool: KVPool | None = None) -> None:
        assert pool is None or (pool.slots == slots and pool.table.shape[0] == rows), (
            f"pool of {pool and pool.slots} slots under a store of {slots}"
        )
        self.total = slots
        self.pool = pool
        self.tree = RadixTree()
        self._free = FreeSlots(slots)
        self._vacant = list(range(rows - 1, -1, -1))
        self._rows: dict[int, RowKV] = {}
        self._drafted = bytearray(slots + 1)

    # -------------------------------------------------------------- a row's life

    def open(self, tokens: Sequence[int], salt: str = "") -> RowKV | None:
        """A row that starts with the longest cached prefix of `tokens`, pinned; None = no row free.

        If that is the whole of `tokens`, the last one is to be replayed: run it in a granted slot
        for its logits and taps, and leave it out of the commit.
        """
        if not self._vacant:
            return None
        lease = self.tree.match(tokens, salt)
        slots = self.tree.slots(lease)
        number = self._vacant.pop()
        length = lease.length
        row = RowKV(number, salt, lease, list(tokens[:length]), slots, length)
        self._rows[number] = row
        if self.pool is not None:
            self.pool.assign(number, 0, slots)
        return row

    def grant(self, row: RowKV, n: int) -> list[int] | None:
        """Lend `n` fresh slots to the row, after those it has; None if there are not so many.

        The least recently used unpinned tokens are evicted if the free slots do not suffice; with
        None, nothing is evicted nor taken.
        """
        free = self._free
        missing = n - len(free)
        if missing > 0:
            if missing > self.tree.size - self.tree.pinned:
                return None
            free.give(self.tree.evict(missing))
        assert not row.closed
        slots = free.take(n)
        drafted = self._drafted
        for slot in slots:
            drafted[slot] = 0
        row.granted += slots
        return slots

    def commit(
        self, row: RowKV, tokens: Sequence[int], slots: Sequence[int], keep: Sequence[int] = ()
    ) -> None:
        """`slots` (granted ones) hold `tokens` and join the row; grants not in `keep` return.

        Does not write the table: the device has done so where the tokens were chosen.
        """
        granted = row.granted
        assert len(tokens) == len(slots), f"{len(tokens)} tokens in {len(slots)} slots"
        if keep or len(granted) != len(slots) or granted != slots:
            used = set(slots)
            used.update(keep)
            rest = [slot for slot in granted if slot not in used]
            assert len(used) == len(slots) + len(keep), "a slot is named twice"
            assert len(rest) + len(used) == len(granted), "a slot that is not granted to the row"
            self._free.give(rest)
            stay = set(keep)
            row.granted = [slot for slot in granted if slot in stay] if stay else []
        else:
            row.granted = []
        row.tokens += tokens
        row.slots += slots

    def share(self, row: RowKV) -> None:
        """Put what the row has committed into the tree, pinned, so that others can match it.

        Of tokens that the tree holds already the row takes over the tree's slots (the table is
        rewritten) and its own return.
        """
        assert not row.closed
        start = row.lease.length
        if start == len(row.tokens):
            return
        row.lease, held = self.tree.graft(row.lease, row.tokens[start:], row.slots[start:])
        if held:
            end = start + len(held)
            self._free.give(row.slots[start:end])
            row.slots[start:end] = held
            row.drafted = min(row.drafted, start)
            if self.pool is not None:
                self.pool.assign(row.row, start, held)

    def close(self, row: RowKV, keep: int | None = None) -> None:
        """End the row: its first `keep` tokens (default all) go into the tree, the rest is freed.

        Grants return, the lease ends, the table row is vacant again. Tokens that the row itself
        had shared beyond `keep` leave the tree, unless others stand or have built on them.
        """
        assert not row.closed, "a row is closed once"
        count = len(row.tokens)
        keep = count if keep is None else keep
        assert 0 <= keep <= count, f"keep {keep} of {count} tokens"
        start, free = row.lease.length, self._free
        end = max(keep, start)
        free.give(row.slots[end:])
        if end > start:
            tokens, slots = row.tokens[start:end], row.slots[start:end]
            row.lease, held = self.tree.graft(row.lease, tokens, slots)
            free.give(row.slots[start : start + len(held)])
        free.give(self.tree.release(row.lease, max(keep, row.cached)))
        free.give(row.granted)
        row.granted = []
        row.closed = True
        del self._rows[row.row]
        self._vacant.append(row.row)

    # ------------------------------------------------------------ the drafter's part

    def mark_drafted(self, slots: Sequence[int]) -> None:
        """The drafter's K/V of these slots is valid; holds until a slot is granted anew."""
        drafted = self._drafted
        for slot in slots:
            drafted[slot] = 1

    def drafted_prefix(self, row: RowKV) -> int:
        """How many leading committed tokens of the row have valid drafter K/V."""
        drafted, slots, at = self._drafted, row.slots, row.drafted
        end = len(slots)
        while at < end and drafted[slots[at]]:
            at += 1
        row.drafted = at  # bits of held slots are never cleared: no need to look at these again
        return at

    # -------------------------------------------------------------------- look-ups

    def matched(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many leading tokens are cached; pins and touches nothing."""
        return self.tree.matched(tokens, salt)

    def continuations(
        self, tokens: Sequence[int], salt: str = "", limit: int = 16
    ) -> list[tuple[list[int], int]]:
        """What the tree has seen after exactly this path; see RadixTree.continuations."""
        return self.tree.continuations(tokens, salt, limit)

    def cursor(self, salt: str = "", tokens: Sequence[int] = ()) -> Cursor:
        """The same, token by token along a growing path; see Cursor."""
        return self.tree.cursor(salt, tokens)

    # ----------------------------------------------------------------------- books

    def available(self) -> int:
        """Slots that a grant could get: free ones and evictable ones."""
        return len(self._free) + self.tree.size - self.tree.pinned

    def vacant(self) -> int:
        """Table rows that are free."""
        return len(self._vacant)

    def clear(self) -> None:
        """Drop everything from the tree that no row stands on."""
        self._free.give(self.tree.clear())

    def books(self) -> Books:
        """Counts of the slots by place; cheap (no walk of the tree)."""
        rows = self._rows.values()
        return Books(
            free=len(self._free),
            evictable=self.tree.evictable,
            pinned=self.tree.pinned,
            rows=sum(len(row.slots) - row.lease.length for row in rows),
            granted=sum(len(row.granted) for row in rows),
            total=self.total,
        )

    def check(self) -> None:
        """Assert that every slot is in exactly one place and that pins are those of the rows."""
        self._free.check()
        rows = list(self._rows.values())
        places: dict[int, str] = {}

        def put(slots: Sequence[int], place: str) -> None:
            for slot in slots:
                assert 0 < slot <= self.total, f"{place} holds slot {slot} of 1..{self.total}"
                assert slot not in places, f"slot {slot} is in {places[slot]} and in {place}"
                places[slot] = place

        put(self._free.free(), "the free stack")
        put(self.tree.check(row.lease for row in rows), "the tree")
        for number, row in self._rows.items():
            name = f"row {number}"
            assert row.row == number and not row.closed, f"{name} is closed or misfiled"
            assert len(row.tokens) == len(row.slots), f"{name}: tokens and slots differ in number"
            length = row.lease.length
            assert row.cached <= length <= len(row.tokens), f"{name}: lease of length {length}"
            tokens, slots = self.tree.tokens(row.lease), self.tree.slots(row.lease)
            assert tokens == row.tokens[:length], f"{name}: leased other tokens"
            assert slots == row.slots[:length], f"{name}: leased other slots"
            assert row.lease.node.salt == row.salt, f"{name}: leased in a foreign namespace"
            put(row.slots[length:], f"{name} (private)")
            put(row.granted, f"{name} (granted)")
            assert all(self._drafted[slot] for slot in row.slots[: row.drafted]), (
                f"{name}: {row.drafted} tokens taken for drafted"
            )
        lost = self.total - len(places)
        assert not lost, f"{lost} slots are nowhere, such as {self._missing(places)}"
        vacant = set(self._vacant)
        assert len(vacant) == len(self._vacant) and not vacant & set(self._rows), (
            "a table row is vacant twice, or vacant and open"
        )

    def _missing(self, places: dict[int, str]) -> list[int]:
        return [slot for slot in range(1, self.total + 1) if slot not in places][:8]
