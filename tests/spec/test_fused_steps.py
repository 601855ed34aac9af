"""A whole step of a tiny model by Triton's programs, in the interpreter, against torch's: forward,
drawing, walk and table; then the same recorded and repeated as a graph would."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from spec_serve.cache.batch import Twig
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import TokenTree, chain
from spec_serve.kernels.reference import TorchAttention
from spec_serve.spec.choice import RowSampling
from spec_serve.spec.frames import Tier
from spec_serve.spec.graphs import StepGraphs
from spec_serve.spec.request import Sampling
from spec_serve.spec.step import Job, TorchDevice
from spec_serve.target.model import Transformer
from tests.recorded import Recorder
from tests.tiny import VOCAB, tiny_model

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from spec_serve.kernels.tree_attention import TritonAttention
from spec_serve.spec.fused_steps import FusedSteps
from spec_serve.target.fused import FusedOperations

if torch.cuda.is_available():
    pytest.skip("these tests run programs on a CPU", allow_module_level=True)

PROMPTS = ([5, 9, 12], [7, 7], [4])


def state(**settings: object) -> RowSampling:
    return RowSampling(Sampling(**settings), 3, VOCAB, [5, 9], 0, frozenset())  # type: ignore[arg-type]


def device(fused: bool, pool_rows: int = 3) -> TorchDevice:
    model: Transformer = tiny_model("qwen3", num_hidden_layers=1)
    pool = KVPool(model.kv_specs, 64, pool_rows, 24)
    for layer in pool.layers:  # what was never written must not count
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    if not fused:
        return TorchDevice(model, pool, TorchAttention())
    model.operations = FusedOperations()
    return TorchDevice(model, pool, TritonAttention(1), operations=FusedSteps())


def job(trees: list[TokenTree], prefixes: list[int], states: list[RowSampling]) -> Job:
    """Row b has slots 16 b + 1 and on; the slot of a position is that of its first node there."""
    twigs, following = [], []
    for b, (tree, prefix) in enumerate(zip(trees, prefixes, strict=True)):
        first = 16 * b + 1 + prefix
        slots = range(first, first + len(tree))
        twigs.append(Twig(b, prefix, tree, slots, tree.given - 1))
        following.append(first + len(tree))
    deepest = max(max(tree.depths()) + 1 - tree.given for tree in trees)
    return Job(twigs, states, following, [-1] * len(trees), deepest)


def test_a_step_is_torchs() -> None:
    """Prompts first; then trees with a right guess and wrong ones, each row drawn another way."""
    states = [
        state(),
        state(temperature=0.8, top_p=0.7),
        state(temperature=0.6, frequency_penalty=1.0, logit_bias={3: 2.0}),
    ]
    bits = np.zeros(-(-VOCAB // 64), dtype=np.uint64)
    bits[1] = 0xFFFF
    plain, fused = device(False), device(True)
    trees, prefixes = [chain(p) for p in PROMPTS], [0] * len(PROMPTS)
    accepted = 0
    for _ in range(2):
        asked = job(trees, prefixes, states)
        with torch.inference_mode():
            ran, other = plain._forward(asked), fused._forward(asked)
            torch.testing.assert_close(other.logits, ran.logits, rtol=0, atol=1e-4)
            wanted = plain._judge(asked, ran.batch, ran.logits)
            got = fused._judge(asked, other.batch, other.logits)
        for name in ("path", "accepted", "leaf", "bonus"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name
        assert torch.equal(fused.pool.table[:, :24], plain.pool.table[:, :24])
        accepted += int(wanted.accepted.sum())
        # What follows each first token tells what a guess has to be.
        prefixes = [len(prompt) for prompt in PROMPTS]
        firsts = wanted.bonus.tolist()
        with torch.inference_mode():
            ahead = job([chain([t]) for t in firsts], prefixes, states)
            ran = plain._forward(ahead)
            guesses = plain._judge(ahead, ran.batch, ran.logits).bonus.tolist()
        trees = [
            TokenTree([first, 299, guess, 17], [-1, 0, 0, 2], 1)
            for first, guess in zip(firsts, guesses, strict=True)
        ]
        states[1].masks = [None, bits, bits, None]
    assert accepted >= 2


def test_recorded_programs_follow_their_inputs() -> None:
    plain, fused = device(False), device(True)
    capture = Recorder()
    fused.graphs = StepGraphs(fused.parts, capture, 1, 1)
    fused.graphs._tiers = [Tier(1, 2)]
    fused.graphs.record()
    states = [state(temperature=0.9)]
    at, tree = 0, chain([5])
    for _ in range(2):
        asked = job([tree], [at], states)
        expected, result = plain.step(asked), fused.step(asked)
        assert (result.paths, result.bonus) == (expected.paths, expected.bonus)
        assert torch.equal(fused.pool.table[:, :24], plain.pool.table[:, :24])
        at += 1 + len(result.paths[0])
        tree = TokenTree([result.bonus[0], 8], [-1, 0], 1)
    assert capture.replays == [2, 2]
