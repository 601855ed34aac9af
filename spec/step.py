"""Device half of a step: forward, choose, walk, settle, draft. It reads nothing back in between.

The host describes the step as a `Job`; what comes back is one small `Result`. The pool's table is
written here, because only here is known which guesses were right. Requests, scheduling and stop
conditions are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch, Twig, build_batch
from spec_serve.cache.pool import TRASH, KVPool
from spec_serve.cache.tree import TokenTree
from spec_serve.draft.base import Drafter, Plan, Seen, Trees
from spec_serve.kernels.base import AttentionBackend
from spec_serve.spec.logprobs import score
from spec_serve.spec.sampling import RowNoise, RowSampling, choose, pack
from spec_serve.spec.verify import Verdict, walk
from spec_serve.target.model import Model


@dataclass(slots=True)
class DraftRow:
    """One row's part in drafting: batch row `b`; `known` tokens from position `start` on are
    certain and lack draft K/V (slots beside them); `state` and `seed` belong to its noise."""

    b: int
    start: int
    known: Sequence[int]
    slots: Sequence[int]
    grants: Sequence[int]
    state: RowSampling


@dataclass(slots=True)
class Job:
    """One step. twigs[b] is row b; states[b] its sampling state.

    next_slots[b]: slot of the token behind the walk's end (TRASH if none was granted).
    next_tokens[b]: that token where it is known (prompt goes on), else -1. depth: longest guess
    chain. replays: batch nodes whose table entry must stay. score_rows: (batch row, top) of rows
    that want log-probabilities; prompt: of rows whose given nodes are scored too.
    continued: (batch row, chains of its nodes) to be scored from the last given node on.
    meanwhile: what the host has to do before anything is drawn, but not before the forward: a GPU
    runs it at the same time.
    """

    twigs: list[Twig]
    states: list[RowSampling]
    next_slots: list[int]
    next_tokens: list[int]
    depth: int
    replays: list[int] = field(default_factory=list)
    score_rows: list[tuple[int, int]] = field(default_factory=list)
    prompt_rows: list[tuple[int, int]] = field(default_factory=list)
    continued: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    meanwhile: list[Callable[[], None]] = field(default_factory=list)
    drafting: list[DraftRow] = field(default_factory=list)
    plan: Plan = Plan(0, 0, 0)


Scored = list[tuple[int, float, list[tuple[int, float]]]]  # token, logprob, [(token, logprob)]


@dataclass(slots=True)
class Result:
    """What the host learns. paths[b]: accepted guesses as node numbers of row b's own tree, in
    order. bonus[b]: the token chosen behind them (-1: none). trees[b]: (tokens, parents, scores)
    for drafting rows. logprobs[b]: one entry per accepted guess and the bonus."""

    paths: list[list[int]]
    bonus: list[int]
    trees: dict[int, tuple[list[int], list[int], list[float]]] = field(default_factory=dict)
    logprobs: dict[int, Scored] = field(default_factory=dict)
    prompt: dict[int, Scored] = field(default_factory=dict)
    verify_us: int = 0
    draft_us: int = 0


class Device(Protocol):
    """Where steps run."""

    def step(self, job: Job) -> Result:
        """Run one step."""
        ...


class TorchDevice:
    """Steps on one torch device."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        attention: AttentionBackend,
        drafter: Drafter | None = None,
        vocabulary: int = 0,
    ) -> None:
        """vocabulary: leading ids that may be emitted; 0 = all."""
        self.model = model
        self._vocabulary = vocabulary or model.config.vocab
        self.pool = pool
        self._attention = attention
        self._drafter = drafter
        own = len(model.kv_specs)
        self._layers = pool.layers[:own]
        if drafter is not None:
            drafter.bind(pool.layers[own:], pool.table)

    @torch.inference_mode()
    def step(self, job: Job) -> Result:
        """See `Device`."""
        begun = perf_counter()
        batch = build_batch(job.twigs, self.pool.device)
        plan = self._attention.plan(batch, self.pool.table)
        taps = () if self._drafter is None else self._drafter.taps
        out = self.model.forward(batch, self._layers, plan, taps)
        for task in job.meanwhile:
            task()
        logits = out.logits
        if logits.shape[1] > self._vocabulary:
            logits = logits[:, : self._vocabulary]
        nodes = pack(
            [
                (state, twig.tree, twig.prefix, twig.logits_from)
                for state, twig in zip(job.states, job.twigs, strict=True)
            ],
            self.pool.device,
        )
        chosen = choose(logits, nodes)
        verdict = walk(batch, chosen, job.depth)
        self._settle(job, batch, verdict)
        verified = perf_counter()
        trees = self._draft(job, batch, verdict, out.taps) if job.drafting else None
        drafted = perf_counter()
        result = self._read(job, batch, verdict, trees)
        if job.score_rows:
            self._score(job, batch, logits, result)
        if job.prompt_rows:
            self._score_prompt(job, batch, logits, result)
        if job.continued:
            self._score_continued(job, batch, logits, result)
        result.verify_us = int((verified - begun) * 1e6)
        result.draft_us = int((drafted - verified) * 1e6)
        return result

    def _settle(self, job: Job, batch: TreeBatch, verdict: Verdict) -> None:
        """Write the slots of certain nodes, and of the token behind them, into the table."""
        table = self.pool.table
        forget = table.shape[1] - 1
        kept = torch.cat((batch.given, batch.given.new_zeros(1)))
        if job.depth:
            path = verdict.path
            kept[torch.where(path < 0, len(batch), path).reshape(-1)] = 1
        if job.replays:
            kept[torch.tensor(job.replays, device=table.device)] = 0
        at = torch.where(kept[:-1] == 1, batch.positions, forget)
        table[batch.row_ids[batch.row_of], at] = batch.slots
        following = torch.tensor(job.next_slots, device=table.device)
        at = torch.where(following != TRASH, batch.positions[verdict.leaf] + 1, forget)
        table[batch.row_ids, at.clamp_max(forget)] = following

    def _draft(
        self, job: Job, batch: TreeBatch, verdict: Verdict, taps: Tensor | None
    ) -> Trees | None:
        assert self._drafter is not None
        seen = self._seen(job, batch, verdict, taps)
        device = self.pool.device
        grants = torch.tensor([row.grants for row in job.drafting], device=device)
        noise = RowNoise([row.state for row in job.drafting], device)
        return self._drafter.propose(seen, grants, job.plan, noise)

    def _seen(self, job: Job, batch: TreeBatch, verdict: Verdict, taps: Tensor | None) -> Seen:
        """Chains of what became certain: known tokens, accepted guesses, the token behind them.

        How many guesses were accepted is known only on the device, so every chain is as long as it
        can get; what is not used is padding at its end, written to TRASH.
        """
        device = self.pool.device
        width = job.depth + 1
        accepted, leaf = verdict.accepted, verdict.leaf
        path = verdict.path if job.depth else verdict.path.new_full((batch.rows, 1), -1)
        safe = path.clamp_min(0)
        following = torch.tensor(job.next_tokens, device=device)
        following = torch.where(following < 0, verdict.bonus, following)
        column = accepted.unsqueeze(1)
        tail_token = torch.where(path < 0, 0, batch.tokens[safe])
        tail_slot = torch.where(path < 0, TRASH, batch.slots[safe])
        if job.depth:
            tail_token = torch.cat((tail_token, tail_token.new_zeros(batch.rows, 1)), 1)
            tail_slot = torch.cat((tail_slot, tail_slot.new_zeros(batch.rows, 1)), 1)
        tail_token = tail_token.scatter(1, column, following.unsqueeze(1))
        next_slots = torch.tensor(job.next_slots, device=device)
        tail_slot = tail_slot.scatter(1, column, next_slots.unsqueeze(1))
        twigs: list[Twig] = []
        source: list[int] = []
        last: list[int] = []
        for row in job.drafting:
            known, deepest = len(row.known), width
            tokens = [*row.known, *([0] * deepest)]
            tree = TokenTree(tokens, range(-1, len(tokens) - 1), len(tokens))
            slots = [*row.slots, *([TRASH] * deepest)]
            last.append(len(source) + known)
            source += [-1] * known
            source += range(row.b * width, row.b * width + deepest)
            twigs.append(Twig(job.twigs[row.b].row, row.start, tree, slots, len(tokens)))
        chain = build_batch(twigs, device)
        index = torch.tensor(source, device=device)
        picked = index.clamp_min(0)
        tokens_ = torch.where(index < 0, chain.tokens, tail_token.reshape(-1)[picked])
        slots_ = torch.where(index < 0, chain.slots, tail_slot.reshape(-1)[picked])
        rows = torch.tensor([row.b for row in job.drafting], device=device)
        at = torch.tensor(last, device=device) + accepted[rows]
        seen = replace(chain, tokens=tokens_, slots=slots_, twig_slots=slots_, logits_at=at)
        length = batch.positions[leaf[rows]] + 2
        features = None
        if taps is not None:
            features = self._features(job, batch, verdict, chain, taps)
        begins = any(row.start == 0 for row in job.drafting)
        return Seen(seen, at, length, features, begins)

    def _features(
        self, job: Job, batch: TreeBatch, verdict: Verdict, chain: TreeBatch, taps: Tensor
    ) -> Tensor:
        """Taps of each seen token's predecessor; zeros where there is none (position 0)."""
        device = taps.device
        width = job.depth + 1
        # Nodes at the end of which each tail token stands: last given node, then the path.
        ends = batch.node_ptr[:-1] + torch.tensor(
            [twig.tree.given - 1 for twig in job.twigs], device=device
        )
        before = ends.unsqueeze(1)
        if job.depth:
            before = torch.cat((before, verdict.path.clamp_min(0)), 1)  # [B, width]
        source: list[int] = []
        flat: list[int] = []
        start_of = batch.node_ptr.tolist()
        for row in job.drafting:
            twig = job.twigs[row.b]
            for position in range(row.start, row.start + len(row.known)):
                node = position - 1 - twig.prefix
                assert node >= 0 or position == 0, "a tapping drafter must see every token"
                source.append(start_of[row.b] + node if node >= 0 else -1)
                flat.append(-1)
            source += [-1] * width
            flat += range(row.b * width, (row.b + 1) * width)
        direct = torch.tensor(source, device=device)
        tail = torch.tensor(flat, device=device)
        node_index = torch.where(tail < 0, direct, before.reshape(-1)[tail.clamp_min(0)])
        assert node_index.shape[0] == len(chain)
        gathered = taps[node_index.clamp_min(0)]
        return torch.where((node_index < 0).unsqueeze(1), 0, gathered)

    def _read(self, job: Job, batch: TreeBatch, verdict: Verdict, trees: Trees | None) -> Result:
        """The step's one copy from device to host."""
        rows, depth = batch.rows, job.depth
        parts = [verdict.bonus, verdict.accepted]
        if depth:
            parts.append((verdict.path - batch.node_ptr[:-1].unsqueeze(1)).reshape(-1))
        if trees is not None:
            scores = trees.score.float().contiguous().view(torch.int32).to(torch.int64)
            parts += [trees.count, trees.tokens.reshape(-1), trees.parents.reshape(-1)]
            parts.append(scores.reshape(-1))
        host = torch.cat(parts).cpu()
        values = host.tolist()
        bonus, accepted = values[:rows], values[rows : 2 * rows]
        at = 2 * rows
        paths: list[list[int]] = []
        for b in range(rows):
            paths.append(values[at : at + accepted[b]])
            at += depth
        result = Result(paths, bonus)
        if trees is not None:
            drafting, grown = trees.tokens.shape
            counts = values[at : at + drafting]
            at += drafting
            size = drafting * grown
            tokens, parents = values[at : at + size], values[at + size : at + 2 * size]
            bits = host[at + 2 * size :].to(torch.int32).view(torch.float32).tolist()
            for i, row in enumerate(job.drafting):
                part = slice(i * grown, i * grown + counts[i])
                result.trees[row.b] = (tokens[part], parents[part], bits[part])
        return result

    def _score(self, job: Job, batch: TreeBatch, logits: Tensor, result: Result) -> None:
        """Log-probabilities of accepted guesses and bonus of the rows that want them."""
        logit_of, node_ptr = batch.logit_of.tolist(), batch.node_ptr.tolist()
        for b, top in job.score_rows:
            if result.bonus[b] < 0:
                continue
            twig, path = job.twigs[b], result.paths[b]
            nodes = [twig.tree.given - 1, *path]
            tokens = [*(twig.tree.tokens[node] for node in path), result.bonus[b]]
            at = [logit_of[node_ptr[b] + node] for node in nodes]
            result.logprobs[b] = _scored(logits, at, tokens, top)

    def _score_prompt(self, job: Job, batch: TreeBatch, logits: Tensor, result: Result) -> None:
        """Log-probabilities of the prompt tokens that follow this step's given nodes."""
        logit_of, node_ptr = batch.logit_of.tolist(), batch.node_ptr.tolist()
        for b, top in job.prompt_rows:
            tree = job.twigs[b].tree
            tokens = list(tree.tokens[1 : tree.given])
            if job.next_tokens[b] >= 0:
                tokens.append(job.next_tokens[b])
            at = [logit_of[node_ptr[b] + node] for node in range(len(tokens))]
            result.prompt[b] = _scored(logits, at, tokens, top)

    def _score_continued(self, job: Job, batch: TreeBatch, logits: Tensor, result: Result) -> None:
        """Log-probabilities of each chain's tokens, one chain after the other."""
        logit_of, node_ptr = batch.logit_of.tolist(), batch.node_ptr.tolist()
        for b, chains in job.continued:
            tree = job.twigs[b].tree
            nodes = [node for chain in chains for node in chain]
            tokens = [tree.tokens[node] for node in nodes]
            at = [logit_of[node_ptr[b] + tree.parents[node]] for node in nodes]
            result.prompt[b] = _scored(logits, at, tokens, 0)


def _scored(logits: Tensor, at: list[int], tokens: list[int], top: int) -> Scored:
    if not tokens:
        return []
    device = logits.device
    own, ids, values = score(
        logits, torch.tensor(at, device=device), torch.tensor(tokens, device=device), top
    )
    return [
        (token, lp, list(zip(i, v, strict=True)))
        for token, lp, i, v in zip(tokens, own.tolist(), ids.tolist(), values.tolist(), strict=True)
    ]
