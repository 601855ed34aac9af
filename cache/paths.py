"""Reading a radix tree: its nodes, how a path is followed, what was seen after it.

Knows tokens, salts (namespaces that share nothing) and slot numbers as plain values. Changes
nothing in the tree: pins, growth and eviction are cache/radix.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nlargest

BRANCHES = 4  # continuations told apart at most


class Node:
    """The end of an edge that holds a run of tokens (and their slots, if the tree has any).

    lock: leases that end here or below; a node with lock > 0 is pinned. used: when it was last
    walked, by the tree's clock. hits: how often it was walked. version: rises whenever positions
    in the run move or vanish. queued: the eviction heap holds an entry of it. blocks: of whole
    blocks that end in the run, kept by the tree's BlockLog if it has one. kept: eviction passes it
    over once.
    """

    __slots__ = (
        "blocks",
        "children",
        "hits",
        "kept",
        "lock",
        "parent",
        "queued",
        "salt",
        "serial",
        "slots",
        "tokens",
        "used",
        "version",
    )

    def __init__(
        self, parent: Node | None, salt: str, tokens: list[int], slots: list[int], serial: int
    ) -> None:
        self.parent = parent
        self.salt = salt
        self.tokens = tokens
        self.slots = slots
        self.serial = serial
        self.children: dict[int, Node] = {}
        self.lock = 0
        self.used = 0
        self.hits = 0
        self.version = 0
        self.queued = False
        self.kept = False
        self.blocks: list[bytes] | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """A pinned path: the first `length` tokens from the namespace's top down to the end of `node`.

    Ends with `RadixTree.release`; `RadixTree.graft` turns it into a longer one.
    """

    node: Node
    length: int


def _agree(run: list[int], other: list[int]) -> int:
    """How many leading tokens are equal; the first ones are known to be.

    Halving slices lets list comparison do the work: linear in C instead of a loop in Python.
    """
    low, high = 1, min(len(run), len(other))
    if run[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if run[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def walk(node: Node, tokens: list[int], at: int) -> tuple[Node, int, int]:
    """From the end of `node` follow tokens[at:] as far as the tree goes.

    Returns the node reached, how much of its run was matched, and the position in `tokens`.
    """
    total = len(tokens)
    while at < total:
        child = node.children.get(tokens[at])
        if child is None:
            break
        run = child.tokens
        size = len(run)
        common = 1
        if size > 1:
            part = tokens[at : at + size]
            common = size if part == run else _agree(run, part)
        at += common
        node = child
        if common < size:
            return node, common, at
    return node, len(node.tokens), at


def _recent(nodes: Iterable[Node]) -> list[Node]:
    """The few most recently used of `nodes`, latest first."""
    return nlargest(BRANCHES, nodes, key=lambda node: (node.used, node.serial))


def ahead(node: Node, offset: int, limit: int) -> list[tuple[list[int], int]]:
    """Runs of up to `limit` tokens below position `offset` of `node`, most recently used first."""
    runs: list[tuple[list[int], int]] = []
    if limit <= 0:
        return runs
    waiting: list[tuple[int, int, list[int], Node, int]] = []
    if offset < len(node.tokens):
        waiting.append((-node.used, -node.serial, [], node, offset))
    else:
        for child in _recent(node.children.values()):
            waiting.append((-child.used, -child.serial, [], child, 0))
    heapify(waiting)
    while waiting and len(runs) < BRANCHES:
        _, _, run, at, offset = heappop(waiting)
        hits = at.hits
        run += at.tokens[offset : offset + limit - len(run)]
        while len(run) < limit and at.children:
            at, *others = _recent(at.children.values())
            for other in others:
                heappush(waiting, (-other.used, -other.serial, run.copy(), other, 0))
            run += at.tokens[: limit - len(run)]
        runs.append((run, hits))
    return runs


def as_list(tokens: Sequence[int]) -> list[int]:
    """Runs are lists; a slice of another type would equal none of them."""
    return tokens if isinstance(tokens, list) else list(tokens)


def gather(node: Node | None, top: Node | None) -> list[int]:
    """Slots from below `top` down to `node`."""
    runs = []
    while node is not top:
        assert node is not None
        runs.append(node.slots)
        node = node.parent
    return [slot for run in reversed(runs) for slot in run]


def spell(node: Node | None) -> list[int]:
    """Tokens from the top down to `node`."""
    runs = []
    while node is not None:
        runs.append(node.tokens)
        node = node.parent
    return [token for run in reversed(runs) for token in run]


class Cursor:
    """Follows one growing path through a tree and guesses how it goes on.

    Pins nothing: where the tree changes under it (an edge split or evicted) the cursor notices by
    the node's version and walks again from the top; else a token costs one comparison. A path that
    leaves the tree is tried again from the place where it left, as others may have grown it there.
    """

    __slots__ = ("_at", "_node", "_offset", "_roots", "_salt", "_tokens", "_version")

    def __init__(self, roots: dict[str, Node], salt: str, tokens: Sequence[int]) -> None:
        self._roots = roots
        self._salt = salt
        self._tokens = list(tokens)
        self._node: Node | None = None
        self._version = 0
        self._offset = 0  # matched part of the node's run
        self._at = 0  # matched part of the path
        self._follow()

    def extend(self, tokens: Sequence[int]) -> None:
        """The path has grown by `tokens`."""
        self._tokens += tokens
        self._follow()

    def guess(self, limit: int) -> list[list[int]]:
        """Up to BRANCHES runs of up to `limit` tokens seen after this path, latest used first."""
        self._follow()
        node = self._node
        if node is None or self._at < len(self._tokens):
            return []
        return [run for run, _ in ahead(node, self._offset, limit)]

    def _follow(self) -> None:
        """Bring the place up to date with tree and path."""
        node, tokens = self._node, self._tokens
        if node is None or node.version != self._version:
            node = self._node = self._roots.get(self._salt)
            if node is None:
                return
            self._at = self._offset = 0
            self._version = node.version
        at, offset = self._at, self._offset
        if at == len(tokens):
            return
        run = node.tokens
        if offset < len(run):
            part = tokens[at : at + len(run) - offset]
            if run[offset] != part[0]:
                return
            common = 1 if len(part) == 1 else _agree(run[offset : offset + len(part)], part)
            at += common
            offset += common
        if offset == len(run) and at < len(tokens):
            node, offset, at = walk(node, tokens, at)
        self._node, self._version = node, node.version
        self._at, self._offset = at, offset
