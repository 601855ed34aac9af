"""DFlash and DSpark heads: recognised, their configuration read, their tensors given roles.

A block drafter has whole Qwen3 layers and answers several positions in one pass; DSpark adds a
Markov head and lets the anchor predict as well. Layouts: z-lab's and SpecForge's (layer-output
ids), and the `speculators` container (boundaries). Equations are draft/block.py's (z-lab/dflash,
dflash/model.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spec_serve.draft.head_file import (
    HeadConfig,
    HeadError,
    HeadFile,
    Raw,
    block_config,
    checked,
    layers_in,
    strip,
    with_presence,
)
from spec_serve.target.config import ModelConfig
from spec_serve.target.model import Weights

PREFIXES = ("draft_model.", "model.")
_RENAMED = (
    ("fc.", "fuse."),
    ("hidden_norm.", "feature_norm."),
    ("markov_head.markov_w1.", "markov_w1."),
    ("markov_head.markov_w2.", "markov_w2."),
)
_IGNORED = ("verifier_norm.", "verifier_lm_head.", "confidence_head.")
_QWEN3: Raw = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
}  # fmt: skip


def default_taps(target: int, layers: int) -> tuple[int, ...]:
    """Boundaries a head of so many layers reads of a target of so many, if nothing is said."""
    if layers == 1:
        return (target // 2 + 1,)
    return tuple(round(1 + i * (target - 4) / (layers - 1)) + 1 for i in range(layers))


def is_dflash(names: Sequence[str]) -> bool:
    """By its tensors: whole layers below a projection and a norm of features."""
    held = strip(names, PREFIXES)
    return (
        "fc.weight" in held
        and "hidden_norm.weight" in held
        and "layers.0.input_layernorm.weight" in held
        and "layers.0.hidden_norm.weight" not in held
    )


def read_dflash(
    weights: Weights, target: ModelConfig, taps: tuple[int, ...] | None = None
) -> HeadFile:
    """The head in `weights` for this target. taps: boundaries to read whatever the file says.

    Raises HeadError naming the key or the tensor that is at fault.
    """
    raw = weights.config
    contained = bool(raw.get("speculators_model_type"))
    roles = _roles(list(weights.names()))
    own = raw.get("dflash_config") or {}
    layer = dict(raw.get("transformer_layer_config") or raw)
    if layer.get("sliding_window_non_causal") or raw.get("sliding_window_non_causal"):
        raise HeadError("sliding_window_non_causal: block drafters with a window are not supported")
    count = layers_in(roles)
    block = block_config({**layer, "model_type": "qwen3"}, count, _QWEN3 if contained else None)
    block = with_presence(block, roles)
    if block.hidden != target.hidden:
        raise HeadError(
            f"hidden_size: the head has {block.hidden}, the target {target.hidden}; it was made"
            " for another model"
        )
    mask = own.get("mask_token_id", raw.get("mask_token_id"))
    size = raw.get("block_size", own.get("block_size"))
    mask, size = _whole("mask_token_id", mask), _whole("block_size", size)
    anchor = bool(raw.get("sample_from_anchor", own.get("sample_from_anchor", False)))
    if size < (1 if anchor else 2):
        raise HeadError(f"block_size: a block of {size} guesses nothing")
    chosen = taps or _taps(raw, own, contained, target, count)
    outside = [tap for tap in chosen if not 0 <= tap <= target.layers]
    if outside:
        raise HeadError(
            f"target_layer_ids: boundary {outside[0]} is outside 0..{target.layers} of the target"
        )
    if "embed_tokens.weight" not in roles:
        block = replace(block, vocab=target.vocab)
    vocab = int(raw.get("draft_vocab_size") or block.vocab)
    config = HeadConfig(
        format="dspark" if "markov_w1.weight" in roles else "dflash",
        block=block,
        target_hidden=target.hidden,
        taps=chosen,
        draft_vocab=vocab,
        mask_token=mask,
        block_size=size,
        anchor_predicts=anchor,
    )
    needed = ["fuse.weight", "feature_norm.weight", "norm.weight"]
    needed += [f"layers.{i}.input_layernorm.weight" for i in range(count)]
    if vocab != block.vocab:
        needed += ["lm_head.weight", "d2t"]
    if config.format == "dspark":
        needed.append("markov_w2.weight")
    for role in needed:
        if role not in roles:
            raise HeadError(f"{role}: missing from the head's checkpoint ({config.format})")
    return checked(HeadFile(config, roles, weights))


def _whole(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise HeadError(f"{key}: {value!r} is not a whole number")
    return value


def _roles(names: Sequence[str]) -> dict[str, str]:
    roles: dict[str, str] = {}
    for role, name in strip(names, PREFIXES).items():
        if role.startswith(_IGNORED):
            continue
        for old, new in _RENAMED:
            if role.startswith(old):
                role = new + role.removeprefix(old)
        roles[role] = name
    return roles


def _taps(
    raw: Raw, own: Mapping[str, object], contained: bool, target: ModelConfig, layers: int
) -> tuple[int, ...]:
    """Boundaries: of layers whose output is meant, unless the container counts boundaries."""
    if contained and raw.get("aux_hidden_state_layer_ids"):
        return tuple(int(i) for i in raw["aux_hidden_state_layer_ids"])
    ids = own.get("target_layer_ids")
    if isinstance(ids, Sequence) and ids:
        return tuple(int(i) + 1 for i in ids)
    return default_taps(target.layers, layers)
