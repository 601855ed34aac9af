"""EAGLE-3 heads against numbers of the reference code, in float32, and what loading refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spec_serve.draft.eagle3 import read_eagle3
from spec_serve.draft.feature import FeatureDrafter, paired
from spec_serve.draft.head import FeatureHead
from spec_serve.kernels.reference import TorchAttention
from tests.draft.heads import (
    CONFIG,
    PROMPT,
    SAMPLED,
    bound,
    checkpoint,
    eagle3_shapes,
    features,
    fill,
    parts,
    propose,
    reduced,
    seen_of,
    target_config,
)

TOKENS = (*PROMPT, SAMPLED)


def loaded(
    tensors: Mapping[str, Tensor], attention: TorchAttention | None = None, **config: Any
) -> FeatureDrafter:
    file = read_eagle3(checkpoint({**CONFIG, **config}, tensors), target_config())
    return FeatureDrafter(FeatureHead(file, parts()), attention or TorchAttention())


def outputs(drafter: FeatureDrafter, taps: Tensor) -> tuple[Tensor, Tensor]:
    """(what is fed back [6, H], logits [6, Vd]) of all pairs."""
    bound(drafter)
    seen = paired(seen_of(TOKENS, taps))
    assert seen.taps is not None
    with torch.inference_mode():
        hidden, fed = drafter._run(seen.batch, drafter.head.feature(seen.taps))
        return fed, drafter.head.logits(hidden)


def expect(
    drafter: FeatureDrafter, taps: Tensor, greedy: str, first: str, sums: str, top: str
) -> None:
    fed, logits = outputs(drafter, taps)
    wanted = torch.tensor([float(x) for x in first.split()])
    torch.testing.assert_close(fed[-1][:4], wanted, atol=1e-4, rtol=0)
    total, absolute = (float(x) for x in sums.split())
    assert abs(float(fed.sum()) - total) < 1e-2 and abs(float(fed.abs().sum()) - absolute) < 1e-2
    ids, values = (part.split() for part in top.split(":"))
    best = logits[-1].topk(3)
    known = best.indices if drafter.head.ids is None else drafter.head.ids[best.indices]
    assert known.tolist() == [int(i) for i in ids]
    torch.testing.assert_close(
        best.values, torch.tensor([float(x) for x in values]), atol=1e-4, rtol=0
    )
    trees = propose(drafter, seen_of(TOKENS, taps), 4, 1, 4)
    assert trees.tokens[0].tolist() == [int(i) for i in greedy.split()]


def test_reduced_vocabulary() -> None:
    tensors = fill(eagle3_shapes(32), 3492)
    drafter = loaded({**tensors, **reduced(3493)}, draft_vocab_size=32)
    assert reduced(3493)["d2t"][:8].tolist() == [0, 0, 3, 12, 18, 18, 19, 20]
    expect(
        drafter, features(3494, 192), "45 43 77 40", "-1.14258 -0.29671 0.22238 -0.14710",
        "46.5789 454.1524", "45 43 29: 2.04318 1.94089 1.40841",
    )  # fmt: skip
    assert drafter.taps == (2, 4, 5) and drafter.name == "eagle3"
    trees = propose(drafter, seen_of(TOKENS, features(3494, 192)), 4, 3, 8)
    assert trees.tokens[0].tolist() == [45, 43, 29, 43, 45, 77, 29, 43]
    assert trees.parents[0].tolist() == [-1, -1, -1, 0, 0, 1, 1, 1]
