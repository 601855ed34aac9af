"""The device half of a step on a processor: what was drawn is read at once, the rest is Python.

`TorchDevice` describes walking, settling and drafting as tensor operations, so that a GPU need not
wait for the host. Where host and device are the same, each of those operations costs microseconds
and gains nothing: here the same is done on lists, for the rows and tokens that there really are.
Results are those of `TorchDevice`, which stays the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch, Twig, build_batch
from spec_serve.cache.pool import TRASH
from spec_serve.cache.tree import chain
from spec_serve.draft.base import Seen, Trees
from spec_serve.kernels.base import AttentionPlan
from spec_serve.spec.draft_cost import Still
from spec_serve.spec.sampling import RowNoise, choose, pack
from spec_serve.spec.step import DraftRow, Job, Result, TorchDevice
from spec_serve.target.native import NativeTransformer

SILENT = Still()
NONE = torch.empty(0, 0)  # logits of a step that makes none


class HostDevice(TorchDevice):
    """Steps on a processor."""

    @torch.inference_mode()
    def step(self, job: Job) -> Result:
        """See `Device`."""
        begun = perf_counter()
        batch = build_batch(job.twigs)
        plan = self._attention.plan(batch, self.pool.table)
        asked = () if self._drafter is None else self._drafter.taps
        if isinstance(self.model, NativeTransformer) and needs_no_logits(job):
            chosen, taps = self.model.choose(batch, self._layers, plan, asked, self._vocabulary)
            logits = NONE
        else:
            logits, taps = self._logits(job, batch, plan, asked)
            chosen = self._choose(job, logits)
        result = walked(job, batch, chosen.tolist())
        self._write(job, result)
        verified = perf_counter()
        if job.drafting:
            self._grow(job, batch, result, taps)
        drafted = perf_counter()
        if job.score_rows:
            self._score(job, batch, logits, result)
        if job.prompt_rows:
            self._score_prompt(job, batch, logits, result)
        if job.continued:
            self._score_continued(job, batch, logits, result)
        result.verify_us = int((verified - begun) * 1e6)
        result.draft_us = int((drafted - verified) * 1e6)
        return result

    def _logits(
        self, job: Job, batch: TreeBatch, plan: AttentionPlan, asked: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [M, V] and taps; what the host has to do meanwhile is done behind them."""
        out = self.model.forward(batch, self._layers, plan, asked)
        for task in job.meanwhile:
            task()
        logits = out.logits
        if logits.shape[1] > self._vocabulary:
            logits = logits[:, : self._vocabulary]
        return logits, out.taps

    def _choose(self, job: Job, logits: Tensor) -> Tensor:
        """One token per place, [M]."""
        rows = [
            (state, twig.tree, twig.prefix, twig.logits_from)
            for state, twig in zip(job.states, job.twigs, strict=True)
        ]
        return choose(logits, pack(rows, self.pool.device))

    def _write(self, job: Job, result: Result) -> None:
        """The slots of certain nodes, and of the token behind them, into the table."""
        table = self.pool.table.numpy()
        forget = table.shape[1] - 1
        first = 0  # of the row's nodes, among the batch's
        for b, twig in enumerate(job.twigs):
            line, slots, given = table[twig.row], twig.slots, twig.tree.given
            at = twig.prefix
            if given == 1:
                if first not in job.replays:
                    line[at] = slots[0]
            else:
                kept = [i for i in range(given) if first + i not in job.replays]
                line[[at + i for i in kept]] = [slots[i] for i in kept]
            at += given
            for node in result.paths[b]:
                line[at] = slots[node]
                at += 1
            following = job.next_slots[b]
            if following != TRASH and at < forget:
                line[at] = following
            first += len(slots)

    def _grow(self, job: Job, batch: TreeBatch, result: Result, taps: Tensor | None) -> None:
        """Let the drafter see what became certain, and take over the trees it grew."""
        assert self._drafter is not None
        seen = seen_of(job, batch, result, taps)
        growing = job.plan.nodes > 0
        grants = torch.tensor([row.grants for row in job.drafting])
        noise = RowNoise([row.state for row in job.drafting], "cpu") if growing else SILENT
        trees = self._drafter.propose(seen, grants, job.plan, noise)
        if trees is not None:
            result.trees = _listed(job.drafting, trees)


