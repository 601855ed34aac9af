"""EAGLE-3 heads: recognised, their configuration read, their tensors given roles.

Layouts: EAGLE's own, SpecForge's and SGLang's (AngelSlim and NVIDIA use it), and the `speculators`
container; P-EAGLE is the last with a mask token. Facts of the format only; the equations are those
of draft/head.py (Li et al. 2025, arXiv 2503.01840; SafeAILab/EAGLE, eagle/model/cnets.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^layers\.0\.input_layernorm\."), "embed_norm."),
    (re.compile(r"^layers\.0\.hidden_norm\."), "feature_norm."),
    (re.compile(r"^fc\."), "fuse."),
    (re.compile(r"^input_norm\."), "fuse_norm."),
    (re.compile(r"^fc_norm\."), "fuse_norms."),
)
# What a `speculators` file leaves out is the default of the class it is a difference to.
_DEFAULTS: Mapping[str, Raw] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
        "max_position_embeddings": 32768,
    },
}  # fmt: skip


def default_taps(layers: int) -> tuple[int, ...]:
    """Low, middle and high boundary of a target with so many layers."""
    return (2, layers // 2, layers - 3)


def is_eagle3(names: Sequence[str]) -> bool:
    """By its tensors: an attention input norm beside a norm of the feature, and no projection."""
    held = _roles(names)
    return "feature_norm.weight" in held and "layers.0.self_attn.q_proj.weight" in held


def _roles(names: Sequence[str]) -> dict[str, str]:
    """Role -> tensor; names no role is known for keep theirs."""
    roles: dict[str, str] = {}
    for role, name in strip(names, PREFIXES).items():
        more = re.match(r"additional_layers\.(\d+)\.(.+)", role)
        if more:  # SGLang counts the layers behind the first, and calls their norm another name
            rest = more[2].replace("hidden_norm.", "input_layernorm.")
            role = f"layers.{int(more[1]) + 1}.{rest}"
        for pattern, put in _RENAMED:
            role = pattern.sub(put, role)
        roles[role] = name
    return roles


def read_eagle3(
    weights: Weights, target: ModelConfig, taps: tuple[int, ...] | None = None
) -> HeadFile:
    """The head in `weights` for this target. taps: boundaries to read whatever the file says.

    Raises HeadError naming the key or the tensor that is at fault.
    """
    raw = weights.config
    contained = str(raw.get("speculators_model_type", "")) in ("eagle3", "peagle", "p-eagle")
    roles = _roles(list(weights.names()))
    for ignored in ("verifier_norm.weight", "verifier_lm_head.weight"):
        roles.pop(ignored, None)
    layer = dict(raw.get("transformer_layer_config") or {}) if contained else dict(raw)
    if contained and "norm_before_residual" not in raw:
        raise HeadError(
            "norm_before_residual: missing from the head's configuration; readers of this format"
            " disagree about its default, so it must be given"
        )
    kind = str(layer.get("model_type", "llama"))
    defaults = _DEFAULTS.get(kind, _DEFAULTS["llama"]) if contained else None
    block = block_config(layer, layers_in(roles), defaults)
    block = with_presence(block, roles)
    wide = int(raw.get("target_hidden_size") or block.hidden)
    if wide != target.hidden:
        raise HeadError(
            f"target_hidden_size: the head reads features of {wide}, the target's have"
            f" {target.hidden}; it was made for another model"
        )
    chosen, final_norm = _taps(raw, contained, target, taps)
    outside = [tap for tap in chosen if not 0 <= tap <= target.layers]
    if outside:
        raise HeadError(
            f"eagle_aux_hidden_state_layer_ids: boundary {outside[0]} is outside"
            f" 0..{target.layers} of the target"
        )
    vocab = int(raw.get("draft_vocab_size") or block.vocab)
    mask = _mask_token(raw, roles)
    config = HeadConfig(
        format="eagle3" if mask is None else "p-eagle",
        block=block,
        target_hidden=wide,
        taps=chosen,
        draft_vocab=vocab,
        final_norm=final_norm,
        normed_residual=bool(raw.get("norm_before_residual", False)),
        feedback="normed" if raw.get("norm_output") is True else "plain",
        mask_token=mask,
    )
    _check(config, roles, raw)
    return checked(HeadFile(config, roles, weights))


def _taps(
    raw: Raw, contained: bool, target: ModelConfig, taps: tuple[int, ...] | None
) -> tuple[tuple[int, ...], bool]:
    """Boundaries the head reads, and whether the target's final norm comes behind them.

    Two conventions are in use. `speculators` writes boundaries; elsewhere a list whose first id is
    1 means layers whose output is read (boundary = id + 1), any other list boundaries.
    """
    nested = raw.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        return taps or (target.layers,), not taps
    if taps is not None:
        return taps, False
    key = "eagle_aux_hidden_state_layer_ids"
    ids = raw.get(key) or nested.get(key)
    if ids and not contained and int(ids[0]) == 1:
        ids = [int(i) + 1 for i in ids]
    if ids:
        return tuple(int(i) for i in ids), False
    if target.layers < 4:
        raise HeadError(
            f"eagle_aux_hidden_state_layer_ids: missing, and a target of {target.layers} layers"
            " has no low, middle and high boundary"
        )
    return default_taps(target.layers), False


def _mask_token(raw: Raw, roles: Mapping[str, str]) -> int | None:
    if "mask_hidden" not in roles:
        return None
    for key in ("mask_token_id", "ptd_token_id", "pard_token"):
        if raw.get(key) is not None:
            return int(raw[key])
    raise HeadError("mask_token_id: missing, though the head has mask_hidden (P-EAGLE)")


def _check(config: HeadConfig, roles: Mapping[str, str], raw: Raw) -> None:
    """Contradictions that shapes alone do not show."""
    needed = ["norm.weight", "feature_norm.weight", "embed_norm.weight"]
    if not config.final_norm:
        needed.append("fuse.weight")
    if raw.get("norm_before_fc"):
        needed.append("fuse_norm.weight")
    if raw.get("fc_norm"):
        needed += [f"fuse_norms.{i}.weight" for i in range(len(config.taps))]
    narrow = config.block.hidden != config.target_hidden
    if narrow:
        needed.append("embed_tokens.weight")
    if narrow or config.draft_vocab != config.block.vocab:
        needed.append("lm_head.weight")
    if config.draft_vocab != config.block.vocab:
        needed.append("d2t")
    for role in needed:
        if role not in roles:
            raise HeadError(f"{role}: missing from the head's checkpoint ({config.format})")
