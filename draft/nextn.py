"""NEXTN (multi-token prediction) modules: found by their tensors, given roles, one file a module.

They lie in the target's own checkpoint or in one beside it. Families differ in names, in the order
of a pair's halves and in whether norms multiply by 1 + w; a table says how. Blocks are dense or
DeepSeek's; other mixtures of experts are refused by name. Equations are draft/head.py's
(DeepSeek-V3, arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from spec_serve.draft.head_file import (
    HeadConfig,
    HeadError,
    HeadFile,
    Raw,
    block_config,
    checked,
    layers_in,
    sparse_block_config,
    with_presence,
)
from spec_serve.target.config import ModelConfig
from spec_serve.target.model import Weights

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Where a configuration says how many modules there are (often though their tensors are gone)."""


@dataclass(frozen=True, slots=True)
class Family:
    """How one family names a module's tensors.

    sign: a tensor of module k, with {k} for its number; {k} may count from the target's layers.
    own: (part of a module, role) by literal beginnings. layer: where its decoder layers stand.
    """

    name: str
    sign: str
    own: tuple[tuple[str, str], ...]
    layer: str
    hidden_first: bool = False
    zero_centred: bool = False
    behind_target: bool = False


_MIMO = (
    ("token_layernorm.", "embed_norm."),
    ("hidden_layernorm.", "feature_norm."),
    ("input_proj.", "join."),
    ("final_layernorm.", "norm."),
)
FAMILIES = (
    Family(
        "deepseek",
        "model.layers.{k}.eh_proj.weight",
        (
            ("enorm.", "embed_norm."),
            ("hnorm.", "feature_norm."),
            ("eh_proj.", "join."),
            ("shared_head.norm.", "norm."),
            ("shared_head.head.", "lm_head."),
            ("embed_tokens.", "embed_tokens."),
        ),
        "",
        behind_target=True,
    ),
    Family("mimo", "model.mtp_layers.{k}.input_proj.weight", _MIMO, "", hidden_first=True),
    # The container renames any family to MiMo's names; its heads have the embedding first.
    Family("speculators", "mtp_layers.{k}.input_proj.weight", _MIMO, ""),
    Family(
        "qwen3-next",
        "mtp.fc.weight",
        (
            ("pre_fc_norm_embedding.", "embed_norm."),
            ("pre_fc_norm_hidden.", "feature_norm."),
            ("fc.", "join."),
            ("norm.", "norm."),
        ),
        "layers.0.",
        zero_centred=True,
    ),
)
_ERNIE = "model.mtp_linear_proj.{k}.weight"
_ERNIE_OWN = (
    ("model.mtp_emb_norm.{k}.", "embed_norm."),
    ("model.mtp_hidden_norm.{k}.", "feature_norm."),
    ("model.mtp_linear_proj.{k}.", "join."),
    ("model.mtp_block.{k}.", "layers.0."),
)
_NOT_DENSE = (
    ("mlp.experts.", "a mixture of experts"),
    ("mlp.gate.weight", "a mixture of experts"),
    ("self_attn.kv_a_proj", "latent attention (MLA)"),
    ("linear_attn.", "linear attention"),
)


def is_nextn(names: Sequence[str]) -> bool:
    """By its tensors: a projection of a pair under one of the families' names."""
    return bool(_modules(set(names)))


def announced(raw: Raw) -> int:
    """How many modules a configuration speaks of, whether or not they are there."""
    inner = raw.get("text_config") or raw
    return max((int(inner.get(key) or 0) for key in COUNTS), default=0)


def _modules(names: set[str]) -> list[tuple[Family | None, int]]:
    """(family, number) of every module there is; None = Ernie's naming."""
    for family in (*FAMILIES, None):
        sign = _ERNIE if family is None else family.sign
        pattern = re.compile(re.escape(sign).replace(r"\{k\}", r"(\d+)"))
        numbers = [m for name in names if (m := pattern.fullmatch(name))]
        if numbers:
            return [(family, k) for k in sorted(int(m[1]) if m.groups() else 0 for m in numbers)]
    return []


