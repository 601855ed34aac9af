"""Device half of a step: forward, choose, walk, settle, draft. It reads nothing back in between.

The host describes the step as a `Job`; what comes back is one small `Result`. The pool's table is
written here, because only here is known which guesses were right. Requests, scheduling and stop
conditions are not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch, Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.draft.base import Drafter, Plan, Trees
from spec_serve.kernels.base import AttentionBackend
from spec_serve.kernels.graphs import Watch, fetch
from spec_serve.spec.graphs import Parts, StepGraphs
from spec_serve.spec.logprobs import score
from spec_serve.spec.nodes import sent
from spec_serve.spec.operations import StepOperations, TorchSteps
from spec_serve.spec.sampling import RowNoise, RowSampling, pack
from spec_serve.spec.seen import DraftRow, Step, seen_by
from spec_serve.spec.verify import Verdict
from spec_serve.target.model import Model


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


__all__ = ["Device", "DraftRow", "Job", "Result", "TorchDevice"]

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
    """Steps on one torch device. `graphs`: those of steps that fit one, None = there are none."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        attention: AttentionBackend,
        drafter: Drafter | None = None,
        vocabulary: int = 0,
        operations: StepOperations | None = None,
    ) -> None:
        """vocabulary: leading ids that may be emitted; 0 = all. operations: None = torch's."""
        self.model = model
        self._vocabulary = vocabulary or model.config.vocab
        self.pool = pool
        self._attention = attention
        self._drafter = drafter
        self._operations = operations or TorchSteps()
        self.graphs: StepGraphs | None = None
        own = len(model.kv_specs)
        self._layers = pool.layers[:own]
        if drafter is not None:
            drafter.bind(pool.layers[own:], pool.table)

    @property
    def parts(self) -> Parts:
        """What graphs are made of."""
        return Parts(
            self.model, self._layers, self.pool, self._attention, self._operations, self._drafter,
            self._vocabulary,
        )  # fmt: skip

    @torch.inference_mode()
    def step(self, job: Job) -> Result:
        """See `Device`."""
        watch = Watch(self.pool.device)
        watch.mark()
        launched = None
        if self.graphs is not None:
            launched = self.graphs.forward(job.twigs, job.next_slots, job.replays, job.states)
        if launched is None:
            batch, logits, taps = self._forward(job)
        else:
            batch, logits, taps = launched.batch, launched.logits, launched.taps
        for task in job.meanwhile:
            task()
        verdict = None
        if launched is not None:
            assert self.graphs is not None
            verdict = self.graphs.judge(launched, job.states, job.depth)
        judged = verdict is not None
        if verdict is None:
            verdict = self._judge(job, batch, logits)
        watch.mark()
        trees = None
        if job.drafting:
            if launched is not None:
                assert self.graphs is not None
                trees = self.graphs.draft(
                    launched, verdict, judged, job.drafting, job.twigs, job.plan, job.depth
                )
            if trees is None:
                trees = self._draft(job, batch, verdict, taps)
        watch.mark()
        result = self._read(job, batch, verdict, trees)
        if job.score_rows:
            self._score(job, batch, logits, result)
        if job.prompt_rows:
            self._score_prompt(job, batch, logits, result)
        if job.continued:
            self._score_continued(job, batch, logits, result)
        result.verify_us, result.draft_us = watch.us(0, 1), watch.us(1, 2)
        if self.graphs is not None:
            self.graphs.between()
        return result

    def _forward(self, job: Job) -> tuple[TreeBatch, Tensor, Tensor | None]:
        """The batch, its logits [M, V] and what the drafter taps."""
        batch = build_batch(job.twigs, self.pool.device)
        plan = self._attention.plan(batch, self.pool.table)
        asked = () if self._drafter is None else self._drafter.taps
        out = self.model.forward(batch, self._layers, plan, asked)
        logits = out.logits
        if logits.shape[1] > self._vocabulary:
            logits = logits[:, : self._vocabulary]
        return batch, logits, out.taps

    def _judge(self, job: Job, batch: TreeBatch, logits: Tensor) -> Verdict:
        """Choose at every node, walk, and write what became certain into the table."""
        device = self.pool.device
        nodes = pack(
            [
                (state, twig.tree, twig.prefix, twig.logits_from)
                for state, twig in zip(job.states, job.twigs, strict=True)
            ],
            device,
        )
        operations = self._operations
        verdict = operations.walk(batch, operations.choose(logits, nodes), job.depth)
        flags: list[int] = []
        if job.replays:
            flags = [0] * len(batch)
            for node in job.replays:
                flags[node] = 1
        next_slots, replayed = sent(device, job.next_slots, flags)
        operations.settle(batch, verdict, next_slots, self.pool.table, replayed if flags else None)
        return verdict

    def _draft(
        self, job: Job, batch: TreeBatch, verdict: Verdict, taps: Tensor | None
    ) -> Trees | None:
        assert self._drafter is not None
        step = Step(job.twigs, job.next_slots, job.next_tokens, job.depth, job.drafting)
        seen = seen_by(step, batch, verdict, taps)
        device = self.pool.device
        rows, scratch = len(job.drafting), len(job.drafting[0].grants)
        (flat,) = sent(device, [slot for row in job.drafting for slot in row.grants])
        grants = flat.view(rows, scratch)
        noise = RowNoise([row.state for row in job.drafting], device)
        return self._drafter.propose(seen, grants, job.plan, noise)

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
        host = fetch(torch.cat(parts))
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
