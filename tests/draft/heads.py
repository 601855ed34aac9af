"""Synthetic heads as files in memory, and a drafter run by hand over given features.

The fill is deterministic: numpy's generator draws one tensor after the other in the order of their
names, so numbers made elsewhere from the same names can be compared. Imported by tests only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import chain
from spec_serve.draft.base import Drafter, Plan, Seen, Trees, scratch_slots
from spec_serve.draft.block import BlockDrafter, BlockHead
from spec_serve.draft.dflash import read_dflash
from spec_serve.draft.eagle import read_eagle
from spec_serve.draft.eagle3 import read_eagle3
from spec_serve.draft.feature import FeatureDrafter
from spec_serve.draft.head import FeatureHead, TargetParts
from spec_serve.draft.modules import ModulesDrafter
from spec_serve.draft.nextn import read_nextn
from spec_serve.draft.parallel import ParallelDrafter
from spec_serve.kernels.reference import TorchAttention
from spec_serve.target.config import ModelConfig
from spec_serve.target.layers import RMSNorm
from spec_serve.target.model import Transformer
from tests.tiny import MemoryCheckpoint

V, H, INNER, NH, NK, D = 96, 64, 128, 4, 2, 16
PROMPT, SAMPLED = (3, 17, 42, 5, 88, 61), 7
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": NH,
    "num_key_value_heads": NK,
    "head_dim": D,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}


def fill(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """Tensors of these shapes, drawn in the order of their names."""
    generator = np.random.default_rng(seed)
    made = {}
    for name in sorted(shapes):
        x = generator.standard_normal(tuple(shapes[name]), dtype=np.float32)
        if len(shapes[name]) == 1 and name.endswith(".weight"):
            x = 1 + np.float32(0.1) * x
        elif name.endswith(".bias"):
            x = np.float32(0.02) * x
        elif "embed_tokens" not in name:
            x = x / np.float32(np.sqrt(shapes[name][-1]))
        made[name] = torch.from_numpy(x)
    return made


def features(seed: int, width: int, rows: int = len(PROMPT)) -> Tensor:
    """What the target would have computed at each position of the prompt."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.standard_normal((rows, width), dtype=np.float32))


def layer_shapes(prefix: str, inputs: int = H, *, bias: bool = False) -> dict[str, tuple[int, ...]]:
    """A Llama layer without its norms."""
    shapes: dict[str, tuple[int, ...]] = {
        prefix + "self_attn.q_proj.weight": (NH * D, inputs),
        prefix + "self_attn.k_proj.weight": (NK * D, inputs),
        prefix + "self_attn.v_proj.weight": (NK * D, inputs),
        prefix + "self_attn.o_proj.weight": (H, NH * D),
        prefix + "mlp.gate_proj.weight": (INNER, H),
        prefix + "mlp.up_proj.weight": (INNER, H),
        prefix + "mlp.down_proj.weight": (H, INNER),
    }
    if bias:
        for name, rows in (("q", NH * D), ("k", NK * D), ("v", NK * D)):
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
    return shapes


def eagle3_shapes(vocab: int, layer: str = "midlayer.") -> dict[str, tuple[int, ...]]:
    """The tensors of an EAGLE-3 head, without d2t."""
    return {
        "embed_tokens.weight": (V, H),
        "fc.weight": (H, 3 * H),
        "lm_head.weight": (vocab, H),
        "norm.weight": (H,),
        layer + "hidden_norm.weight": (H,),
        layer + "input_layernorm.weight": (H,),
        layer + "post_attention_layernorm.weight": (H,),
        **layer_shapes(layer, 2 * H),
    }


def reduced(seed: int, size: int = 32) -> dict[str, Tensor]:
    """d2t and t2d of a reduced vocabulary."""
    used = np.sort(np.random.default_rng(seed).permutation(V)[:size])
    kept = torch.zeros(V, dtype=torch.bool)
    kept[torch.from_numpy(used)] = True
    return {"d2t": torch.from_numpy(used - np.arange(size)), "t2d": kept}


def target_config(layers: int = 8, **overrides: Any) -> ModelConfig:
    """The configuration of a target these heads fit."""
    raw = {**CONFIG, "num_hidden_layers": layers, **overrides}
    return ModelConfig.from_checkpoint_config(raw)


def parts(embedding: Tensor | None = None, head: Tensor | None = None) -> TargetParts:
    """What a head borrows of a target; the final norm leaves features as they are given."""
    table = torch.zeros(V, H) if embedding is None else embedding

    def logits(hidden: Tensor) -> Tensor:
        assert head is not None
        return F.linear(hidden, head)

    class Same(RMSNorm):
        def __call__(self, x: Tensor) -> Tensor:
            return x

    return TargetParts(target_config(), table, logits, Same(torch.ones(H), 1e-6))