def read_nextn(
    weights: Weights,
    target: ModelConfig,
    feedback: Literal["plain", "normed"] = "normed",
) -> list[HeadFile]:
    """Every module in `weights`, first to last, for this target.

    feedback: what a module reused for the next step is given, its output before or after its last
    norm. Raises HeadError naming what is missing or not supported.
    """
    raw = weights.config
    raw = {**raw, **(raw.get("text_config") or {})}
    names = set(weights.names())
    found = _modules(names)
    if not found:
        counted = announced(raw)
        what = f"the configuration speaks of {counted}, but " if counted else ""
        raise HeadError(f"nextn: {what}the checkpoint holds no NEXTN (MTP) tensors")
    files = [_read(family, k, names, raw, weights, target, feedback) for family, k in found]
    first = found[0][1]
    if [k for _, k in found] != list(range(first, first + len(found))):
        raise HeadError(f"nextn: modules are missing between those found: {[k for _, k in found]}")
    if found[0][0] is not None and found[0][0].behind_target and first != target.layers:
        raise HeadError(
            f"nextn: the first module is numbered {first}, the target has {target.layers} layers"
        )
    return files


def _read(
    family: Family | None, k: int, names: set[str], raw: dict[str, Any], weights: Weights,
    target: ModelConfig, feedback: Literal["plain", "normed"],
) -> HeadFile:  # fmt: skip
    roles = _ernie_roles(k, names) if family is None else _roles(family, k, names)
    sparse = _sparse(roles, raw)
    rotary = raw.get("partial_rotary_factor") or 1.0
    parameters = dict(raw.get("rope_parameters") or {})
    rotary = parameters.pop("partial_rotary_factor", None) or rotary
    inner = {**raw, "partial_rotary_factor": None, "rope_parameters": parameters or None}
    inner = dict(raw.get("transformer_layer_config") or inner)
    block = sparse or with_presence(block_config(inner, layers_in(roles)), roles)
    block = replace(block, zero_centred=family is not None and family.zero_centred)
    if block.hidden != target.hidden:
        raise HeadError(
            f"hidden_size: the NEXTN module has {block.hidden}, the target {target.hidden}"
        )
    query = roles.get("layers.0.self_attn.q_proj.weight")
    rows = 0 if query is None else int(weights.shape(query)[0])
    if "lm_head.weight" in roles:
        block = replace(block, vocab=int(weights.shape(roles["lm_head.weight"])[0]))
    elif "embed_tokens.weight" not in roles:
        block = replace(block, vocab=target.vocab)
    config = HeadConfig(
        format="nextn",
        block=block,
        target_hidden=target.hidden,
        taps=(target.layers,),
        draft_vocab=block.vocab,
        final_norm=True,
        hidden_first=family is not None and family.hidden_first,
        feedback=feedback,
        gated=rows == 2 * block.heads * block.head_dim,
        rotary=int(block.rotary * rotary),
    )
    needed = ["embed_norm.weight", "feature_norm.weight", "join.weight"]
    needed += ["layers.0.input_layernorm.weight"] + ["norm.weight"] * (family is not None)
    for role in needed:
        if role not in roles:
            raise HeadError(f"{role}: missing from NEXTN module {k}")
    return checked(HeadFile(config, roles, weights))


def _sparse(roles: Mapping[str, str], raw: Raw) -> ModelConfig | None:
    """The block of a module that is not dense; None = it is. HeadError for one that isn't known."""
    for role, name in roles.items():
        for part, what in _NOT_DENSE:
            if part not in role:
                continue
            mixture = any(".mlp.experts." in other for other in roles)
            latent = any("self_attn.kv_a_proj" in other for other in roles)
            block = sparse_block_config(raw, layers_in(roles), mixture) if latent else None
            if block is None:
                raise HeadError(f"{name}: NEXTN blocks with {what} are not supported")
            return block
    return None


def _roles(family: Family, k: int, names: set[str]) -> dict[str, str]:
    prefix = family.sign.format(k=k)
    for part, role in family.own:
        if role == "join." and prefix.endswith(part + "weight"):
            prefix = prefix.removesuffix(part + "weight")
    roles: dict[str, str] = {}
    for name in names:
        if not name.startswith(prefix):
            continue
        rest = name.removeprefix(prefix)
        for part, role in family.own:
            if rest.startswith(part):
                roles[role + rest.removeprefix(part)] = name
                break
        else:
            roles[rest if family.layer else "layers.0." + rest] = name
    return roles


def _ernie_roles(k: int, names: set[str]) -> dict[str, str]:
    roles: dict[str, str] = {}
    for part, role in _ERNIE_OWN:
        prefix = part.format(k=k)
        for name in names:
            if name.startswith(prefix):
                roles[role + name.removeprefix(prefix)] = name
    return roles
