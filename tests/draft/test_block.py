"""Block drafters: DFlash against the reference, trees against all paths, DSpark by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_serve.draft.base import Plan
from spec_serve.draft.block import BlockDrafter, BlockHead
from spec_serve.draft.block_tree import block_tree
from spec_serve.draft.dflash import default_taps, is_dflash, read_dflash
from spec_serve.draft.eagle import is_eagle
from spec_serve.draft.eagle3 import is_eagle3, read_eagle3
from spec_serve.draft.feature import FeatureDrafter
from spec_serve.draft.head import FeatureHead
from spec_serve.draft.head_file import HeadError
from spec_serve.draft.nextn import is_nextn
from spec_serve.draft.parallel import ParallelDrafter
from spec_serve.kernels.reference import TorchAttention
from tests.draft.heads import (
    CONFIG,
    DFLASH,
    NH,
    PROMPT,
    SAMPLED,
    D,
    H,
    Silent,
    V,
    bound,
    checkpoint,
    dflash_shapes,
    eagle3_shapes,
    features,
    fill,
    p_eagle_shapes,
    parts,
    propose,
    seen_of,
    target_config,
)


def drafter(
    exact: bool = False, more: dict[str, Tensor] | None = None, **config: Any
) -> BlockDrafter:
    tensors = fill(dflash_shapes(), 5035) | (more or {})
    embedding = fill({"embed_tokens.weight": (V, H)}, 5036)["embed_tokens.weight"]
    head = fill({"lm_head.weight": (V, H)}, 5037)["lm_head.weight"]
    file = read_dflash(checkpoint({**DFLASH, **config}, tensors), target_config())
    return BlockDrafter(BlockHead(file, parts(embedding, head)), TorchAttention(exact=exact))


@pytest.mark.parametrize("exact", [False, True])
def test_dflash(exact: bool) -> None:
    made = drafter(exact)
    assert made.taps == (2, 4, 5) and made.name == "dflash"
    seen: list[Tensor] = []
    plain = made.head.run
    made.head.run = lambda *a: seen.append(plain(*a)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    bound(made)
    first = (*PROMPT, SAMPLED)
    trees = propose(made, seen_of(first, features(5038, 3 * H)), 3, 1, 3)
    assert trees.tokens[0].tolist() == [87, 79, 79]
    out = seen[0]
    wanted = torch.tensor([-1.74159, -0.89797, -0.17379, 1.66156])
    torch.testing.assert_close(out[1][:4], wanted, atol=1e-4, rtol=0)
    assert abs(float(out.sum()) - 15.8731) < 1e-2 and abs(float(out.abs().sum()) - 208.726) < 1e-2
    best = made.head.logits(out[1:]).amax(1)
    torch.testing.assert_close(best, torch.tensor([1.9963, 1.9865, 2.0526]), atol=1e-4, rtol=0)
    # The second round knows two positions more; what the first filed is still in the cache.
    taps = torch.cat((features(5038, 3 * H), features(5039, 3 * H, 2)))
    trees = propose(made, seen_of((*first, 87, 11), taps, 7), 3, 1, 3)
    assert trees.tokens[0].tolist() == [45, 11, 72]
    assert abs(float(seen[1].sum()) - 32.9533) < 1e-2
    assert abs(float(seen[1].abs().sum()) - 204.2575) < 1e-2


@pytest.mark.parametrize("width", [1, 3, 5])
def test_the_tree_holds_the_best_paths_of_all(width: int) -> None:
    depth, vocab, nodes = 3, 5, 9
    logits = torch.randn(2, depth, vocab, generator=torch.Generator().manual_seed(width)) * 2
    length, newest = torch.tensor([4, 9]), torch.tensor([0, 1])
    trees = block_tree(logits, length, newest, Plan(depth, width, nodes), Silent())
    for b in range(2):
        chance = logits[b].log_softmax(-1)
        tops = [chance[d].topk(width).indices.tolist() for d in range(depth)]
        paths = {
            path: sum(float(chance[d, t]) for d, t in enumerate(path))
            for d in range(1, depth + 1)
            for path in product(*tops[:d])
        }
        count = min(nodes, len(paths))
        best = sorted(paths, key=lambda path: -paths[path])[:count]
        found = []
        for i in range(int(trees.count[b])):
            path: tuple[int, ...] = ()
            at = i
            while at >= 0:
                path = (int(trees.tokens[b, at]), *path)
                at = int(trees.parents[b, at])
            found.append(path)
            assert abs(float(trees.score[b, i]) - paths[path]) < 1e-5
        assert sorted(found) == sorted(best)


def test_dspark_answers_left_to_right() -> None:
    markov = fill(
        {"markov_head.markov_w1.weight": (V, 8), "markov_head.markov_w2.weight": (V, 8)}, 7
    )
    markov["markov_head.markov_w2.weight"] *= 8
    made = drafter(more=markov, sample_from_anchor=True)
    assert made.name == "dspark"
    hidden: list[Tensor] = []
    plain = made.head.run
    made.head.run = lambda *a: hidden.append(plain(*a)) or hidden[-1]  # type: ignore[method-assign,func-returns-value]
    bound(made)
    trees = propose(made, seen_of((*PROMPT, SAMPLED), features(5038, 3 * H)), 4, 1, 4)
    logits, at, expected = made.head.logits(hidden[0]), SAMPLED, []
    first, second = (markov[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    for row in logits:
        at = int((row + second @ first[at]).argmax())
        expected.append(at)
    assert trees.tokens[0].tolist() == expected
    assert expected != logits.argmax(1).tolist(), "the Markov head must matter"


def by_hand(tensors: dict[str, Tensor], pairs: Tensor, features_: Tensor) -> Tensor:
    """Logits [n, Vd] of a two-layer EAGLE-3 head over tokens [n] and fused features, all causal."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * tensors[name + ".weight"]

    def turn(x: Tensor) -> Tensor:  # [n, heads, D]
        angle = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(0, D, 2) / D)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def layer(x: Tensor, read: Tensor, name: str) -> Tensor:
        def linear(part: str, y: Tensor) -> Tensor:
            return y @ tensors[f"{name}.{part}.weight"].T

        q, k, v = (linear(f"self_attn.{p}_proj", read).view(len(x), -1, D) for p in "qkv")
        q, k = turn(q), turn(k).repeat_interleave(2, 1)
        score = torch.einsum("qhd,khd->hqk", q, k) / D**0.5
        score = score.masked_fill(~torch.ones(len(x), len(x)).tril().bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", score.softmax(-1), v.repeat_interleave(2, 1))
        x = x + linear("self_attn.o_proj", mixed.reshape(len(x), -1))
        y = norm(x, f"{name}.post_attention_layernorm")
        gate = torch.nn.functional.silu(linear("mlp.gate_proj", y))
        return x + linear("mlp.down_proj", gate * linear("mlp.up_proj", y))

    token = norm(tensors["embed_tokens.weight"][pairs], "midlayer.input_layernorm")
    read = torch.cat((token, norm(features_, "midlayer.hidden_norm")), 1)
    x = layer(features_, read, "midlayer")
    x = layer(x, norm(x, "layers.1.input_layernorm"), "layers.1")
    return norm(x, "norm") @ tensors["lm_head.weight"].T


def test_p_eagle_answers_all_masks_at_once() -> None:
    tensors = fill({**eagle3_shapes(V), **p_eagle_shapes()}, 31)
    config = {**CONFIG, "ptd_token_id": 9}
    file = read_eagle3(checkpoint(config, tensors), target_config())
    made = ParallelDrafter(FeatureHead(file, parts()), TorchAttention())
    assert made.name == "p-eagle" and file.config.block.layers == 2
    bound(made)
    taps = features(32, 3 * H)
    trees = propose(made, seen_of((*PROMPT, SAMPLED), taps), 4, 1, 4)
    tokens = torch.tensor([*PROMPT[1:], SAMPLED, 9, 9, 9])
    known = torch.cat((taps, tensors["mask_hidden"].view(1, -1).expand(3, -1)))
    logits = by_hand(tensors, tokens, known @ tensors["fc.weight"].T)[-4:]
    assert trees.tokens[0].tolist() == logits.argmax(1).tolist()
    scores = logits.log_softmax(-1).amax(1).cumsum(0)
    torch.testing.assert_close(trees.score[0], scores, atol=1e-4, rtol=0)
    del config["ptd_token_id"]
    with pytest.raises(HeadError, match="mask_token_id"):
        read_eagle3(checkpoint(config, tensors), target_config())


def test_a_head_narrower_than_its_target() -> None:
    narrow = 32
    wide = {**eagle3_shapes(V), **p_eagle_shapes()}
    shapes = {
        name: tuple(
            narrow if size == H else 2 * narrow if size == 2 * H else size for size in shape
        )
        for name, shape in wide.items()
        if name != "mask_hidden"
    }
    for name in list(shapes):
        if name.endswith("o_proj.weight"):
            shapes[name] = (narrow, NH * D)
        elif name.endswith("q_proj.weight"):
            shapes[name] = (NH * D, shapes[name][1])
        elif "mlp" in name:
            inner = 2 * H
            shapes[name] = (narrow, inner) if "down" in name else (inner, narrow)
    shapes["fc.weight"] = (narrow, 3 * H)
    tensors = fill(shapes, 33)
    config = {**CONFIG, "hidden_size": narrow, "target_hidden_size": H}
    file = read_eagle3(checkpoint(config, tensors), target_config())
    made = FeatureDrafter(FeatureHead(file, parts()), TorchAttention())
    bound(made)
    taps = features(34, 3 * H)
    trees = propose(made, seen_of((*PROMPT, SAMPLED), taps), 1, 2, 2)
    logits = by_hand(tensors, torch.tensor([*PROMPT[1:], SAMPLED]), taps @ tensors["fc.weight"].T)[
        -1
    ]
    best = logits.log_softmax(-1).topk(2)
    assert trees.tokens[0].tolist() == best.indices.tolist()
    torch.testing.assert_close(trees.score[0], best.values, atol=1e-4, rtol=0)


def test_which_layers_are_read() -> None:
    assert default_taps(36, 5) == (2, 10, 18, 26, 34) and default_taps(24, 5) == (2, 7, 12, 17, 22)
    tensors = fill(dflash_shapes(2, 2), 1)
    own = {"mask_token_id": 95}
    file = read_dflash(checkpoint({**DFLASH, "dflash_config": own}, tensors), target_config(8))
    assert file.config.taps == default_taps(8, 2) == (2, 6)
    raw = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
        "transformer_layer_config": {**DFLASH, "rope_theta": None}, "block_size": 4,
        "mask_token_id": 95, "aux_hidden_state_layer_ids": [1, 7],
    }  # fmt: skip
    assert read_dflash(checkpoint(raw, tensors), target_config(8)).config.taps == (1, 7)


def test_what_is_wrong_is_named() -> None:
    tensors = fill(dflash_shapes(), 1)
    names = list(tensors)
    assert is_dflash(names) and not (is_eagle(names) or is_eagle3(names) or is_nextn(names))
    for change, message in (
        ({"dflash_config": {"target_layer_ids": [1, 3, 4]}}, "mask_token_id"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 1}, "guesses nothing"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 3, 8]}}, "boundary 9"),
        ({"hidden_size": 32}, "made for another model"),
    ):
        with pytest.raises(HeadError, match=message):
            read_dflash(checkpoint({**DFLASH, **change}, tensors), target_config())
    del tensors["norm.weight"]
    with pytest.raises(HeadError, match=r"norm\.weight: missing"):
        read_dflash(checkpoint(DFLASH, tensors), target_config())
