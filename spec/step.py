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
from spec_serve.spec.draft_graph import packed
from spec_serve.spec.graphs import Launched, Parts, StepGraphs
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


@dataclass(frozen=True, slots=True)
class Ran:
    """A forward: its batch, logits [M, V] and what the drafter taps, [N, T * H]."""

    batch: TreeBatch
    logits: Tensor
    taps: Tensor | None


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
        ran = self._launch(job) or self._forward(job)
        for task in job.meanwhile:
            task()
        verdict: Verdict | None = None
        if isinstance(ran, Launched) and self._graphs.judge(ran, job.states, job.depth):
            told = ran.told
        else:
            verdict = self._judge(job, ran.batch, ran.logits)
            told = _told(verdict)
        watch.mark()
        trees = self._guessed(job, ran, verdict) if job.drafting else None
        watch.mark()
        result = self._read(job, told, trees)
        if job.score_rows:
            self._score(job, ran.batch, ran.logits, result)
        if job.prompt_rows:
            self._score_prompt(job, ran.batch, ran.logits, result)
        if job.continued:
            self._score_continued(job, ran.batch, ran.logits, result)
        result.verify_us, result.draft_us = watch.us(0, 1), watch.us(1, 2)
        if self.graphs is not None:
            self.graphs.between()
        return result

    @property
    def _graphs(self) -> StepGraphs:
        assert self.graphs is not None, "nothing was launched without graphs"
        return self.graphs

    def _launch(self, job: Job) -> Launched | None:
        if self.graphs is None:
            return None
        return self.graphs.forward(job.twigs, job.next_slots, job.replays, job.states)

    def _forward(self, job: Job) -> Ran:
        batch = build_batch(job.twigs, self.pool.device)
        plan = self._attention.plan(batch, self.pool.table)
        asked = () if self._drafter is None else self._drafter.taps
        out = self.model.forward(batch, self._layers, plan, asked)
        logits = out.logits
        if logits.shape[1] > self._vocabulary:
            logits = logits[:, : self._vocabulary]
        return Ran(batch, logits, out.taps)

    def _guessed(self, job: Job, ran: Ran | Launched, verdict: Verdict | None) -> Tensor | None:
        """The drafter's trees, packed. verdict: None = a graph left it."""
        if isinstance(ran, Launched):
            drafting, depth = job.drafting, job.depth
            made = self._graphs.draft(ran, verdict, drafting, job.twigs, job.plan, depth)
            if made is not None:
                return made
            verdict = verdict or ran.verdict(depth)
        assert verdict is not None
        trees = self._draft(job, ran.batch, verdict, ran.taps)
        return None if trees is None else packed(trees)

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

    def _read(self, job: Job, told: Tensor, trees: Tensor | None) -> Result:
        """The step's one copy from device to host. told: [B, 3 + D] bonus, accepted, leaf and path
        of each row; trees: the drafting rows', packed."""
        rows, wide = told.shape
        parts = [told.reshape(-1)]
        if trees is not None:
            parts.append(trees.reshape(-1))
        host = fetch(torch.cat(parts) if len(parts) > 1 else parts[0])
        values = host[: rows * wide].tolist()
        paths: list[list[int]] = []
        first = 0  # of the row's nodes, among the batch's
        for b, twig in enumerate(job.twigs):
            at = b * wide + 3
            accepted = values[at - 2]
            paths.append([node - first for node in values[at : at + accepted]])
            first += len(twig.slots)
        result = Result(paths, values[::wide])
        if trees is not None:
            grown = (trees.shape[1] - 1) // 3
            held = host[rows * wide :].view(trees.shape)
            scores = held[:, 1 + 2 * grown :].to(torch.int32).view(torch.float32).tolist()
            for row, line, score in zip(job.drafting, held.tolist(), scores, strict=True):
                count = line[0]
                tokens, parents = line[1 : 1 + count], line[1 + grown : 1 + grown + count]
                result.trees[row.b] = (tokens, parents, score[:count])
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


def _told(verdict: Verdict) -> Tensor:
    """[B, 3 + D]: bonus, accepted, leaf, path."""
    ends = torch.stack((verdict.bonus, verdict.accepted, verdict.leaf), 1)
    return torch.cat((ends, verdict.path), 1) if verdict.path.shape[1] else ends


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
