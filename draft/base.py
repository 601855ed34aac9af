"""What a drafter is: guesses about what comes next, as a scored tree per row.

Two kinds exist. A `Drafter` runs on the device inside the step, right after verification, and may
keep K/V in the shared slots. A `Source` runs on the host between two steps and only looks tokens up
(draft/lookup.py). Neither knows how its guesses are verified, and nobody asks which one is running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import KVSpec, LayerKV


@dataclass(slots=True)
class Seen:
    """What a step made certain for B drafting rows, as a ragged chain per row.

    batch: the tokens whose draft K/V is to be (re)computed, the newest one last; nodes behind it
        are padding (slot TRASH). Position 0 is included when the row begins. The table of the pool
        already covers all of a row's tokens up to the newest one.
    last: [B] node index (among the batch's nodes) of each row's newest token.
    length: [B] tokens of the row, the newest one included.
    taps: [N, taps * H] the target's tapped features of each node's *predecessor*, or None.
    begins: some chain may start at position 0 (known on the host).
    """

    batch: TreeBatch
    last: Tensor
    length: Tensor
    taps: Tensor | None
    begins: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """How large a drafter may grow its trees this step: levels, nodes kept per level, nodes."""

    depth: int
    width: int
    nodes: int


class Noise(Protocol):
    """Position-keyed Gumbel noise of the drafting rows, the same the target will use."""

    def add(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ids: Tensor | None = None
    ) -> Tensor:
        """Scale logits [K, V] by each row's temperature and add its noise for the token at
        `positions` [K]; rows [K] index the drafting rows 0..B-1. Greedy rows stay as they are.
        ids: [V] the target's id of each column, None = 0..V-1."""
        ...


@dataclass(slots=True)
class Trees:
    """One tree per drafting row; G = nodes per row. The root (newest token) is not stored.

    tokens: [B, G]. parents: [B, G] index in 0..G-1 of the parent, -1 = the root; parents precede
    children. score: [B, G] estimated log-probability that the node is accepted. count: [B] nodes
    that are meant (the rest is padding).
    """

    tokens: Tensor
    parents: Tensor
    score: Tensor
    count: Tensor


class Drafter(Protocol):
    """A model that drafts on the device.

    kv_specs: layers it adds to every slot, () for none. taps: target boundaries it reads. A drafter
    with taps sees every token of every row; one without may be skipped and catches up later.
    name: the source name its nodes are reported and calibrated under.
    """

    name: str
    kv_specs: tuple[KVSpec, ...]
    taps: tuple[int, ...]

    def bind(self, layers: Sequence[LayerKV], table: Tensor) -> None:
        """Hand over the pool's tensors of this drafter's layers, once, before the first step."""
        ...

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        """Compute the draft K/V of `seen`, then grow a tree below each row's newest token.

        grants: [B, G'] scratch slots for the K/V of grown nodes. plan.nodes == 0: only the K/V is
        wanted; returns None.
        """
        ...


@runtime_checkable
class OwnScratch(Protocol):
    """A drafter that does not grow level by level and says itself how many slots it writes."""

    def scratch(self, plan: Plan) -> int:
        """Slots needed to draft by this plan."""
        ...


def scratch_slots(drafter: Drafter, plan: Plan) -> int:
    """Slots to grant a row whose tree `drafter` grows by `plan`: one per expanded node."""
    if isinstance(drafter, OwnScratch):
        return drafter.scratch(plan)
    return max(0, plan.depth - 1) * plan.width


@dataclass(slots=True)
class Guess:
    """A host-side guess: a chain of tokens following the newest token.

    probs[i]: the source's own estimate that token i is right given that those before it are.
    kind: what the estimate is calibrated by (source name and e.g. a match-length class).
    """

    tokens: Sequence[int]
    probs: Sequence[float]
    kind: str


class Source(Protocol):
    """A look-up of one row; the engine tells it each certain token once, in order."""

    name: str

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens are certain now (prompt first, then what was emitted)."""
        ...

    def guess(self, limit: int) -> list[Guess]:
        """Chains of at most `limit` tokens that may follow the newest token; best first."""
        ...

    def behind(self, ahead: Sequence[int], limit: int) -> list[Guess]:
        """Chains that may follow once the tokens `ahead` have, which are as good as certain.

        Changes nothing: they aren't told before they have been emitted."""
        ...
