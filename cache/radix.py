"""The radix tree: which token paths are cached, in which slots, who stands on them.

Knows tokens, salts (namespaces that share nothing) and slot numbers as plain values; whoever needs
paths only (a router, a look-up drafter) leaves the slots out. Holds pins and evicts the least
recently used. Does not know free slots, rows or tensors (cache/store.py brings them together).
The structure is that of SGLang's RadixAttention (Zheng et al., 2023) with pages of one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from spec_serve.cache.blocks import BlockLog
from spec_serve.cache.paths import Cursor, Lease, Node, ahead, as_list, gather, spell, walk

__all__ = ["Cursor", "Lease", "Node", "RadixTree"]


class RadixTree:
    """Token paths by salt. `size`: tokens held; `pinned`: those of them under a lease.

    Slots are optional, but all or nothing: a tree is either given a slot with every token or none.
    log: hears of every change, from an empty tree on; None = nobody does.
    """

    __slots__ = ("_buried", "_clock", "_heap", "_roots", "_serial", "log", "pinned", "size")

    def __init__(self) -> None:
        self.size = 0
        self.pinned = 0
        self.log: BlockLog | None = None
        self._roots: dict[str, Node] = {}
        # (used, serial, node) of unpinned leaves. Entries are lazy: one that has been walked since
        # is put back when it comes up, one that is no unpinned leaf any more is dropped.
        self._heap: list[tuple[int, int, Node]] = []
        self._buried = 0  # entries of nodes that have left the tree
        self._clock = 0
        self._serial = 0

    # ------------------------------------------------------------------ paths

    def matched(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many leading tokens are cached; pins and touches nothing."""
        root = self._roots.get(salt)
        return 0 if root is None else walk(root, as_list(tokens), 0)[2]

    def match(self, tokens: Sequence[int], salt: str = "") -> Lease:
        """Pin the longest cached prefix of `tokens`, exactly: an edge matched in part is split."""
        self._clock += 1
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = self._node(None, salt, [], [])
        node, offset, length = walk(root, as_list(tokens), 0)
        if offset < len(node.tokens):
            node = self._split(node, offset)
        self._pin(node, None)
        return Lease(node, length)

    def slots(self, lease: Lease) -> list[int]:
        """The slots of the leased path, in order; empty if the tree holds none."""
        return gather(lease.node, None)

    def tokens(self, lease: Lease) -> list[int]:
        """The tokens of the leased path, in order."""
        return spell(lease.node)

    def graft(
        self, lease: Lease, tokens: Sequence[int], slots: Sequence[int] = ()
    ) -> tuple[Lease, list[int]]:
        """Continue the leased path by `tokens`; `lease` ends, the one returned covers all of it.

        Leading tokens that the tree holds already keep the tree's slots: these are returned too, so
        that the caller can use them in place of the first of its own.
        """
        assert not slots or len(slots) == len(tokens), "one slot per token, or none at all"
        self._clock += 1
        top, path = lease.node, as_list(tokens)
        node, offset, at = walk(top, path, 0)
        if offset < len(node.tokens):
            node = self._split(node, offset)
        self._pin(node, top)
        held = gather(node, top)
        more = len(path) - at
        if more:
            if node.children or node.lock > 1 or node.parent is None:
                node = self._child(node, path[at:], list(slots[at:]))
            else:  # ours alone: growing it keeps paths short in nodes
                node.tokens += path[at:]
                node.slots += slots[at:]
            self.size += more
            self.pinned += more
            if self.log is not None:
                self.log.stored(node, more)
        return Lease(node, lease.length + len(path)), held

    def release(self, lease: Lease, keep: int | None = None) -> list[int]:
        """End a lease. Tokens of its path from position `keep` on leave the tree (default: none).

        Where others still stand on them, or have built on them, they stay. Returns the slots of
        those that left.
        """
        self._clock += 1
        clock = self._clock
        freed: list[int] = []
        node, end = lease.node, lease.length
        keep = end if keep is None else keep
        while True:
            assert node.lock > 0, "released more often than leased"
            node.lock -= 1
            node.used = clock
            parent = node.parent
            if parent is None:
                self._drop_if_bare(node)
                return freed
            start = end - len(node.tokens)
            if not node.lock:
                self.pinned -= len(node.tokens)
                if not node.children:
                    if end > keep:
                        freed += self._cut(node, max(0, keep - start))
                    if node.parent is not None:
                        self._queue(node)
            node, end = parent, start

    def insert(self, tokens: Sequence[int], salt: str = "", slots: Sequence[int] = ()) -> int:
        """Make sure that `tokens` are held, unpinned; how many of them already were."""
        lease = self.match(tokens, salt)
        length = lease.length
        lease, _ = self.graft(lease, tokens[length:], slots[length:])
        self.release(lease)
        return length

    # --------------------------------------------------------------- eviction

    def keep(self, tokens: Sequence[int], salt: str = "") -> None:
        """Have what is cached of these passed over once when its turn to be evicted comes.

        A hint, no pin: it goes all the same where nothing else is left, and the next time.
        """
        root = self._roots.get(salt)
        if root is None:
            return
        node, offset, _ = walk(root, as_list(tokens), 0)
        if offset < len(node.tokens):
            node = self._split(node, offset)
        while node.parent is not None:
            node.kept = True
            node = node.parent

    @property
    def evictable(self) -> int:
        """Tokens that nobody has pinned; `evict` can free all of them."""
        return self.size - self.pinned

    def evict(self, count: int) -> list[int]:
        """Drop the `count` least recently used unpinned tokens (or all, if fewer); their slots.

        Leaves go first and from their tail, so what remains is always a tree of prefixes. Cost:
        a heap operation per leaf that goes, whatever the size of the tree.
        """
        freed: list[int] = []
        heap = self._heap
        need = min(count, self.size - self.pinned)
        while need > 0:
            used, _, node = heap[0]
            parent = node.parent
            if parent is None or node.lock or node.children:
                heappop(heap)
                node.queued = False
                self._buried -= parent is None
            elif node.used != used:
                heapreplace(heap, (node.used, node.serial, node))
            elif node.kept:
                node.kept, node.used = False, self._clock
                heapreplace(heap, (node.used, node.serial, node))
            elif len(node.tokens) > need:
                freed += self._cut(node, len(node.tokens) - need)
                need = 0
            else:
                heappop(heap)
                node.queued = False
                need -= len(node.tokens)
                freed += self._cut(node, 0)
                if parent.parent is None:
                    self._drop_if_bare(parent)
                elif not parent.children and not parent.lock:
                    self._queue(parent)
        return freed

    def clear(self) -> list[int]:
        """Drop everything that is not pinned; its slots."""
        log = self.log
        if log is None or self.pinned:
            return self.evict(self.size - self.pinned)
        if self.size:
            log.cleared()
        self.log = None
        try:
            return self.evict(self.size)
        finally:
            self.log = log

    # ---------------------------------------------------------- what comes next

    def continuations(
        self, tokens: Sequence[int], salt: str = "", limit: int = 16
    ) -> list[tuple[list[int], int]]:
        """What the tree has seen after exactly this path: runs of up to `limit` tokens.

        With each, how often the node where it sets off has been walked. A few runs at
        most, the most recently used first. Pins and touches nothing.
        """
        root = self._roots.get(salt)
        if root is None:
            return []
        path = as_list(tokens)
        node, offset, at = walk(root, path, 0)
        return ahead(node, offset, limit) if at == len(path) else []

    def cursor(self, salt: str = "", tokens: Sequence[int] = ()) -> Cursor:
        """A place in this tree that moves with a growing path, `tokens` first."""
        return Cursor(self._roots, salt, tokens)

    # ------------------------------------------------------------------- books

    def check(self, leases: Iterable[Lease] | None = None) -> list[int]:
        """Assert the tree's own consistency; returns all slots it holds.

        leases: if given, exactly these must be what pins the tree.
        """
        ends: dict[int, int] = {}
        if leases is not None:
            for lease in leases:
                ends[id(lease.node)] = ends.get(id(lease.node), 0) + 1
        slots: list[int] = []
        size = pinned = 0
        queued = {id(node) for _, _, node in self._heap}
        dead = sum(node.parent is None for _, _, node in self._heap)
        assert dead == self._buried, f"{dead} dead entries in the heap, {self._buried} counted"
        assert len(queued) == len(self._heap), "a node stands twice in the eviction heap"
        stack = list(self._roots.values())
        for salt, root in self._roots.items():
            assert root.parent is None and not root.tokens and root.salt == salt, "a bad root"
            assert root.children or root.lock, f"namespace {salt!r} is bare and was not dropped"
        while stack:
            node = stack.pop()
            below = sum(child.lock for child in node.children.values())
            assert node.lock >= below >= 0, f"lock {node.lock} above children with {below}"
            if leases is not None:
                found = ends.pop(id(node), 0)
                assert node.lock - below == found, (
                    f"{node.lock - below} leases counted at a node where {found} end"
                )
            if node.parent is not None:
                assert node.tokens, "a node without tokens"
                assert node.salt == node.parent.salt, "a node in a foreign namespace"
                assert node.parent.children.get(node.tokens[0]) is node, "parent and child differ"
                assert len(node.slots) in (0, len(node.tokens)), "tokens and slots differ"
                if not node.lock and not node.children:
                    assert node.queued, "an unpinned leaf that eviction cannot find"
                assert node.queued == (id(node) in queued), "the mark of the heap is wrong"
                size += len(node.tokens)
                pinned += len(node.tokens) if node.lock else 0
                slots += node.slots
            stack += node.children.values()
        assert not ends, "a lease ends at a node that has left the tree"
        assert size == self.size, f"{size} tokens in the tree, {self.size} in the books"
        assert pinned == self.pinned, f"{pinned} tokens pinned, {self.pinned} in the books"
        assert len(slots) in (0, size), "some tokens have slots and some have none"
        return slots

    def paths(self) -> list[tuple[str, list[int]]]:
        """All token paths from the top to a leaf, with their salts: a dump for tests and tools."""
        found = []
        stack: list[tuple[Node, list[int]]] = [(root, []) for root in self._roots.values()]
        while stack:
            node, above = stack.pop()
            path = above + node.tokens
            if node.children:
                stack += [(child, path) for child in node.children.values()]
            elif path:
                found.append((node.salt, path))
        return found

    # ------------------------------------------------------------------- inside

    def _node(self, parent: Node | None, salt: str, tokens: list[int], slots: list[int]) -> Node:
        self._serial += 1
        return Node(parent, salt, tokens, slots, self._serial)

    def _child(self, parent: Node, tokens: list[int], slots: list[int]) -> Node:
        """A new leaf, pinned once."""
        node = self._node(parent, parent.salt, tokens, slots)
        node.lock = node.hits = 1
        node.used = self._clock
        parent.children[tokens[0]] = node
        return node

    def _split(self, node: Node, offset: int) -> Node:
        """Cut an edge in two; the new upper part. `node` stays the lower one: leases end there."""
        parent = node.parent
        assert parent is not None and 0 < offset < len(node.tokens)
        upper = self._node(parent, node.salt, node.tokens[:offset], node.slots[:offset])
        upper.lock, upper.used, upper.hits = node.lock, node.used, node.hits
        upper.kept = node.kept
        del node.tokens[:offset], node.slots[:offset]
        parent.children[upper.tokens[0]] = upper
        upper.children[node.tokens[0]] = node
        node.parent = upper
        node.version += 1
        if self.log is not None:
            self.log.split(upper, node)
        return upper

    def _pin(self, node: Node, top: Node | None) -> None:
        """Lock and touch `node` and what lies above it, up to and without `top`."""
        clock = self._clock
        at: Node | None = node
        while at is not top:
            assert at is not None
            if not at.lock:
                self.pinned += len(at.tokens)
            at.lock += 1
            at.hits += 1
            at.used = clock
            at = at.parent

    def _cut(self, node: Node, keep: int) -> list[int]:
        """Shorten an unpinned leaf to `keep` tokens, to none = out of the tree; the slots freed."""
        freed = node.slots[keep:]
        if self.log is not None:
            self.log.removed(node, keep)
        self.size -= len(node.tokens) - keep
        node.version += 1
        if keep:
            del node.tokens[keep:], node.slots[keep:]
            return freed
        assert node.parent is not None
        del node.parent.children[node.tokens[0]]
        node.parent = None
        if node.queued:
            self._bury()
        return freed

    def _bury(self) -> None:
        """Count a dead heap entry; sweep the heap when the dead are the majority."""
        self._buried += 1
        if self._buried > 64 and self._buried * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].parent is not None]
            heapify(self._heap)
            self._buried = 0

    def _queue(self, node: Node) -> None:
        if not node.queued:
            node.queued = True
            heappush(self._heap, (node.used, node.serial, node))

    def _drop_if_bare(self, root: Node) -> None:
        if not root.children and not root.lock:
            root.version += 1
            del self._roots[root.salt]
