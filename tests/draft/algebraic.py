"""A target that says pi(x) after x, and heads for it whose acceptance is known beforehand.

Embedding rows are orthonormal and every other matrix of the target is zero, so a hidden state is
the token's own embedding at every boundary. Imported by tests only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spec_serve.draft.eagle import read_eagle
from spec_serve.draft.eagle3 import read_eagle3
from spec_serve.draft.feature import FeatureDrafter
from spec_serve.draft.head import FeatureHead, TargetParts
from spec_serve.draft.head_file import HeadFile
from spec_serve.draft.nextn import read_nextn
from spec_serve.kernels.reference import TorchAttention
from spec_serve.target.config import ModelConfig
from spec_serve.target.model import Transformer, expected_tensors, load_model
from tests.draft.heads import CONFIG, checkpoint

V, H, L, WIDE = 48, 64, 8, 128
RAW = {**CONFIG, "vocab_size": V, "num_hidden_layers": L}
PROMPT = (3, 17, 42, 5)
EYE, NONE = torch.eye(H), torch.zeros(H, H)


@cache
def table() -> Tensor:
    """[V, H] orthonormal rows of norm sqrt(H), as an RMS norm leaves them."""
    generator = torch.Generator().manual_seed(5)
    q, _ = torch.linalg.qr(torch.randn(H, H, generator=generator))
    return q[:V].contiguous() * H**0.5


@cache
def successor() -> Tensor:
    """[V] pi: one cycle over all tokens."""
    order = torch.randperm(V, generator=torch.Generator().manual_seed(6))
    following = torch.empty(V, dtype=torch.int64)
    following[order] = order.roll(-1)
    return following


def reading(ids: Tensor) -> Tensor:
    """Head rows that answer pi(x) to x's embedding, for the tokens `ids`."""
    before = torch.empty(V, dtype=torch.int64)
    before[successor()] = torch.arange(V)
    return table()[before[ids]]


@cache
def target() -> Transformer:
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(ModelConfig.from_checkpoint_config(RAW), "model."):
        tensors[name] = torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
    tensors["model.embed_tokens.weight"] = table()
    tensors["lm_head.weight"] = reading(torch.arange(V))
    return load_model(checkpoint(RAW, tensors), torch.float32)


def block(prefix: str, inputs: int = H) -> dict[str, Tensor]:
    """A layer that adds nothing."""
    q, kv = 64, 32
    return {
        prefix + "self_attn.q_proj.weight": torch.zeros(q, inputs),
        prefix + "self_attn.k_proj.weight": torch.zeros(kv, inputs),
        prefix + "self_attn.v_proj.weight": torch.zeros(kv, inputs),
        prefix + "self_attn.o_proj.weight": torch.zeros(H, q),
        prefix + "mlp.gate_proj.weight": torch.zeros(WIDE, H),
        prefix + "mlp.up_proj.weight": torch.zeros(WIDE, H),
        prefix + "mlp.down_proj.weight": torch.zeros(H, WIDE),
        prefix + "post_attention_layernorm.weight": torch.ones(H),
    }


def drafter(file: HeadFile) -> FeatureDrafter:
    return FeatureDrafter(FeatureHead(file, TargetParts.of(target())), TorchAttention())


def eagle(first: Tensor, second: Tensor) -> FeatureDrafter:
    tensors = {"fc.weight": torch.cat((first, second), 1), **block("layers.0.")}
    return drafter(read_eagle(checkpoint(RAW, tensors), target().config))


def nextn(hidden_first: bool) -> Callable[[Tensor, Tensor], FeatureDrafter]:
    def made(first: Tensor, second: Tensor) -> FeatureDrafter:
        prefix = "model.mtp_layers.0." if hidden_first else "mtp_layers.0."
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
        tensors = {
            prefix + "input_proj.weight": torch.cat((first, second), 1),
            **{f"{prefix}{name}.weight": torch.ones(H) for name in norms},
            **block(prefix),
        }
        (file,) = read_nextn(checkpoint(RAW, tensors), target().config)
        return drafter(file)

    return made


def eagle3(capture: int, ids: Tensor | None = None, **options: Any) -> FeatureDrafter:
    """Reads one of its three captures; its MLP turns E_x into E_pi(x).

    A pair (x', h_x) knows x from the capture and answers what follows x', its successor.
    """
    rows, following = table(), successor()
    scale = H**0.5
    layer = block("midlayer.", 2 * H)
    silu = 4.0 / (1.0 + torch.tensor(-4.0).exp())
    up = (rows[following].T @ rows - rows.T @ rows) / (silu * H)
    unit = rows / scale
    gate = (4.0 / scale) * unit.sum(0, keepdim=True).expand(WIDE, H)
    layer["midlayer.mlp.gate_proj.weight"] = gate.contiguous()
    layer["midlayer.mlp.up_proj.weight"] = torch.cat((up, torch.zeros(WIDE - H, H)))
    layer["midlayer.mlp.down_proj.weight"] = torch.eye(H, WIDE)
    fuse = torch.zeros(H, 3 * H)
    fuse[:, capture * H : (capture + 1) * H] = EYE
    kept = torch.arange(V) if ids is None else ids
    tensors: Mapping[str, Tensor] = {
        "fc.weight": fuse,
        "lm_head.weight": reading(kept),
        "norm.weight": torch.ones(H),
        "midlayer.hidden_norm.weight": torch.ones(H),
        "midlayer.input_layernorm.weight": torch.ones(H),
        **layer,
    }
    if ids is not None:
        tensors = {**tensors, "d2t": ids - torch.arange(len(ids))}
    raw = {**RAW, "draft_vocab_size": len(kept), **options}
    return drafter(read_eagle3(checkpoint(raw, tensors), target().config))
