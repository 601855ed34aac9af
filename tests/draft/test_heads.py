"""Heads of every format against numbers of the reference code, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_serve.draft.base import Plan
from spec_serve.draft.eagle import is_eagle, read_eagle
from spec_serve.draft.eagle3 import is_eagle3, read_eagle3
from spec_serve.draft.feature import FeatureDrafter, paired
from spec_serve.draft.head import FeatureHead
from spec_serve.draft.head_file import HeadFile
from spec_serve.draft.nextn import is_nextn, read_nextn
from spec_serve.kernels.reference import TorchAttention
from tests.draft.heads import (
    CONFIG,
    PROMPT,
    SAMPLED,
    H,
    Silent,
    V,
    bound,
    checkpoint,
    eagle3_shapes,
    eagle_shapes,
    features,
    fill,
    for_target,
    nextn_shapes,
    parts,
    propose,
    reduced,
    seen_of,
    target_config,
)
from tests.tiny import tiny_model

TOKENS = (*PROMPT, SAMPLED)


@dataclass(frozen=True)
class Known:
    """Numbers of the reference: a greedy chain, what is fed back last, its sums, the best three."""

    chain: str
    first: str
    sums: str
    top: str
    tree: str = ""


def drafter_of(
    file: HeadFile, embedding: Tensor | None = None, head: Tensor | None = None
) -> FeatureDrafter:
    return FeatureDrafter(FeatureHead(file, parts(embedding, head)), TorchAttention())


def matches(drafter: FeatureDrafter, taps: Tensor, known: Known) -> None:
    bound(drafter)
    seen = paired(seen_of(TOKENS, taps))
    assert seen.taps is not None
    with torch.inference_mode():
        hidden, fed = drafter._run(seen.batch, drafter.head.feature(seen.taps))
        logits = drafter.head.logits(hidden)
    assert fed.shape == (6, H)
    wanted = torch.tensor([float(x) for x in known.first.split()])
    torch.testing.assert_close(fed[-1][: len(wanted)], wanted, atol=1e-4, rtol=0)
    total, absolute = (float(x) for x in known.sums.split())
    assert abs(float(fed.sum()) - total) < 1e-2
    assert abs(float(fed.abs().sum()) - absolute) < 1e-2
    ids, values = (part.split() for part in known.top.split(":"))
    best = logits[-1].topk(3)
    best_ids = best.indices if drafter.head.ids is None else drafter.head.ids[best.indices]
    assert best_ids.tolist() == [int(i) for i in ids]
    expected = torch.tensor([float(x) for x in values])
    torch.testing.assert_close(best.values, expected, atol=1e-4, rtol=0)
    trees = propose(drafter, seen_of(TOKENS, taps), 4, 1, 4)
    assert trees.tokens[0].tolist() == [int(i) for i in known.chain.split()]
    if known.tree:
        nodes, above = known.tree.split(";")
        trees = propose(drafter, seen_of(TOKENS, taps), 4, 3, 8)
        assert trees.tokens[0].tolist() == [int(i) for i in nodes.split()]
        assert (trees.parents[0] + 1).tolist() == [int(i) for i in above.split()]


EAGLE = {
    True: (1196, Known(
        "68 86 47 92", "0.50855 0.91262 0.65358 1.92235", "-1.1510 431.5958",
        "68 2 34: 3.66957 2.75433 2.62013", "68 2 34 86 76 41 76 91; 0 0 0 1 1 1 3 3",
    )),
    False: (1200, Known(
        "50 40 73 33", "0.42187 0.15520 0.89580 -0.31009", "-72.1403 487.3605",
        "50 54 24: 3.88762 3.09350 2.58117", "50 54 24 40 68 11 86 73; 0 0 0 1 1 1 2 4",
    )),
}  # fmt: skip


@pytest.mark.parametrize("bias", EAGLE)
def test_eagle(bias: bool) -> None:
    seed, known = EAGLE[bias]
    tensors = fill(eagle_shapes(bias), seed)
    head = fill({"lm_head.weight": (V, H)}, seed + 1)["lm_head.weight"]
    assert is_eagle(list(tensors)) and not is_eagle3(list(tensors)) and not is_nextn(list(tensors))
    file = read_eagle(checkpoint(CONFIG, tensors), target_config())
    assert file.config.taps == (8,) and file.config.final_norm
    if bias:
        probe = torch.tensor([0.03649, -0.02710, -0.10982])
        torch.testing.assert_close(tensors["fc.weight"][0, :3], probe, atol=1e-5, rtol=0)
    matches(drafter_of(file, head=head), features(seed + 2, H), known)


EAGLE3: dict[str, tuple[int, int, Mapping[str, Any], Known]] = {
    "reduced": (3492, 32, {}, Known(
        "45 43 77 40", "-1.14258 -0.29671 0.22238 -0.14710", "46.5789 454.1524",
        "45 43 29: 2.04318 1.94089 1.40841", "45 43 29 43 45 77 29 43; 0 0 0 1 1 2 2 2",
    )),
    "whole": (5716, V, {}, Known(
        "56 52 19 11", "2.48215 1.20313 -1.30860 -0.95125", "-59.9102 406.9188",
        "56 52 38: 2.65155 2.45282 1.85808", "56 52 38 52 19 44 52 19; 0 0 0 1 1 1 2 2",
    )),
    "normed_residual": (6800, 32, {"norm_before_residual": True}, Known(
        "56 56 57 67", "1.52051 0.54224 0.38532 1.46995", "-36.8312 407.5898",
        "56 57 75: 2.97038 2.15310 1.18525",
    )),
    "norm_before_fc": (6540, 32, {"norm_before_fc": True}, Known(
        "22 11 11 30", "-2.18057 1.20926 2.05130 0.78984", "-43.6233 419.2062",
        "22 29 11: 2.05387 1.69356 1.47714",
    )),
    "fc_norm_and_output": (6280, 32, {"fc_norm": True, "norm_output": True}, Known(
        "40 24 81 81", "0.53399 -0.28482 0.78163 0.65227", "-16.8912 303.4432",
        "40 76 24: 2.75222 1.80509 1.47169",
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3(name: str) -> None:
    seed, vocab, options, known = EAGLE3[name]
    shapes = eagle3_shapes(vocab)
    if "norm_before_fc" in options:
        shapes["input_norm.weight"] = (3 * H,)
    if "fc_norm" in options:
        shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(3)}
    tensors = fill(shapes, seed)
    assert is_eagle3(list(tensors)) and not is_eagle(list(tensors)) and not is_nextn(list(tensors))
    if vocab != V:
        tensors |= reduced(seed + 1)
    config = {**CONFIG, **options, "draft_vocab_size": vocab}
    drafter = drafter_of(read_eagle3(checkpoint(config, tensors), target_config()))
    assert drafter.taps == (2, 4, 5) and drafter.name == "eagle3"
    taps = features(seed + 2, 3 * H)
    if name == "reduced":
        assert reduced(3493)["d2t"][:8].tolist() == [0, 0, 3, 12, 18, 18, 19, 20]
        fused = drafter.head.feature(taps)[0, :3]
        wanted = torch.tensor([-1.43159, 0.32981, 0.02077])
        torch.testing.assert_close(fused, wanted, atol=1e-5, rtol=0)
    matches(drafter, taps, known)


NEXTN = {
    "mimo": (3096, 8, Known(
        "4 46 8 85", "1.20943 -1.82715 -0.11393 -1.86060", "-5.6492 306.2542",
        "4 79 35: 2.88255 2.29832 2.14308",
    )),
    "deepseek": (5160, 4, Known(
        "90 30 92 19", "0.66293 -0.97526 -0.59204 -1.38247", "21.0144 316.2613",
        "90 68 87: 2.41655 1.64085 1.63729",
    )),
}  # fmt: skip


@pytest.mark.parametrize("family", NEXTN)
def test_nextn(family: str) -> None:
    seed, layers, known = NEXTN[family]
    tensors = fill(nextn_shapes(family), seed)
    config = {**CONFIG, "num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    (file,) = read_nextn(checkpoint(config, tensors), target_config(layers))
    assert file.config.hidden_first == (family == "mimo") and file.config.taps == (layers,)
    embedding, head = tensors.get("model.embed_tokens.weight"), tensors.get("lm_head.weight")
    drafter = drafter_of(file, embedding, head)
    matches(drafter, features(seed + 1, H), known)


def test_mimo_with_the_halves_the_wrong_way_round_says_something_else() -> None:
    tensors = fill(nextn_shapes("mimo"), 3096)
    renamed = {name.replace("model.mtp_layers", "mtp_layers"): x for name, x in tensors.items()}
    (file,) = read_nextn(checkpoint(CONFIG, renamed), target_config())
    drafter = drafter_of(file, tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])
    bound(drafter)
    trees = propose(drafter, seen_of(TOKENS, features(3097, H)), 4, 1, 4)
    assert trees.tokens[0].tolist() == [26, 35, 34, 76]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "nextn", "p-eagle"])
def test_where_no_guess_is_wanted_the_same_keys_and_values_are_filed(kind: str) -> None:
    model = tiny_model()
    drafter = for_target(kind, model)
    taps = features(5, len(drafter.taps) * H)
    seen = seen_of(TOKENS, taps)
    pools = []
    for nodes in (1, 0):
        pool = bound(drafter)
        with torch.inference_mode():
            grants = torch.tensor([[40, 41]])
            drafter.propose(seen, grants, Plan(1, 1, nodes), Silent())
        pools.append(pool)
    for one, other in zip(pools[0].layers, pools[1].layers, strict=True):
        assert one.k[1 : len(TOKENS) + 1].abs().sum() > 0
        torch.testing.assert_close(one.k, other.k, atol=1e-5, rtol=0)
        torch.testing.assert_close(one.v, other.v, atol=1e-5, rtol=0)
