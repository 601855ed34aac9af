"""NEXTN modules as DeepSeek-V3 has them: latent attention and a mixture of experts in the block."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import chain
from spec_serve.draft.base import Plan
from spec_serve.draft.feature import FeatureDrafter
from spec_serve.draft.head import FeatureHead, TargetParts
from spec_serve.draft.nextn import read_nextn
from spec_serve.kernels.reference import TorchAttention
from spec_serve.spec.request import Request
from spec_serve.target.model import Transformer, load_model
from spec_serve.target.rope import Rotary
from tests.draft.heads import Silent, bound, seen_of
from tests.engines import engine, prompts, request, run
from tests.tiny import MemoryCheckpoint, tiny_checkpoint

LAYERS, HIDDEN = 3, 64
TOKENS = (3, 17, 42, 5, 88, 61, 7)


@cache
def block_checkpoint() -> MemoryCheckpoint:
    """A model of one layer, whose tensors are the module's block."""
    return tiny_checkpoint("deepseek-v3", 8, num_hidden_layers=1, first_k_dense_replace=0)


@cache
def checkpoint(dense: bool = False) -> MemoryCheckpoint:
    """A target of three layers with a module behind them."""
    held = tiny_checkpoint("deepseek-v3", 3, num_nextn_predict_layers=1)
    place = f"model.layers.{LAYERS}."
    noise = torch.Generator().manual_seed(4)
    tensors = dict(held.tensors)
    for name, tensor in block_checkpoint().tensors.items():
        if name.startswith("model.layers.0.") and not (dense and ".mlp." in name):
            tensors[place + name.removeprefix("model.layers.0.")] = tensor
    if dense:
        for name, shape in (("gate", (128, 64)), ("up", (128, 64)), ("down", (64, 128))):
            tensors[f"{place}mlp.{name}_proj.weight"] = torch.randn(shape, generator=noise) / 8
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{place}{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=noise)
    joined = torch.randn(HIDDEN, 2 * HIDDEN, generator=noise) / 11
    tensors[place + "eh_proj.weight"] = joined
    return MemoryCheckpoint(held.config, tensors)


@cache
def target() -> Transformer:
    return load_model(checkpoint())


def head(dense: bool = False) -> FeatureHead:
    (file,) = read_nextn(checkpoint(dense), target().config)
    return FeatureHead(file, TargetParts.of(target()))


def taps_of(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(5))


def test_the_block_is_the_targets() -> None:
    """Pairs through the module equal the same joined states through a target's layer."""
    made = head()
    assert made.kv_specs[0].latent == 16 and made.config.rotary == 8
    count = len(TOKENS)
    batch = build_batch([Twig(0, 0, chain(TOKENS), range(1, count + 1), count)])
    pool = KVPool(made.kv_specs, 20, 1, 20)
    plan = TorchAttention().plan(batch, pool.table)
    one = load_model(block_checkpoint())
    other = KVPool(one.kv_specs, 20, 1, 20)
    with torch.inference_mode():
        feature = made.feature(taps_of(count))
        answer, _ = made.run(batch, feature, pool.layers, plan)
        x, _ = made._enter(batch.tokens, feature)
        rotation = Rotary(one.config.rope, 8, torch.float32, one.device).at(batch.positions)
        wanted = one.blocks[0](x, rotation, other.layers[0], plan)
        assert made._norm is not None
        torch.testing.assert_close(answer, made._norm(wanted), atol=1e-5, rtol=0)
        torch.testing.assert_close(pool.layers[0].k, other.layers[0].k, atol=1e-6, rtol=0)
        before = pool.layers[0].k.clone()
        pool.layers[0].k.zero_()
        made.note(batch, feature, pool.layers, lambda: plan)
    torch.testing.assert_close(pool.layers[0].k, before, atol=1e-6, rtol=0)


def test_text_with_the_module_is_text_without() -> None:
    drafter = FeatureDrafter(head(), TorchAttention(exact=True))
    on = engine("none", model=target(), draft=drafter, depth=3, width=2, lookup=True)
    off = engine("none", model=target())
    options: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "seed": 4})
    texts = prompts(2, 12, 30, seed=8)

    def asked() -> list[Request]:
        return [request(text, 16, **more) for text, more in zip(texts, options, strict=True)]

    expected = [done.tokens for done in run(off, *asked())]
    for how in ("cold", "cached"):
        assert [done.tokens for done in run(on, *asked())] == expected, how
    assert on.stats().drafted > 0


def test_a_dense_block_with_latent_attention() -> None:
    made = head(dense=True)
    assert made.config.block.experts is None and made.config.block.latent is not None
    drafter = FeatureDrafter(made, TorchAttention())
    bound(drafter)
    grants = torch.arange(32, 44)[None]
    with torch.inference_mode():
        trees = drafter.propose(
            seen_of(TOKENS, taps_of(len(TOKENS) - 1)), grants, Plan(3, 2, 6), Silent()
        )
    assert trees is not None and int(trees.count[0]) == 6
