"""Jobs out of rows, and rows' cache bookkeeping around a step.

For every picked row: its given nodes, the guesses worth verifying, slots for all of them, one slot
ahead for the token to come, and scratch slots for drafting. After the step the accepted ones are
committed and the rest goes back. Knows the store and the drafters' numbers; no events, no threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter

from spec_serve.cache.batch import Twig
from spec_serve.cache.pool import TRASH
from spec_serve.cache.store import KVStore, RowKV
from spec_serve.cache.tree import TokenTree
from spec_serve.draft.base import Drafter, Plan, Source, scratch_slots
from spec_serve.draft.budget import Calibration
from spec_serve.draft.chooser import Chooser
from spec_serve.draft.cost import CostCurve
from spec_serve.draft.mix import Candidates
from spec_serve.spec.continuations import tree_of
from spec_serve.spec.request import Mode
from spec_serve.spec.row import Row
from spec_serve.spec.stakes import Part, Stakes, mean_context
from spec_serve.spec.step import DraftRow, Job, Result

PIECE, JOINED = 16, 8  # tokens of a running row told to others at a time, behind so many known
AHEAD = 8  # slots kept for each running row when another one is admitted

SourceMaker = Callable[[Row], list[Source]]


class Builder:
    """Builds jobs. mode: what "auto" rows get (off = speculation is disabled for all).

    max_nodes: guesses per row and step at most. sources: makes a row's look-ups. retired: told the
    tokens of each finished row and its salt (text worth looking up later).
    """

    def __init__(
        self,
        store: KVStore,
        cost: CostCurve,
        drafter: Drafter | None,
        draft_cost: CostCurve | None,
        sources: SourceMaker,
        retired: Callable[[str, Sequence[int]], None],
        mode: Mode,
        max_nodes: int,
    ) -> None:
        self.store = store
        self.cost = cost
        self.calibration = Calibration()
        self.mode = mode
        self.max_nodes = max_nodes
        self._drafter = drafter
        self._taps = drafter is not None and bool(drafter.taps)
        self._draft_cost = draft_cost
        self._sources = sources
        self._retired = retired
        self._name = drafter.name if drafter is not None else ""
        self._chooser = Chooser(
            cost, draft_cost, self.calibration, self._name, max_nodes, self._taps
        )
        pool = store.pool
        computes = pool is not None and pool.device.type == "cpu"
        self._stakes = Stakes(cost, max_nodes, computes)
        self._built: list[Part] = []  # of the job built last
        self._kin: set[int] = set()  # beginnings of which it has several rows (Row.kin)

    def grow_always(self, depth: int, width: int) -> None:
        """Have the device drafter grow trees of this shape every step, whether it pays or not."""
        nodes = min(self.max_nodes, width * (1 + (depth - 1) * width))
        self._chooser.fixed = Plan(depth, width, nodes)
        self._stakes.bounded = False

    # ---- a row's stay in the cache

    def open(self, row: Row) -> RowKV | None:
        """Match the row's tokens and pin what matched; None if no place is free."""
        salt = row.request.salt
        tokens: Sequence[int] = row.tokens if row.scored else ()
        kv = self.store.open(tokens, salt)
        if kv is not None and self._taps and self.store.drafted_prefix(kv) < len(kv.tokens):
            usable = self.store.drafted_prefix(kv)
            self.store.close(kv)
            kv = self.store.open(tokens[:usable], salt)
        if kv is None:
            return None
        hit = len(kv.tokens)
        row.replay = hit > 0 and (hit == len(row.tokens) or self._taps)
        row.drafted = self.store.drafted_prefix(kv) if self._drafter is not None else 0
        row.next_slot = 0
        row.shared = False
        if row.sources is None and self._speculates(row):
            try:
                row.sources = self._sources(row)
            except Exception:
                self.store.close(kv)
                raise
            row.told = len(row.tokens)
        return kv

    def fits(self, row: Row, cached: int, running: Sequence[Row]) -> bool:
        """True if there is room for a row beside what the running ones are about to need."""
        need = len(row.tokens) - cached + 2
        for other in running:
            assert other.kv is not None
            need += len(other.tokens) - len(other.kv.tokens) + AHEAD
        return not running or need <= self.store.available()

    def share(self, row: Row) -> None:
        """Let others match the row's prompt while it goes on."""
        assert row.kv is not None
        self.store.share(row.kv)
        row.shared = True
        if self._drafter is not None and row.drafted:
            # Where the tree held the tokens already, its slots won, drafted or not.
            usable = self.store.drafted_prefix(row.kv)
            if usable < len(row.kv.tokens):
                row.drafted = min(row.drafted, usable)

    def release(self, row: Row) -> None:
        """Preempt: what the row computed stays in the tree, the row starts over from there."""
        assert row.kv is not None
        self.store.close(row.kv)
        row.kv = None
        row.device_tree = row.candidates = row.tree = None
        row.next_slot, row.source_of = 0, ()
        if not row.scored:
            row.prompt_scored = []

    def retire(self, row: Row) -> None:
        """The row is over: graft its tokens into the tree, give everything else back."""
        if row.kv is not None:
            self.store.close(row.kv)
            row.kv = None
            if row.request.keep:
                self.store.tree.keep(row.request.prompt, row.request.salt)
            if row.sources is not None:
                self._retired(row.request.salt, row.tokens)

    def _mode(self, row: Row) -> Mode:
        if self.mode == "off":
            return "off"
        asked = row.request.speculation.mode
        return self.mode if asked == "auto" else asked

    def _speculates(self, row: Row) -> bool:
        return self._mode(row) != "off" and row.request.speculation.max_nodes != 0

    # ---- building

    def build(self, picked: list[tuple[Row, int]]) -> tuple[Job, list[Row], Row | None]:
        """The job for the picked (row, given nodes), its rows, and the row that got no slots.

        A starved row means nothing was built that can run: undo and make room.
        """
        parts = self._parts(picked)
        plan = self._plan(picked)
        self._kin = set()
        if len(picked) > 1:
            rows_of = Counter(row.kin for row, _ in picked)
            self._kin = {kin for kin, count in rows_of.items() if count > 1}
        job, rows, starved = self._grant(parts, plan)
        if starved is not None and (plan.nodes or any(part.keep for part in parts)):
            self.undo(rows)
            for part in parts:
                part.candidates, part.keep = None, []
            lean = Plan(0, 0, 0)
            job, rows, starved = self._grant(parts, lean)
        self._built = parts
        self._stakes.begin()
        return job, rows, starved

    def _plan(self, picked: Sequence[tuple[Row, int]]) -> Plan:
        """How large the device drafter grows this step."""
        if self._drafter is None:
            return Plan(0, 0, 0)
        rows = [row for row, _ in picked if self._may_draft(row)]
        if not rows:
            return Plan(0, 0, 0)
        if any(self._mode(row) == "max" for row in rows):
            return self._chooser.full()
        return self._chooser.plan(len(rows))

    def _may_draft(self, row: Row) -> bool:
        if self._drafter is None or not self._speculates(row):
            return False
        if not row.first_token and self._mode(row) == "auto" and not self._quick_draft(row):
            return False  # the first token goes out before the draft is run
        if row.purse.held <= 0 and self._mode(row) == "auto":
            return False  # it lost what it had
        allowed = row.request.speculation.sources
        return allowed is None or self._drafter.name in allowed

    def _quick_draft(self, row: Row) -> bool:
        """True if drafting would hardly delay a row's first token."""
        if self._draft_cost is None:
            return True
        lag = len(row.tokens) - row.drafted
        return self._draft_cost.at(lag) + 3 * self._draft_cost.at(1) < 0.25 * self.cost.at(1)

    def _parts(self, picked: Sequence[tuple[Row, int]]) -> list[Part]:
        parts: list[Part] = []
        auto: list[Part] = []
        given = emitting = 0
        stakes, crowd = self._stakes, len(picked)
        context = mean_context(picked)
        least = stakes.least(crowd, context)
        for row, count in picked:
            final = row.prefix + count == len(row.tokens)
            part = Part(row, count, final, None, [])
            parts.append(part)
            given += count
            row.source_of = ()
            row.candidates = None
            if not final:
                continue
            emitting += 1
            if row.request.continuations:
                continue  # the tree of this step is theirs
            if not self._speculates(row):
                continue  # a drafter with taps has grown a tree for it all the same
            if row.sources is None and row.device_tree is None and row.walk is None:
                continue
            if not row.first_token and self._mode(row) == "auto" and not row.forced(1):
                continue  # guesses would only delay the first token
            if (
                (row.rest or row.purse.held < least)
                and row.device_tree is None
                and row.walk is None
                and self._mode(row) == "auto"
            ):
                row.rest = max(row.rest - 1, 0)
                row.guessed = None
                continue
            part.grown = row.device_tree
            part.candidates, limit = self._candidates(row)
            if part.candidates is None:
                stakes.useless(row, crowd)
                continue
            if self._mode(row) == "max":
                part.keep = part.candidates.order()[:limit]
                given += len(part.keep)
            else:
                auto.append(part)
        if auto:
            stakes.share_out(auto, emitting, given, context)
            for part in auto:
                if part.keep:
                    part.row.idle = 0
                else:
                    stakes.useless(part.row, crowd)
        return parts

    def _candidates(self, row: Row) -> tuple[Candidates | None, int]:
        """What the row could have verified, and how many nodes at most."""
        asked = row.request.speculation
        limit = self.max_nodes
        if asked.max_nodes is not None:
            limit = min(limit, asked.max_nodes)
        depth = min(limit, row.limit - row.emitted - 1)
        if depth <= 0:
            return None, 0
        begun = perf_counter()
        floor = 0.0 if self._mode(row) == "max" else self.cost.floor
        found = row.collect(self.calibration, depth, limit, asked.sources, self._name, floor)
        self._stakes.asked((perf_counter() - begun) * 1e3)
        return found, limit

    def _grant(self, parts: list[Part], plan: Plan) -> tuple[Job, list[Row], Row | None]:
        """Slots for every part, and the job made of them."""
        job = Job([], [], [], [], 0, plan=plan)
        rows: list[Row] = []
        twigs, states = job.twigs, job.states
        nodes = 0
        for part in parts:
            row, count = part.row, part.given
            kv = row.kv
            assert kv is not None
            prefix = row.prefix
            given = row.tokens[prefix : prefix + count]
            if part.keep and part.candidates is not None:
                tree, row.source_of = part.candidates.tree(given, part.keep)
                depths = part.candidates.depths
                job.depth = max(job.depth, max(depths[i] for i in part.keep))
                row.candidates = part.candidates
            elif part.final and row.request.continuations:
                tree, chains = tree_of(given, row.request.continuations)
                job.depth = max(job.depth, *map(len, chains))
                job.continued.append((len(twigs), chains))
                row.source_of = ()
            else:
                tree = TokenTree(given, range(-1, count - 1), count)
                row.source_of = ()
            row.tree = tree
            if row.walk is not None:
                row.force(part.final)
                if part.final:
                    job.meanwhile.append(row.mask)
            total = len(tree.tokens)
            held = 1 if row.next_slot and not row.replay else 0
            scratch = self._scratch(row, part, plan)
            granted = self.store.grant(kv, total + 1 - held + max(scratch, 0))
            rows.append(row)
            if granted is None:
                return job, rows, row
            slots = [row.next_slot, *granted[: total - 1]] if held else granted[:total]
            following = granted[total - held]
            scoring = not row.scored
            first = 0 if scoring else count - 1 if part.final else total
            b = len(twigs)
            if row.replay:
                job.replays.append(nodes)
            if scoring:
                assert row.request.prompt_logprobs is not None
                job.prompt_rows.append((b, row.request.prompt_logprobs))
            if row.request.logprobs is not None and part.final:
                job.score_rows.append((b, row.request.logprobs))
            forced = row.sampling.forced
            if forced:
                forced = {count - 1 + node: token for node, token in forced.items()}
            twigs.append(Twig(kv.row, prefix, tree, slots, first, forced))
            states.append(row.sampling)
            job.next_slots.append(following)
            job.next_tokens.append(-1 if part.final else row.tokens[prefix + count])
            nodes += total
            if scratch >= 0:
                self._draft_row(job, row, b, granted[total + 1 - held :])
        return job, rows, None

    def _scratch(self, row: Row, part: Part, plan: Plan) -> int:
        """Slots for growing this row's tree; -1 if it takes no part in drafting."""
        if self._drafter is None:
            return -1
        if self._taps:
            return scratch_slots(self._drafter, plan)
        if plan.nodes and part.final and self._may_draft(row):
            return scratch_slots(self._drafter, plan)
        return -1

    def _draft_row(self, job: Job, row: Row, b: int, grants: list[int]) -> None:
        """What the drafter has to see of this row: certain tokens without draft K/V."""
        twig = job.twigs[b]
        kv = row.kv
        assert kv is not None
        end = twig.prefix + twig.tree.given
        start = row.drafted
        known = row.tokens[start:end]
        cached = len(kv.slots)
        slots = [
            kv.slots[p] if p < cached else twig.slots[p - twig.prefix] for p in range(start, end)
        ]
        job.drafting.append(DraftRow(b, start, known, slots, grants, row.sampling))

    def undo(self, rows: Sequence[Row]) -> None:
        """Give back what `build` granted; the rows are as before."""
        for row in rows:
            if row.kv is not None:
                self.store.commit(row.kv, (), (), (row.next_slot,) if row.next_slot else ())

    # ---- after the step

    def commit(self, row: Row, twig: Twig, path: Sequence[int], job: Job, b: int) -> None:
        """The given nodes and the accepted path join the row; all other slots return."""
        kv = row.kv
        assert kv is not None
        tree, slots = twig.tree, twig.slots
        given, following = tree.given, job.next_slots[b]
        skip = 1 if row.replay else 0
        tokens = list(tree.tokens[skip:given])
        kept = list(slots[skip:given])
        for node in path:
            tokens.append(tree.tokens[node])
            kept.append(slots[node])
        self.store.commit(kv, tokens, kept, (following,))
        row.next_slot = following if following != TRASH else 0
        row.replay = False
        if row.kin in self._kin and row.sources is not None:
            self._tell(row)
        if job.drafting and any(part.b == b for part in job.drafting):
            self.store.mark_drafted([*kv.slots[row.drafted :], following])
            row.drafted = len(kv.tokens) + 1

    def _tell(self, row: Row) -> None:
        """Let those that run beside a row look up what it has written, once that is a piece."""
        begin = max(row.filed, row.prompt_len)
        if len(row.tokens) - begin >= PIECE:
            self._retired(row.request.salt, row.tokens[max(begin - JOINED, 0) :])
            row.filed = len(row.tokens)

    def sources(
        self, row: Row, path: Sequence[int], given: int
    ) -> tuple[dict[str, tuple[int, int]], list[str]]:
        """Per source name, (drafted, accepted) nodes of the verified tree; each guess's name."""
        candidates = row.candidates
        if candidates is None:
            return {}, []
        right = set(path)
        counts: dict[str, tuple[int, int]] = {}
        names = [candidates.kinds[source].partition(":")[0] for source in row.source_of]
        for guess, name in enumerate(names):
            drafted, accepted = counts.get(name, (0, 0))
            counts[name] = (drafted + 1, accepted + (given + guess in right))
        drafted, accepted = counts.get("prediction", (0, 0))
        row.accepted_prediction += accepted
        row.rejected_prediction += drafted - accepted
        return counts, names

    def observe(self, job: Job, result: Result) -> None:
        """Correct the cost curves by what the step took, and settle the rows' bets."""
        if job.score_rows or job.prompt_rows or job.continued:
            return
        if any(twig.tree.given > 1 for twig in job.twigs):
            return
        if self.mode == "off":
            return  # nothing will be guessed
        gain = self._stakes.settle(job, self._built, result)
        if self._drafter is None:
            return
        grown = bool(job.plan.nodes and job.drafting)
        self._chooser.gained(grown or any(part.grown for part in self._built), gain)
        if grown and all(len(row.known) <= 2 for row in job.drafting):
            self._chooser.took(job.plan, len(job.drafting), result.draft_us / 1e3)
        for b, part in enumerate(self._built):
            if part.grown is not None:
                tokens = job.twigs[b].tree.tokens
                new = [*(tokens[node] for node in result.paths[b]), result.bonus[b]]
                part.row.judge(self.calibration, self._name, part.grown, new)
