"""What changes in the prefix cache, numbered and kept for a while, for subscribers in this process.

A `Feed` lives in the loop's thread. Who comes late, or has fallen behind what is kept, gets the
whole state first. How batches look on a wire is the business of who sends them (api/kv_events.py
on ZMQ, api/vllm_grpc.py). Knows blocks, no tokenizer and no sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import islice

from spec_serve.api.server_settings import BLOCK_TOKENS
from spec_serve.cache.blocks import Change, Cleared, Removed, Stored

log = logging.getLogger("spec_serve.kv_events")

KEPT = 10_000  # batches, as many as vLLM keeps


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes that belong together. seq: from 1, gapless. at: seconds since the epoch.

    snapshot: the state after batch `seq` instead of that batch itself.
    """

    seq: int
    at: float
    changes: list[Change]
    snapshot: bool = False


class Feed:
    """Batches of one engine's cache. block_tokens: of a block. listeners: told of each batch."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS, kept: int = KEPT) -> None:
        self.block_tokens = block_tokens
        self.last = 0  # seq of the newest batch
        self.listeners: list[Callable[[Batch], None]] = []
        self._kept: deque[Batch] = deque(maxlen=kept)
        self._held: dict[int, tuple[int | None, list[int]]] = {}  # block -> parent, tokens
        self._more = asyncio.Event()

    def __len__(self) -> int:
        """Blocks that are held."""
        return len(self._held)

    @property
    def kept(self) -> int:
        """How many of the newest batches can be had again."""
        return len(self._kept)

    def take(self, changes: list[Change]) -> None:
        """Number what a link tells (EngineLink.cache_observers)."""
        self.last += 1
        batch = Batch(self.last, time.time(), changes)
        for change in changes:
            self._apply(change)
        self._kept.append(batch)
        for tell in self.listeners:
            tell(batch)
        self._more.set()
        self._more = asyncio.Event()

    def _apply(self, change: Change) -> None:
        size, held = self.block_tokens, self._held
        match change:
            case Stored(hashes, parent, tokens):
                for i, block in enumerate(hashes):
                    held[block] = parent, tokens[i * size : (i + 1) * size]
                    parent = block
            case Removed(hashes):
                for block in hashes:
                    held.pop(block, None)
            case Cleared():
                held.clear()

    def blocks(self) -> set[int]:
        """The hashes of all blocks that are held."""
        return set(self._held)

    def since(self, seq: int) -> list[Batch] | None:
        """Batches from `seq` on; None if they are not kept any more, or were never made."""
        first = self.last + 1 - len(self._kept)
        if not first <= seq <= self.last + 1:
            return None
        return list(islice(self._kept, seq - first, None))

    def snapshot(self) -> Batch:
        """All that is held, parents before what follows them."""
        changes: list[Change] = [Cleared()]
        run: Stored | None = None
        for block, (parent, tokens) in self._held.items():
            if run is not None and parent == run.hashes[-1]:
                run.hashes.append(block)
                run.tokens.extend(tokens)
            else:
                run = Stored([block], parent, list(tokens))
                changes.append(run)
        return Batch(self.last, time.time(), changes, snapshot=True)

    async def subscribe(self, start: int = 0) -> AsyncIterator[Batch]:
        """Batches from `start` on, without end; first the whole state where they are not kept.

        start 0: the state of this moment, then what changes.
        """
        following = start
        while True:
            more = self._more
            batches = self.since(following) if following else None
            if batches is None:
                batches = [self.snapshot()]
            for batch in batches:
                yield batch
                following = batch.seq + 1
            if following > self.last:
                await more.wait()
