"""Engines around tiny models, and drafts that are right in chosen ways; used by many tests.

The cost curve given to these engines is flat, so that "auto" verifies every guess it has: tests
want speculation to happen. Imported by tests only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch, Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import chain
from spec_serve.draft.base import Drafter
from spec_serve.draft.cost import CostCurve
from spec_serve.draft.standalone import StandaloneDrafter
from spec_serve.kernels.reference import TorchAttention
from spec_serve.spec.assemble import EngineOptions, assemble
from spec_serve.spec.completion import Completion
from spec_serve.spec.engine import Engine
from spec_serve.spec.grammar import Spelling
from spec_serve.spec.request import (
    Constraint,
    Delta,
    Event,
    Finished,
    Request,
    Sampling,
    Speculation,
    Stopping,
)
from spec_serve.target.model import Transformer, load_model
from tests.tiny import MemoryCheckpoint, noisy_copy, tiny_checkpoint, tiny_model

FLAT = [(1, 1.0), (1024, 1.0001)]
# A whole model that drafts; known, as timing one takes longer than most tests.
DRAFTS = [(1, 1.5), (16, 1.5001)]
_ids = count()


def _checkpoint(family: str) -> MemoryCheckpoint:
    """The family "shallow" is a llama of one layer, for tests where what it says is no matter.

    Its K/V depend on a token and its position alone, so it can't show that they are of another
    path: tests of exactness need deeper ones.
    """
    if family == "shallow":
        return tiny_checkpoint("llama", num_hidden_layers=1)
    return tiny_checkpoint(family)


@cache
def target(family: str = "llama") -> Transformer:
    """The tiny target T."""
    return load_model(_checkpoint(family), torch.float32, "cpu")


@cache
def near(family: str = "llama") -> Transformer:
    """T plus small noise: proposals are right now and then."""
    return load_model(noisy_copy(_checkpoint(family), 0.25), torch.float32, "cpu")


@cache
def far(family: str = "llama") -> Transformer:
    """Unrelated random weights: nearly everything is rejected."""
    return tiny_model(family, seed=99)


class Swapped(StandaloneDrafter):
    """Right with its `place`-th choice only (0 = the first): its logits trade places."""

    place = 1

    def _forward(self, batch: TreeBatch, state: Tensor | None = None) -> tuple[Tensor, None]:
        logits, _ = super()._forward(batch, state)
        logits = logits.clone()
        value, index = logits.topk(self.place + 1)
        logits.scatter_(1, index[:, :1], value[:, -1:])
        logits.scatter_(1, index[:, -1:], value[:, :1])
        return logits, None


def drafter(kind: str, family: str = "llama") -> Drafter | None:
    """None for "none" and "lookup"; SELF, NEAR, FAR, SECOND or THIRD otherwise."""
    attention = TorchAttention(exact=True)
    match kind:
        case "self":
            return StandaloneDrafter(target(family), attention)
        case "near":
            return StandaloneDrafter(near(family), attention)
        case "far":
            return StandaloneDrafter(far(family), attention)
        case "second" | "third":
            made = Swapped(target(family), attention)
            made.place = 1 if kind == "second" else 2
            return made
        case _:
            return None


def engine(
    kind: str = "none",
    *,
    family: str = "llama",
    model: Transformer | None = None,
    draft: Drafter | None = None,
    depth: int = 4,
    width: int = 1,
    nodes: int = 12,
    kv_tokens: int = 4096,
    max_rows: int = 8,
    max_context: int = 0,
    speculation: str = "auto",
    step_tokens: int = 512,
    lookup: bool | None = None,
    spelling: Spelling | None = None,
) -> Engine:
    """An engine on T with the named draft; device drafts grow depth x width trees every step."""
    options = EngineOptions(
        target="tiny",
        draft=kind,
        kv_tokens=kv_tokens,
        max_rows=max_rows,
        max_context=max_context,
        max_nodes=nodes,
        speculation=speculation,
        step_tokens=step_tokens,
    )
    drafts = draft or drafter(kind, family)
    made = assemble(
        model or target(family),
        options,
        drafter=drafts,
        lookup=kind == "lookup" if lookup is None else lookup,
        cost=CostCurve(FLAT),
        draft_cost=CostCurve(DRAFTS) if isinstance(drafts, StandaloneDrafter) else None,
        spelling=spelling,
    )
    made.builder.grow_always(depth, width)
    return made


def request(
    prompt: Sequence[int],
    max_tokens: int = 32,
    *,
    speculation: Speculation | None = None,
    min_tokens: int = 0,
    eos: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    n: int = 1,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    salt: str = "",
    watch: Callable[[], object] | None = None,
    constraint: Constraint | None = None,
    **sampling: object,
) -> Request:
    """A request with a fresh id; further keywords are Sampling's."""
    return Request(
        id=f"r{next(_ids)}",
        prompt=list(prompt),
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
        stopping=Stopping(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            eos=frozenset(eos),
            token_ids=frozenset(stop_ids),
            ignore_eos=ignore_eos,
            watch=watch,  # type: ignore[arg-type]
        ),
        speculation=speculation or Speculation(),
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        salt=salt,
        constraint=constraint,
    )


def run(on: Engine, *requests: Request) -> list[Completion]:
    """Run to the end; the books must balance afterwards."""
    done = on.generate(list(requests))
    on.store.check()
    return done


def tokens(
    on: Engine, prompt: Sequence[int], max_tokens: int = 32, **keywords: object
) -> list[int]:
    """The ids one request yields."""
    (done,) = run(on, request(prompt, max_tokens, **keywords))  # type: ignore[arg-type]
    assert done.error is None, done.error
    return done.tokens


def prompts(count_: int, low: int = 4, high: int = 40, seed: int = 0) -> list[list[int]]:
    """Random prompts of letters with some repetition in them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count_):
        length = int(torch.randint(low, high + 1, (1,), generator=generator))
        part = torch.randint(0, 256, (length,), generator=generator).tolist()
        made.append(part + part[: length // 2] if length > 8 else part)
    return made


PROMPT = prompts(1, 20, 24, seed=7)[0]


@cache
def reference(max_tokens: int = 40) -> list[int]:
    """OFF's greedy ids after PROMPT."""
    return tokens(engine(), PROMPT, max_tokens)


def unique(start: int, ids: Sequence[int]) -> int:
    """The first index from `start` on whose id has not occurred before it."""
    return next(i for i in range(start, len(ids)) if ids[i] not in ids[:i])


def logits_after(ids: Sequence[int]) -> torch.Tensor:
    """The target's logits for the token after `ids`, by a plain forward."""
    model = target()
    n = len(ids)
    pool = KVPool(model.kv_specs, n, 1, n)
    batch = build_batch([Twig(0, 0, chain(ids), range(1, n + 1), n - 1)])
    plan = TorchAttention().plan(batch, pool.table)
    return model.forward(batch, pool.layers, plan).logits[0]


def finish(on: Engine, most: int = 3000) -> dict[str, list[Event]]:
    """Step until nothing is left; the books balance after every step. Events by request."""
    told: dict[str, list[Event]] = {}
    for _ in range(most):
        if on.idle():
            break
        for event in on.step():
            told.setdefault(event.request.id, []).append(event)
        on.store.check()
    assert on.idle(), "no progress"
    books = on.store.books()
    assert books.pinned == books.rows == books.granted == 0
    return told


def ids(events: Sequence[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


def end(events: Sequence[Event]) -> Finished:
    (made,) = (event for event in events if isinstance(event, Finished))
    return made