def needs_no_logits(job: Job) -> bool:
    """Whether the likeliest tokens are all that is asked: every row greedy and unedited, nothing
    scored."""
    scored = job.score_rows or job.prompt_rows or job.continued
    return not (scored or job.meanwhile) and all(state.plain for state in job.states)


def walked(job: Job, batch: TreeBatch, drawn: Sequence[int]) -> Result:
    """Each row's accepted guesses and the token behind them: `verify.walk` on lists.

    drawn: the token chosen at each of the batch's nodes with logits.
    """
    logit_of = batch.logit_of.tolist()
    paths: list[list[int]] = []
    bonus: list[int] = []
    first = 0
    for twig in job.twigs:
        tree = twig.tree
        tokens, given = tree.tokens, tree.given
        count = len(tokens)
        at = logit_of[first + given - 1]
        token = drawn[at] if at >= 0 else -2 - at
        path: list[int] = []
        if count > given and token >= 0:
            parents, leaf = tree.parents, given - 1
            # A node comes before its children, and at most one of siblings is right.
            for node in range(given, count):
                if parents[node] == leaf and tokens[node] == token:
                    path.append(node)
                    leaf = node
                    at = logit_of[first + node]
                    token = drawn[at] if at >= 0 else -2 - at
                    if token < 0:
                        break
        paths.append(path)
        bonus.append(token)
        first += count
    return Result(paths, bonus)


def seen_of(job: Job, batch: TreeBatch, result: Result, taps: Tensor | None) -> Seen:
    """Chains of what became certain: known tokens, accepted guesses, the token behind them."""
    starts = batch.node_ptr.tolist()
    twigs: list[Twig] = []
    length: list[int] = []
    source: list[int] = []  # the node before each token, among the batch's; -1 at position 0
    for row in job.drafting:
        b = row.b
        twig, path, first = job.twigs[b], result.paths[b], starts[b]
        following = job.next_tokens[b]
        if following < 0:
            following = result.bonus[b]
        tree, slots = twig.tree, twig.slots
        tokens = [*row.known, *(tree.tokens[node] for node in path), following]
        held = [*row.slots, *(slots[node] for node in path), job.next_slots[b]]
        twigs.append(Twig(twig.row, row.start, chain(tokens), held, len(tokens) - 1))
        length.append(twig.prefix + tree.given + len(path) + 1)
        if taps is not None:
            before = row.start - 1 - twig.prefix
            assert before >= 0 or row.start == 0, "a tapping drafter must see every token"
            ends = range(before, before + len(row.known))
            source += [first + node if node >= 0 else -1 for node in ends]
            source += [first + tree.given - 1, *(first + node for node in path)]
    seen = build_batch(twigs)
    begins = any(row.start == 0 for row in job.drafting)
    features = None
    if taps is not None:
        features = taps.index_select(0, torch.tensor(source).clamp_min_(0))
        if begins:
            features[[i for i, node in enumerate(source) if node < 0]] = 0.0
    return Seen(seen, seen.logits_at, torch.tensor(length), features, begins)


def _listed(
    drafting: Sequence[DraftRow], trees: Trees
) -> dict[int, tuple[list[int], list[int], list[float]]]:
    rows = zip(
        drafting, trees.count.tolist(), trees.tokens.tolist(), trees.parents.tolist(),
        trees.score.float().tolist(), strict=True,
    )  # fmt: skip
    return {
        row.b: (tokens[:count], parents[:count], scores[:count])
        for row, count, tokens, parents, scores in rows
    }
