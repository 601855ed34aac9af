"""What a radix tree holds, told as blocks: hashes of whole runs of `size` tokens from the top on.

Routers that send a prompt to where its beginning is cached think in such blocks. `BlockLog` hears
of every change of a tree and turns it into changes of its set of blocks; hashes lie with the
nodes, so an eviction costs no hashing. Salted namespaces are nobody else's business and are left
out. Knows no wire format; nothing of this runs unless a log is attached to the tree.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from spec_serve.cache.paths import Node

_TOP = hashlib.sha256(b"spec-serve blocks").digest()


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow one another, the first on `parent` (None = a prompt's beginning).

    hashes: below 2^63. tokens: of all blocks, in order.
    """

    hashes: list[int]
    parent: int | None
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that left; what follows a block always leaves with it or before it."""

    hashes: list[int]


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks left."""


Change = Stored | Removed | Cleared


def block_hashes(tokens: list[int], size: int) -> list[int]:
    """Of all whole blocks of a prompt, as a log gives them."""
    made: list[int] = []
    digest = _TOP
    for end in range(size, len(tokens) + 1, size):
        digest = _next(digest, tokens[end - size : end])
        made.append(_number(digest))
    return made


def _next(digest: bytes, tokens: list[int]) -> bytes:
    return hashlib.sha256(digest + array("Q", tokens).tobytes()).digest()


def _number(digest: bytes) -> int:
    """Positive in every language's 64 bits."""
    return int.from_bytes(digest[:8], "big") >> 1


class BlockLog:
    """Changes of the blocks of one tree, in order, until `take` takes them.

    Written by the tree's thread, taken by any one other. changed: called by the tree's thread when
    there is something to take, once until it is taken.
    """

    def __init__(self, size: int = 16) -> None:
        if size < 1:
            raise ValueError(f"block size: must be positive, not {size}")
        self.size = size
        self.changed: Callable[[], None] = _nobody
        self._waiting: deque[Change] = deque()
        self._told = False

    def take(self) -> list[Change]:
        """What has changed since the last time."""
        self._told = False  # first: what is noted from here on calls again
        taken: list[Change] = []
        waiting = self._waiting
        while waiting:
            change = waiting.popleft()
            last = taken[-1] if taken else None
            if type(change) is Removed and type(last) is Removed:
                last.hashes.extend(change.hashes)
            else:
                taken.append(change)
        return taken

    def _note(self, change: Change) -> None:
        self._waiting.append(change)
        if not self._told:
            self._told = True
            self.changed()

    # ------------------------------------------------------------- told by the tree

    def stored(self, node: Node, count: int) -> None:
        """The last `count` tokens of the node's run are new."""
        if node.salt:
            return
        size = self.size
        end = _depth(node)
        whole, before = end // size, (end - count) // size
        if whole == before:
            return
        tokens = _tail(node, end - before * size)
        if node.blocks is None:
            node.blocks = []
        digest = _last(node)
        parent = _number(digest) if digest is not None else None
        digest = digest or _TOP
        hashes: list[int] = []
        for at in range(0, (whole - before) * size, size):
            digest = _next(digest, tokens[at : at + size])
            node.blocks.append(digest)
            hashes.append(_number(digest))
        self._note(Stored(hashes, parent, tokens[: (whole - before) * size]))

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` has taken the first part of the run of `lower`."""
        if lower.blocks:
            start = _depth(upper) - len(upper.tokens)
            mine = (start + len(upper.tokens)) // self.size - start // self.size
            upper.blocks, lower.blocks = lower.blocks[:mine], lower.blocks[mine:]

    def removed(self, node: Node, keep: int) -> None:
        """All but the first `keep` tokens of the node's run are about to leave."""
        if not node.blocks:
            return
        start = _depth(node) - len(node.tokens)
        stay = (start + keep) // self.size - start // self.size
        if stay < len(node.blocks):
            self._note(Removed([_number(digest) for digest in node.blocks[stay:]]))
            del node.blocks[stay:]

    def cleared(self) -> None:
        """All is about to leave, and no part of it is told."""
        self._note(Cleared())


def _nobody() -> None:
    return None


def _depth(node: Node) -> int:
    """Tokens from the top to the end of the node."""
    depth = 0
    at: Node | None = node
    while at is not None:
        depth += len(at.tokens)
        at = at.parent
    return depth


def _tail(node: Node, count: int) -> list[int]:
    """The last `count` tokens of the path to the node's end."""
    parts: list[list[int]] = []
    at: Node | None = node
    while at is not None and count > 0:
        part = at.tokens[-count:] if count < len(at.tokens) else at.tokens
        parts.append(part)
        count -= len(part)
        at = at.parent
    return [token for part in reversed(parts) for token in part]


def _last(node: Node) -> bytes | None:
    """The digest of the last whole block on the path that is known."""
    at: Node | None = node
    while at is not None:
        if at.blocks:
            return at.blocks[-1]
        at = at.parent
    return None
