"""A head that makes way for a better one while the engine runs, between two looks at its cache.

Speculation is exact whatever a head says, so nothing but speed changes. The new head takes over the
old one's slots; K/V of drafts that the old one wrote are no longer what the new one would write, so
the prefix cache is dropped of all that no running row stands on. What makes heads better is known
in api/adapt_run.py, how they are loaded in spec/drafting.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from torch import Tensor

from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.draft.base import Drafter, Noise, Plan, Seen, Trees, scratch_slots
from spec_serve.spec.adapt_link import current

log = logging.getLogger("spec_serve.adapt")

LOOK_S = 5.0
"""Seconds between two looks at the folder."""


class ExchangeableHead:
    """A drafter that reads taps, and whoever follows it. For steps that are not recorded.

    load: the drafter of a head's files; ValueError or OSError if they don't fit. exchanged: called
    behind an exchange. The step that exchanges takes as long as loading does.
    """

    def __init__(
        self, drafter: Drafter, folder: Path, load: Callable[[Path], Drafter | None],
        clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        self.name = drafter.name
        self.kv_specs: tuple[KVSpec, ...] = drafter.kv_specs
        self.taps: tuple[int, ...] = drafter.taps
        self.exchanged: Callable[[], object] = lambda: None
        self._now, self._folder, self._load, self._clock = drafter, folder, load, clock
        self._served = current(folder)
        self._next = clock() + LOOK_S
        self._layers: Sequence[LayerKV] = ()
        self._table: Tensor | None = None

    def bind(self, layers: Sequence[LayerKV], table: Tensor) -> None:
        """See draft/base.py."""
        self._layers, self._table = layers, table
        self._now.bind(layers, table)

    def scratch(self, plan: Plan) -> int:
        """See draft/base.py's OwnScratch."""
        return scratch_slots(self._now, plan)

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        """See draft/base.py."""
        if self._clock() >= self._next:
            self._look()
            self._next = self._clock() + LOOK_S
        return self._now.propose(seen, grants, plan, noise)

    def _look(self) -> None:
        """Take over the head the folder points to, if it is another one than before."""
        head = current(self._folder)
        if head is None or head == self._served:
            return
        self._served = head  # one that won't do is not tried again
        try:
            fresh = self._load(head)
        except (ValueError, OSError) as error:
            log.error("adapt: %s is not taken: %s", head.name, error)
            return
        if fresh is None or (fresh.kv_specs, fresh.taps) != (self.kv_specs, self.taps):
            log.error("adapt: %s is a head of other sizes; it can be served after a start", head)
            return
        assert self._table is not None, "a drafter is bound before it proposes"
        fresh.bind(self._layers, self._table)
        self._now = fresh
        self.exchanged()
        log.info("adapt: the head %s is served from now on", head.name)
