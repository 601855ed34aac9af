"""What sharing the target's noise is worth: simulated, against what can be said in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spec_serve.cache.tree import chain
from spec_serve.draft.base import Plan
from spec_serve.draft.block_tree import block_tree
from spec_serve.spec.request import Sampling
from spec_serve.spec.sampling import RowNoise, RowSampling, choose, pack

VOCAB, DRAWS = 24, 2500


def agreement(p: Tensor, q: Tensor) -> float:
    """How often log p and log q have the same arg-max under the same noise: the sum over tokens x
    of 1 / sum_y max(p_y / p_x, q_y / q_x)."""
    ratio = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])  # [x, y]
    return float((1.0 / ratio.sum(1)).sum())


@pytest.mark.parametrize(("apart", "temperature"), [(0.3, 1.0), (1.0, 1.0), (1.0, 0.6)])
def test_guesses_share_the_noise_of_what_is_sampled(apart: float, temperature: float) -> None:
    chance = torch.Generator().manual_seed(3)
    target = torch.randn(VOCAB, generator=chance) * 2
    draft = target + apart * torch.randn(VOCAB, generator=chance)
    sampling = Sampling(temperature=temperature)
    states = [RowSampling(sampling, seed, VOCAB, [], 0, frozenset()) for seed in range(DRAWS)]
    # Each row's newest token stands at position 6; what is drawn comes at 7.
    nodes = pack([(state, chain([1]), 6, 0) for state in states], "cpu")
    drawn = choose(target.expand(DRAWS, -1), nodes)
    trees = block_tree(
        draft.expand(DRAWS, 1, -1),
        torch.full((DRAWS,), 7),
        torch.ones(DRAWS, dtype=torch.int64),
        Plan(1, 4, 4),
        RowNoise(states, "cpu"),
    )
    best = trees.score.sort(descending=True)
    hit = trees.tokens.gather(1, best.indices) == drawn.unsqueeze(1)  # [B, 4]
    p, q = (target / temperature).softmax(0), (draft / temperature).softmax(0)
    first = float(hit[:, 0].float().mean())
    assert abs(first - agreement(p, q)) < 0.03
    # Near the best that any one guess could do, and far above one without the noise.
    assert first > float(torch.minimum(p, q).sum()) - 0.08
    assert first > float(p[q.argmax()]) + 0.1 and first > float((p * q).sum()) + 0.2
    # Scores order the children: each next one is right more seldom.
    shares = hit.float().mean(0)
    assert bool((shares.diff() < 0).all()) and float(shares.sum()) > 0.85
