"""An EAGLE-3 head as it is trained: parameters under their names in the file, and its arithmetic.

The same equations as the head that drafts, but over whole sequences, with gradients, and with keys
and queries apart, because training needs keys of all tokens and queries of few. Knows no data and
no loss. Source: EAGLE-3 (arXiv 2503.01840), the plain form: embedding half first, residual from the
fused feature, the output fed back before its norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.draft.train.named import NamedWeights, rotate


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head. taps: target boundaries it reads. vocab: the target's, draft_vocab its own.

    eps, theta: of its norms and rotary embedding.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    taps: tuple[int, ...]
    eps: float
    theta: float
    max_positions: int


class EagleHead(NamedWeights):
    """Weights of a head, float32; autocast decides what products are computed in."""

    def __init__(self, shape: HeadShape) -> None:
        h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {
            "fc": (h, len(shape.taps) * h),
            "midlayer.self_attn.q_proj": (q, 2 * h),
            "midlayer.self_attn.k_proj": (kv, 2 * h),
            "midlayer.self_attn.v_proj": (kv, 2 * h),
            "midlayer.self_attn.o_proj": (h, q),
            "midlayer.mlp.gate_proj": (shape.intermediate, h),
            "midlayer.mlp.up_proj": (shape.intermediate, h),
            "midlayer.mlp.down_proj": (h, shape.intermediate),
            "lm_head": (shape.draft_vocab, h),
        }
        norms = (
            "midlayer.hidden_norm",
            "midlayer.input_layernorm",
            "midlayer.post_attention_layernorm",
            "norm",
        )
        super().__init__(sizes, dict.fromkeys(norms, h), len(shape.taps) * h)
        self.shape = shape

    def fuse(self, taps: Tensor) -> Tensor:
        """Tapped features [N, T * H] -> [N, H]."""
        return F.linear(taps / self.scale, self["fc"])

    def inputs(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """What attention reads: both halves normed side by side, [N, 2H]."""
        return torch.cat(
            (
                self._norm(embedded, "midlayer.input_layernorm"),
                self._norm(feature, "midlayer.hidden_norm"),
            ),
            -1,
        )

    def keys(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K (rotated) and V of pairs, [N, kv_heads, D] each."""
        shape = self.shape
        k = F.linear(inputs, self["midlayer.self_attn.k_proj"])
        v = F.linear(inputs, self["midlayer.self_attn.v_proj"])
        k = k.view(-1, shape.kv_heads, shape.head_dim)
        return rotate(k, positions, shape.theta), v.view(-1, shape.kv_heads, shape.head_dim)

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Q (rotated) of pairs, [N, heads, D]."""
        q = F.linear(inputs, self["midlayer.self_attn.q_proj"])
        return rotate(
            q.view(-1, self.shape.heads, self.shape.head_dim), positions, self.shape.theta
        )

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """Residual stream after the layer, [N, H]: what is fed back."""
        x = feature + F.linear(attended.flatten(1), self["midlayer.self_attn.o_proj"])
        y = self._norm(x, "midlayer.post_attention_layernorm")
        gate = F.linear(y, self["midlayer.mlp.gate_proj"])
        up = F.linear(y, self["midlayer.mlp.up_proj"])
        return x + F.linear(F.silu(gate) * up, self["midlayer.mlp.down_proj"])

    def logits(self, out: Tensor, ids: Tensor | None = None) -> Tensor:
        """Scores over the draft vocabulary, [N, D], or over these draft ids [C] of it."""
        rows: Tensor = self["lm_head"]
        return F.linear(self._norm(out, "norm"), rows if ids is None else rows[ids])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x.float(), (self.shape.hidden,), self[name], self.shape.eps)


def head_config(shape: HeadShape, **more: Any) -> dict[str, Any]:
    """config.json of a head in the SpecForge layout."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # Ids of layer outputs, as SpecForge counts: boundary b is the output of layer b - 1.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in shape.taps],
            "use_aux_hidden_state": True,
        },
        **more,
    }
