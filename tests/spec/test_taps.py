"""The seam for neural heads: a drafter with taps and its own K/V sees every token exactly once.

The test drafter files each tapped feature under its successor's slot and, at every step, reads the
row's whole history back through the table and compares it with a plain forward of the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool, KVSpec, LayerKV
from spec_serve.cache.tree import chain
from spec_serve.draft.base import Noise, Plan, Seen, Trees
from spec_serve.kernels.cpu.attention import NativeAttention
from spec_serve.kernels.reference import TorchAttention
from spec_serve.spec.request import Speculation
from spec_serve.target.model import Model
from spec_serve.target.native import NativeTransformer, load_native
from tests.engines import engine, prompts, request, run, target, tokens
from tests.tiny import tiny_checkpoint

TAPS = (1, 3)


def forward(ids: Sequence[int], model: Model) -> tuple[Tensor, Tensor]:
    """Taps [n, 2H] and logits [n, V] of a plain forward."""
    n = len(ids)
    pool = KVPool(model.kv_specs, n, 1, n)
    batch = build_batch([Twig(0, 0, chain(ids), range(1, n + 1), 0)])
    attention = NativeAttention() if isinstance(model, NativeTransformer) else TorchAttention()
    plan = attention.plan(batch, pool.table)  # type: ignore[attr-defined]
    out = model.forward(batch, pool.layers, plan, TAPS)
    assert out.taps is not None
    return out.taps, out.logits


class Archivist:
    """Keeps (feature of the predecessor, token) of every token; drafts the target's own choices."""

    name = "archivist"
    kv_specs = (KVSpec(2, 64, torch.float32),)
    taps = TAPS

    def __init__(self, model: Model | None = None) -> None:
        """model: compiled, whose taps must be the same to the last bit."""
        self.model = model or target()
        self.tolerance = 1e-4 if model is None else 0.0
        self.checked = 0

    def bind(self, layers: Sequence[LayerKV], table: Tensor) -> None:
        (self.kv,) = layers
        self.table = table

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        batch = seen.batch
        assert seen.taps is not None and seen.taps.shape == (len(batch), 128)
        real = batch.slots > 0
        self.kv.k[batch.slots[real]] = seen.taps[real].view(-1, 2, 64)
        self.kv.v[batch.slots[real]] = batch.tokens[real, None, None].float().expand(-1, 2, 64)
        guesses = []
        for b, length in enumerate(seen.length.tolist()):
            slots = self.table[batch.row_ids[b], :length]
            ids = self.kv.v[slots, 0, 0].long().tolist()
            assert ids[-1] == int(batch.tokens[seen.last[b]])
            expected, logits = forward(ids, self.model)
            found = self.kv.k[slots].view(length, 128)
            torch.testing.assert_close(
                found[1:], expected[:-1], atol=self.tolerance, rtol=self.tolerance
            )
            self.checked += length
            guess: list[int] = []
            for _ in range(plan.depth):
                guess.append(int(logits[-1].argmax()))
                _, logits = forward(ids + guess, self.model)
            guesses.append(guess)
        if not plan.nodes:
            return None
        grown = torch.tensor(guesses)
        rows, depth = grown.shape
        return Trees(
            grown,
            torch.arange(-1, depth - 1).expand(rows, depth).contiguous(),
            torch.full((rows, depth), -0.1).cumsum(1),
            torch.full((rows,), depth),
        )


def test_every_token_is_seen_with_its_feature() -> None:
    drafter = Archivist()
    on = engine("none", draft=drafter, depth=3, step_tokens=16)
    batch = prompts(3, 20, 30, seed=4)
    for prompt in (*batch, batch[0], batch[0] + batch[1]):
        (done,) = run(on, request(prompt, 10))
        assert done.tokens == tokens(engine(), prompt, 10)
        assert all(step.accepted == step.drafted for step in done.steps[:-1])
    assert done.usage.cached_tokens > 0
    assert drafter.checked > 500


def test_the_compiled_targets_features_are_the_same_bits_however_a_token_was_computed() -> None:
    model = load_native(tiny_checkpoint("llama"), 1, "q8_0")
    drafter = Archivist(model)
    on = engine("none", model=model, draft=drafter, depth=3, step_tokens=16)  # type: ignore[arg-type]
    plain = engine(model=model)  # type: ignore[arg-type]
    one, other = prompts(2, 20, 30, seed=4)
    for prompt in (one, one, one + other):
        (done,) = run(on, request(prompt, 10))
        assert done.tokens == tokens(plain, prompt, 10)
        assert all(step.accepted == step.drafted for step in done.steps[:-1])
    assert drafter.checked > 200


@pytest.mark.parametrize("kv_tokens", [4096, 130])
def test_batches_preemption_and_rows_without_speculation(kv_tokens: int) -> None:
    drafter = Archivist()
    on = engine("none", draft=drafter, depth=2, step_tokens=24, kv_tokens=kv_tokens, max_rows=4)
    asked = [
        request(prompt, 14, speculation=Speculation(mode=("auto", "off")[i % 2]))  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts(5, 10, 30, seed=6))
    ]
    again = [request(one.prompt, 14) for one in asked]
    for wave in (asked, again):
        for one, done in zip(wave, run(on, *wave), strict=True):
            assert done.tokens == tokens(engine(), one.prompt, 14)
    assert (on.stats().preempted > 0) == (kv_tokens == 130)
