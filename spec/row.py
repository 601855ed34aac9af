"""A running choice: its tokens, its place in the cache, its guesses, and when it ends.

A row only ever grows by verified tokens; guesses live beside it until a step has judged them. Knows
nothing of devices or of other rows.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spec_serve.draft.base import Guess, Source
from spec_serve.draft.budget import Calibration, Purse
from spec_serve.draft.mix import Candidates, Trust, tree_kind
from spec_serve.spec.admission import EngineInfo, capacity
from spec_serve.spec.constraint import SOURCE, Walk
from spec_serve.spec.request import Reason, Request, TokenLogprob, Usage
from spec_serve.spec.sampling import RowSampling

if TYPE_CHECKING:
    from spec_serve.cache.store import RowKV
    from spec_serve.cache.tree import TokenTree

BEHIND = "/behind"  # ends the kind of guesses that follow forced tokens: apart in the calibration
BEGINNING = 48  # tokens, a little more than a chat template writes of itself


# A device drafter's tree: tokens, parents (-1 = the newest token), log-probabilities of paths.
Grown = tuple[list[int], list[int], list[float]]


class Row:
    """Choice `index` of a request, waiting or running.

    tokens: prompt and everything emitted. kv: its place in the cache while it runs. next_slot: the
    slot granted ahead for the first node of its next twig (0 = none). replay: that first node is
    the last cached token, run again for its logits. drafted: leading tokens with draft K/V. walk:
    its place in the request's constraint, if it has one. owner: the request whose `segment`-th
    generation this is, which is `request` itself for the first; before: usage of the one before.
    kin: alike in rows of one salt and beginning, which are likely to say the same.
    """

    __slots__ = (
        "accepted_prediction", "admitted", "arrived", "before", "cached", "candidates",
        "device_tree", "drafted", "ends", "filed", "first_token", "guessed", "idle", "index", "kin",
        "kv", "last_token", "leader", "limit", "next_slot", "order", "owner", "prompt_len",
        "prompt_scored", "purse", "rejected_prediction", "replay", "request", "rest", "sampling",
        "scored", "segment", "shadow", "shared", "source_of", "sources", "steps", "told",
        "tokens", "tree", "trunk", "trust", "walk", "watch", "watch_from",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        index: int,
        sampling: RowSampling,
        limit: int,
        arrived: float,
        order: int,
        walk: Walk | None = None,
    ) -> None:
        stopping = request.stopping
        self.request = self.owner = request
        self.segment = 0
        self.before: Usage | None = None
        self.index = index
        self.sampling = sampling
        self.tokens: list[int] = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.limit = limit  # emitted tokens at most
        self.ends = stopping.token_ids | (frozenset() if stopping.ignore_eos else stopping.eos)
        self.watch = stopping.watch() if stopping.watch is not None else None
        self.watch_from = stopping.min_tokens
        self.walk = walk
        self.order = order
        self.arrived = arrived
        self.admitted = 0.0
        self.first_token = 0.0
        self.last_token = 0.0
        self.leader: Row | None = None
        self.kv: RowKV | None = None
        self.cached = -1
        self.shared = False
        self.next_slot = 0
        self.replay = False
        self.drafted = 0
        self.steps = 0
        self.sources: list[Source] | None = None
        self.told = 0  # tokens its look-ups know
        self.kin = hash((request.salt, *request.prompt[:BEGINNING]))
        self.filed = 0  # and of these, those that rows beside it can look up
        self.device_tree: Grown | None = None
        self.candidates: Candidates | None = None
        self.tree: TokenTree | None = None
        self.source_of: Sequence[int] = ()
        self.trunk = 0  # tokens the constraint forces next, at the top of the candidates
        self.trust: dict[str, Trust] = {}
        self.shadow: tuple[Guess, int, float] | None = None
        self.guessed: Guess | None = None
        self.purse = Purse()
        self.idle = 0  # times in a row that its look-ups were asked and nothing was verified
        self.rest = 0  # steps for which they are not asked
        self.accepted_prediction = 0
        self.rejected_prediction = 0
        self.prompt_scored: list[TokenLogprob] = []
        self.scored = request.prompt_logprobs is None

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def prefix(self) -> int:
        """Cached tokens before the next twig."""
        assert self.kv is not None
        return len(self.kv.tokens) - self.replay

    def accept(self, new: Sequence[int]) -> tuple[int, Reason | None, int | str | None]:
        """Append verified tokens one by one until something ends the choice.

        Returns how many were taken, the reason if it ended, and the token id or stop string that
        matched. A stop wins over the token limit reached by the same token, and so does a
        constraint that is fulfilled.
        """
        count = 0
        reason: Reason | None = None
        matched: int | str | None = None
        ends, room = self.ends, self.limit - self.emitted
        for token in new:
            count += 1
            if token in ends:
                reason, matched = "stop", token
                break
            if count == room:
                reason = "length"
                break
        taken = new[:count]
        if self.walk is not None:
            count, reason, matched = self._constrained(taken, reason, matched)
            taken = new[:count]
        if self.watch is not None:
            found = self.watch.feed(taken, max(0, self.watch_from - self.emitted - 1))
            if found is not None and (found[0] < count or reason != "stop"):
                count, matched = found
                reason, taken = "stop", new[:count]
        self.tokens += taken
        self.sampling.extend(taken)
        return count, reason, matched

    def _constrained(
        self, new: Sequence[int], reason: Reason | None, matched: int | str | None
    ) -> tuple[int, Reason | None, int | str | None]:
        """Tell the constraint; how many of the tokens are left, and how the choice ended."""
        walk = self.walk
        assert walk is not None
        count = walk.take(new)
        if count < len(new):  # what ended it behind this does not count
            reason = matched = None
        if walk.over and reason != "stop":
            if walk.complete:
                reason = "stop"
            elif not walk.spent and reason is None:
                reason = "error"
            else:
                reason = "length"
        return count, reason, matched

    def collect(
        self,
        calibration: Calibration,
        depth: int,
        limit: int,
        allowed: frozenset[str] | None,
        drafter: str,
        floor: float = 0.0,
    ) -> Candidates | None:
        """Merge what the sources guess now into candidates; None if there is nothing.

        drafter: the name of the device drafter, whose tree (if any) came with the last step.
        floor: chance of being accepted below which a look-up's chain is not followed on.
        """
        candidates = Candidates(floor)
        trunk = self.forced(depth)
        self.trunk, end = len(trunk), candidates.add_certain(trunk, SOURCE)
        if self.device_tree is not None and (allowed is None or drafter in allowed):
            tokens, parents, scores = self.device_tree
            trust = self.trust.get(drafter)
            factor = trust.factor if trust else 1.0
            candidates.add_tree(tokens, parents, scores, drafter, calibration, factor, depth)
        self.guessed = None
        if self.sources:
            self._tell()
            for source in self.sources if depth > self.trunk else ():
                if allowed is not None and source.name not in allowed:
                    continue
                trust = self.trust.get(source.name)
                factor = trust.factor if trust else 1.0
                if trunk:  # what follows the newest token is known: guess what follows that
                    for guess in source.behind(trunk, limit):
                        guess.kind += BEHIND
                        candidates.add_guess(guess, calibration, factor, depth - self.trunk, end)
                    continue
                for guess in source.guess(limit):
                    if self.guessed is None:
                        self.guessed = guess
                    candidates.add_guess(guess, calibration, factor, depth)
        if not candidates.tokens:
            return None
        candidates.settle()
        if self.walk is not None:
            certain = allowed is None or SOURCE in allowed
            candidates = self.walk.prune(candidates, limit, depth if certain else 0)
        return candidates if candidates.tokens else None

    def forced(self, most: int) -> list[int]:
        """Tokens that must come next, `most` at most; none if the request has them not drafted."""
        allowed = self.request.speculation.sources
        if self.walk is None or (allowed is not None and SOURCE not in allowed):
            return []
        return self.walk.forced_run(most)

    def force(self, emitting: bool) -> None:
        """Tell the sampling at which nodes a single token can follow: no logits are needed there,
        unless somebody wants to see them. emitting: something is drawn in this step at all."""
        assert self.walk is not None
        state = self.sampling
        state.masks, state.forced = (), {}
        if emitting and self.request.logprobs is None and self.scored:
            state.forced = self.walk.known(self.source_of)

    def mask(self) -> None:
        """Hand the masks of the step's nodes to the sampling."""
        assert self.walk is not None
        self.sampling.masks = self.walk.masks(self.source_of)

    def _tell(self) -> None:
        """Tell the look-ups what became certain since they were last asked."""
        assert self.sources is not None
        new = self.tokens[self.told :]
        self.told = len(self.tokens)
        if new:
            for source in self.sources:
                source.extend(new)

    def learn(self, calibration: Calibration, path: Sequence[int], given: int) -> None:
        """Tell the calibration which verified guesses were right. path: accepted nodes."""
        candidates, tree = self.candidates, self.tree
        if candidates is None or tree is None:
            return
        right = set(path)
        right.add(given - 1)
        parents = tree.parents
        elder: set[int] = set()
        for guess, source in enumerate(self.source_of):
            node = given + guess
            parent = parents[node]
            if parent in right:
                kind, depth = candidates.kinds[source], candidates.depths[source]
                if kind.endswith(BEHIND):
                    depth -= self.trunk
                self._label(calibration, kind, depth, candidates.chance[source], node in right)
                if parent not in elder:
                    elder.add(parent)
                    calibration.observe(kind.partition(":")[0], depth, node in right)

    def judge(self, calibration: Calibration, name: str, grown: Grown, new: Sequence[int]) -> None:
        """Judge a device drafter's tree of which nothing was verified by the tokens that came."""
        candidates = self.candidates
        if candidates is not None and any(
            candidates.kinds[source].startswith(name) for source in self.source_of
        ):
            return
        tokens, parents, scores = grown
        at = -1
        for depth, right in enumerate(new, start=1):
            children = [i for i, parent in enumerate(parents) if parent == at]
            if not children:
                return
            calibration.observe(name, depth, tokens[children[0]] == right)
            above = scores[at] if at >= 0 else 0.0
            for i in children:
                kind = tree_kind(name, scores[i] - above)
                calibration.observe(kind, depth, tokens[i] == right)
            hits = [i for i in children if tokens[i] == right]
            if not hits:
                return
            at = hits[0]

    def _label(
        self, calibration: Calibration, kind: str, depth: int, expected: float, hit: bool
    ) -> None:
        calibration.observe(kind, depth, hit)
        name = kind.partition(":")[0]
        trust = self.trust.get(name)
        if trust is None:
            trust = self.trust[name] = Trust()
        trust.observe(expected, hit)

    def follow(self, calibration: Calibration, new: Sequence[int]) -> None:
        """Judge what was not verified of a guess by the tokens that came: free labels."""
        if self.shadow is None:
            if self.guessed is None:
                return
            guess, at, trust = self.guessed, 0, 1.0
            if self.source_of:  # the rest of it, if all that was verified was right
                at = len(new) - 1
                if at != len(self.source_of) or list(guess.tokens[:at]) != list(new[:at]):
                    return
                new = new[at:]
            entry = self.trust.get(guess.kind.partition(":")[0])
            if entry is not None:
                trust = entry.factor
        else:
            guess, at, trust = self.shadow
        for token in new:
            if at >= len(guess.tokens):
                self.shadow = None
                return
            chance = calibration.rate(guess.kind, at + 1, guess.probs[at]) * trust
            hit = guess.tokens[at] == token
            self._label(calibration, guess.kind, at + 1, min(chance, 1.0), hit)
            at += 1
            if not hit:
                self.shadow = None
                return
        self.shadow = (guess, at, trust)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the request's own for the first, a hash of both for the others.

    Always in -2^63 .. 2^63-1, so that it fits an int64."""
    if index:
        digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def make_rows(request: Request, info: EngineInfo, now: float, order: int) -> list[Row]:
    """One waiting row per choice; later choices wait until the first has filled the cache."""
    sampling, stopping = request.sampling, request.stopping
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    most = capacity(info) - len(request.prompt)
    limit = most if stopping.max_tokens is None else min(most, stopping.max_tokens)
    rows: list[Row] = []
    # A model may name an end that its head has no row for; it can't be chosen anyway.
    ends = frozenset(i for i in stopping.token_ids | stopping.eos if 0 <= i < info.vocab_size)
    for index in range(request.n):
        state = RowSampling(
            sampling,
            choice_seed(seed, index),
            info.vocab_size,
            request.prompt,
            stopping.min_tokens,
            ends,
        )
        walk = None
        if request.constraint is not None:
            assert request.compiled is not None, "the engine compiles before it makes rows"
            walk = Walk(request.compiled, stopping.eos | stopping.token_ids)
        row = Row(request, index, state, limit, now, order + index, walk)
        row.leader = rows[0] if rows else None
        rows.append(row)
    return rows
