"""EAGLE-1 and EAGLE-2 heads: recognised, their configuration read, their tensors given roles.

The two share one format: a bias-or-not projection of (embedding, feature) and Llama layers, the
first without a norm before its attention; embedding and head are the target's. Equations are
draft/head.py's (Li et al. 2024, arXiv 2401.15077; SafeAILab/EAGLE, eagle/model/cnets1.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from spec_serve.draft.head_file import (
    HeadConfig,
    HeadError,
    HeadFile,
    block_config,
    checked,
    layers_in,
    strip,
    with_presence,
)
from spec_serve.target.config import ModelConfig
from spec_serve.target.model import Weights

PREFIXES = ("draft_model.", "model.")
_VARIANTS = ("embedding_layernorm.weight", "hidden_states_layernorm.weight")


def is_eagle(names: Sequence[str]) -> bool:
    """By its tensors: a projection, and a first layer without a norm before its attention."""
    held = strip(names, PREFIXES)
    first = "layers.0."
    return (
        "fc.weight" in held
        and f"{first}self_attn.q_proj.weight" in held
        and f"{first}input_layernorm.weight" not in held
        and f"{first}hidden_norm.weight" not in held
    )


def read_eagle(
    weights: Weights, target: ModelConfig, taps: tuple[int, ...] | None = None
) -> HeadFile:
    """The head in `weights` for this target. taps: as for others; this format has none to choose.

    Raises HeadError naming the key or the tensor that is at fault.
    """
    raw = weights.config
    roles = strip(list(weights.names()), PREFIXES)
    if raw.get("add_para_norm") or any(name in roles for name in _VARIANTS):
        raise HeadError("add_para_norm: EAGLE heads with norms before fc (HASS) are not supported")
    if taps not in (None, (target.layers,)):
        raise HeadError("taps: an EAGLE-1 head reads the target's last hidden state, nothing else")
    for name in ("fc.weight", "fc.bias"):
        if name in roles:
            roles[name.replace("fc.", "join.")] = roles.pop(name)
    if raw.get("bias") is True and "join.bias" not in roles:
        raise HeadError("fc.bias: missing from the head's checkpoint (bias: true)")
    block = with_presence(block_config(raw, layers_in(roles)), roles)
    if block.hidden != target.hidden:
        raise HeadError(
            f"hidden_size: the head reads features of {block.hidden}, the target's have"
            f" {target.hidden}; it was made for another model"
        )
    config = HeadConfig(
        format="eagle",
        block=block,
        target_hidden=target.hidden,
        taps=(target.layers,),
        draft_vocab=target.vocab,
        final_norm=True,
    )
    return checked(HeadFile(config, roles, weights))
