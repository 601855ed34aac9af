"""What a model is: sizes, RoPE, norms, windows, read from a checkpoint's config.json.

Both generations of the file are understood: `rope_theta` + `rope_scaling` and transformers 5's
`rope_parameters`, flat or one per kind of layer. What a checkpoint asks for and this program does
not do is refused by name. Knows nothing of tensors, devices or files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spec_serve.target.families import FAMILIES, Family
from spec_serve.target.fields import ConfigError as ConfigError
from spec_serve.target.fields import Raw, count
from spec_serve.target.quantised_config import SchemeError, read_scheme
from spec_serve.target.sparse import ExpertsConfig, LatentConfig

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "freqs")
LAYER_TYPES = ("full_attention", "sliding_attention")
PARTIAL = "partial_rotary_factor: only 1.0 (the whole head) is supported"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding over the whole head.

    kind: default; linear (frequencies / factor); llama3 and yarn (frequencies scaled by
    wavelength); freqs (frequencies / `divisors`, one per pair of channels). attention_factor
    multiplies cos and sin.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with pre-norm blocks, RoPE and gated MLPs.

    vocab: rows of the embedding. windows: per layer, None = sees everything. local_rope: RoPE of
    the layers with a window, None = as the others. zero_centred: norms multiply by 1 + w.
    sandwich_norms: attention and MLP outputs are normed before they join the residual stream.
    experts: layers whose MLP is a mixture. latent: attention over latents; head_dim is then that
    of a query, kv_heads means nothing, and rotation is over `latent.rope` channels.
    """

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    zero_centred: bool
    sandwich_norms: bool
    windows: tuple[int | None, ...]
    embed_scale: float
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    activation: str
    max_context: int
    eos: tuple[int, ...]
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None

    @classmethod
    def from_checkpoint_config(cls, raw: Raw) -> ModelConfig:
        """Read a config.json's content. Raises ConfigError naming the key that is at fault."""
        if "text_config" in raw and "hidden_size" not in raw:
            text = dict(raw["text_config"])
            text.setdefault("architectures", raw.get("architectures"))
            text.setdefault("eos_token_id", raw.get("eos_token_id"))
            text.setdefault("quantization_config", raw.get("quantization_config"))
            if "tie_word_embeddings" in raw:
                text.setdefault("tie_word_embeddings", raw["tie_word_embeddings"])
            raw = text
        family = find_family(raw)
        try:
            read_scheme(raw)
        except SchemeError as error:
            raise ConfigError(str(error)) from error
        if raw.get("use_bidirectional_attention"):
            raise ConfigError("use_bidirectional_attention: only causal attention is supported")
        for kind in raw.get("layer_types") or ():
            if kind not in LAYER_TYPES:
                raise ConfigError(
                    f"layer_types: {kind!r} is not supported; supported: {', '.join(LAYER_TYPES)}"
                )
        if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ConfigError(PARTIAL)
        hidden, heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
        layers = count(raw, "num_hidden_layers")
        kv_heads = count(raw, "num_key_value_heads", heads)
        fields: dict[str, Any] = {
            "family": family.name,
            "vocab": count(raw, "vocab_size"),
            "hidden": hidden,
            "layers": layers,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": raw.get("head_dim") or hidden // heads,
            "intermediate": count(raw, "intermediate_size"),
            "eps": float(raw.get("rms_norm_eps", 1e-6)),
            "tied_head": bool(raw.get("tie_word_embeddings", family.name == "gemma3")),
            "qkv_bias": False,
            "o_bias": False,
            "mlp_bias": False,
            "qk_norm": False,
            "zero_centred": False,
            "sandwich_norms": False,
            "windows": (None,) * layers,
            "embed_scale": 1.0,
            "attention_softcap": None,
            "logit_softcap": None,
            "activation": raw.get("hidden_act") or "silu",
            "max_context": count(raw, "max_position_embeddings"),
            "eos": _ids(raw.get("eos_token_id")),
        }
        fields["rope"], fields["local_rope"] = _ropes(raw, fields["max_context"])
        fields.update(family.read(raw, layers))
        fields.setdefault("attention_scale", fields["head_dim"] ** -0.5)
        config = cls(**fields)
        config._check()
        return config

    @property
    def rotary(self) -> int:
        """Channels of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope

    def _check(self) -> None:
        if self.experts is not None:
            self.experts.check(self.layers)
        if self.latent is not None:
            self.latent.check()
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"num_key_value_heads: {self.kv_heads} does not divide "
                f"num_attention_heads = {self.heads}"
            )
        if self.head_dim <= 0 or self.head_dim % 2:
            raise ConfigError(f"head_dim: {self.head_dim} is not a positive even number")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"hidden_act: {self.activation!r} is not supported; "
                f"supported: {', '.join(ACTIVATIONS)}"
            )
        if len(self.windows) != self.layers:
            raise ConfigError(
                f"layer_types: {len(self.windows)} entries for num_hidden_layers = {self.layers}"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ConfigError("sliding_window: must be at least 1")
        for rope in (self.rope, self.local_rope):
            pairs = self.rotary // 2
            if rope is not None and rope.kind == "freqs" and len(rope.divisors) != pairs:
                raise ConfigError(
                    f"rope_parameters.divisors: {len(rope.divisors)} values; "
                    f"head_dim = {self.head_dim} needs {pairs}"
                )


def find_family(raw: Raw) -> Family:
    """The recipe for a config.json: by its first architecture, else by its model_type."""
    names = raw.get("architectures") or ()
    kind = raw.get("model_type")
    for family in FAMILIES:
        if names[0] in family.architectures if names else kind in family.model_types:
            return family
    asked = f"architectures: {names[0]!r}" if names else f"model_type: {kind!r}"
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ConfigError(f"{asked} is not supported; supported: {known}")


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, Sequence) else (int(str(value)),)


def _ropes(raw: Raw, context: int) -> tuple[RopeConfig, RopeConfig | None]:
    """RoPE of the full layers, and that of the sliding ones where it differs."""
    theta = float(raw.get("rope_theta") or 10000.0)
    given = raw.get("rope_parameters") or {}
    if "full_attention" in given:
        local = given.get("sliding_attention")
        full = _rope(given["full_attention"], theta, context)
        return full, _rope(local, theta, context) if local is not None else None
    scaling = {**(raw.get("rope_scaling") or {}), **given}
    if "original_max_position_embeddings" in raw:
        original = raw["original_max_position_embeddings"]
        scaling.setdefault("original_max_position_embeddings", original)
    if find_family(raw).name != "gemma3":
        return _rope(scaling, theta, context), None
    if "rope_theta" not in raw and "rope_theta" not in given:
        theta = 1_000_000.0
    local_theta = float(raw.get("rope_local_base_freq") or 10000.0)
    return _rope(scaling, theta, context), RopeConfig(local_theta)


def _rope(given: Raw, theta: float, context: int) -> RopeConfig:
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = float(given.get("rope_theta") or theta)
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"rope_type: {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(PARTIAL)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "freqs":
        divisors = given.get("divisors")
        if divisors is None:
            raise ConfigError("rope_parameters.divisors: missing for rope_type 'freqs'")
        return RopeConfig(theta, kind, divisors=tuple(float(v) for v in divisors))
    original = int(given.get("original_max_position_embeddings") or context)
    factor = given.get("factor")
    if factor is None and kind == "yarn":
        factor = context / original
    if factor is None or float(factor) <= 0:
        raise ConfigError(f"rope_scaling.factor: {factor!r} does not suit rope_type {kind!r}")
    factor = float(factor)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            if key not in given:
                raise ConfigError(f"rope_scaling.{key}: missing for rope_type 'llama3'")
        low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
        if not 0 < low < high:
            raise ConfigError("rope_scaling.low_freq_factor: must lie below high_freq_factor")
        return RopeConfig(theta, kind, factor, original, low, high)
    return RopeConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_yarn_attention(given, factor),
    )


def _yarn_attention(given: Raw, factor: float) -> float:
    """YaRN's temperature as a factor on cos and sin: 0.1 m ln(s) + 1, or a ratio of two such."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    top, bottom = given.get("mscale"), given.get("mscale_all_dim")
    return grown(float(top)) / grown(float(bottom)) if top and bottom else grown(1.0)