def checkpoint(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> MemoryCheckpoint:
    return MemoryCheckpoint(dict(config), dict(tensors))


class Silent:
    """No noise, no temperature."""

    def add(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ids: Tensor | None = None
    ) -> Tensor:
        return logits


def seen_of(tokens: Sequence[int], taps: Tensor, start: int = 0) -> Seen:
    """One row's chain from `start` on, all certain; taps [len(tokens) - 1, T] from position 0."""
    part = tokens[start:]
    slots = range(start + 1, len(tokens) + 1)
    batch = build_batch([Twig(0, start, chain(part), slots, len(part))])
    before = torch.cat((torch.zeros(1, taps.shape[1]), taps))[start:]
    last = torch.tensor([len(part) - 1])
    return Seen(batch, last, torch.tensor([len(tokens)]), before, start == 0)


def bound(drafter: Drafter, slots: int = 64) -> KVPool:
    """A pool of one row for the drafter; position p lies in slot p + 1."""
    pool = KVPool(drafter.kv_specs, slots, 1, slots)
    pool.assign(0, 0, list(range(1, slots + 1)))
    drafter.bind(pool.layers, pool.table)
    return pool


def propose(drafter: Drafter, seen: Seen, depth: int, width: int, nodes: int) -> Trees:
    """A tree in scratch slots from 32 on."""
    plan = Plan(depth, width, nodes)
    grants = torch.arange(32, 32 + max(1, scratch_slots(drafter, plan)))[None]
    with torch.inference_mode():
        trees = drafter.propose(seen, grants, plan, Silent())
    assert trees is not None
    return trees


def eagle_shapes(bias: bool, *, embedding: bool = True) -> dict[str, tuple[int, ...]]:
    """The tensors of an EAGLE-1 head."""
    return {
        **({"embed_tokens.weight": (V, H)} if embedding else {}),
        "fc.weight": (H, 2 * H),
        **({"fc.bias": (H,)} if bias else {}),
        "layers.0.post_attention_layernorm.weight": (H,),
        **layer_shapes("layers.0."),
    }


def nextn_shapes(family: str, *, layers: int = 4) -> dict[str, tuple[int, ...]]:
    """The tensors of one NEXTN module, and of the target what its fixture fills beside it."""
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    if family == "mimo":
        prefix = "model.mtp_layers.0."
        own = ("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")
        return {
            "model.embed_tokens.weight": (V, H),
            "lm_head.weight": (V, H),
            prefix + "input_proj.weight": (H, 2 * H),
            **{prefix + name: (H,) for name in (*own, *norms)},
            **layer_shapes(prefix, bias=True),
        }
    assert family == "deepseek"
    prefix = f"model.layers.{layers}."
    own = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    return {
        prefix + "embed_tokens.weight": (V, H),
        prefix + "shared_head.head.weight": (V, H),
        prefix + "eh_proj.weight": (H, 2 * H),
        **{prefix + name: (H,) for name in (*own, *norms)},
        **layer_shapes(prefix),
    }


def for_target(kind: str, model: Transformer, taps: tuple[int, ...] = (1, 2, 3)) -> Drafter:
    """A random head of a kind for a tiny target, whose hidden size must be H."""
    vocab, own = model.config.vocab, TargetParts.of(model)
    raw = {**CONFIG, "vocab_size": vocab, "num_hidden_layers": model.config.layers}
    attention = TorchAttention(exact=True)
    if kind == "dflash":
        raw |= {**DFLASH, **raw, "model_type": "qwen3"}
        held = checkpoint(raw, fill(dflash_shapes(), 4))
        return BlockDrafter(BlockHead(read_dflash(held, model.config, taps), own), attention)
    if kind == "eagle":
        tensors = fill(eagle_shapes(True, embedding=False), 1)
        file = read_eagle(checkpoint(raw, tensors), model.config)
    elif kind == "modules":
        held = checkpoint(raw, fill(module_shapes(), 6))
        files = read_nextn(held, model.config)
        return ModulesDrafter([FeatureHead(file, own) for file in files], attention)
    elif kind == "nextn":
        tensors = fill(nextn_shapes("mimo"), 2)
        (file,) = read_nextn(checkpoint(raw, tensors), model.config)
    else:
        shapes = {**eagle3_shapes(vocab // 2), "fc.weight": (H, len(taps) * H)}
        del shapes["embed_tokens.weight"]
        if kind == "p-eagle":
            shapes |= p_eagle_shapes()
            raw["mask_token_id"] = 7
        tensors = fill(shapes, 3)
        tensors["d2t"] = torch.arange(vocab // 2)  # every other token
        raw["draft_vocab_size"] = vocab // 2
        file = read_eagle3(checkpoint(raw, tensors), model.config, taps)
    made = ParallelDrafter if kind == "p-eagle" else FeatureDrafter
    return made(FeatureHead(file, own), attention)


def module_shapes(count: int = 3) -> dict[str, tuple[int, ...]]:
    """Several of MiMo's modules."""
    return {
        name.replace("mtp_layers.0", f"mtp_layers.{k}"): shape
        for k in range(count)
        for name, shape in nextn_shapes("mimo").items()
    }


def p_eagle_shapes() -> dict[str, tuple[int, ...]]:
    """What a P-EAGLE head of two layers has beside an EAGLE-3 head's tensors."""
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return {
        "mask_hidden": (1, 1, 3 * H),
        **{f"layers.1.{name}": (H,) for name in norms},
        **layer_shapes("layers.1."),
    }


def dflash_shapes(layers: int = 2, captures: int = 3) -> dict[str, tuple[int, ...]]:
    """The tensors of a DFlash head."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, captures * H), "hidden_norm.weight": (H,), "norm.weight": (H,),
    }  # fmt: skip
    for i in range(layers):
        prefix = f"layers.{i}."
        shapes |= layer_shapes(prefix)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            shapes[prefix + name] = (H,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (D,)
    return shapes


DFLASH: dict[str, Any] = {
    **CONFIG,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 4,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 3, 4]},
}
