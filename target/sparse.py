"""What a mixture of experts and latent attention are: sizes, routing and names, from config.json.

Every family's way of routing is a setting of `ExpertsConfig`, and DeepSeek's attention is
`LatentConfig`; the recipes of target/families.py ask for them. Knows nothing of tensors; what is
computed is in target/experts.py and target/latent.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spec_serve.target.fields import ConfigError, Raw, count, natural, one_of


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of `count` experts, gated MLPs `intermediate` wide; a token gets `chosen` of them.

    layers: per layer, is its MLP a mixture. shared: width of the MLP every token gets besides, 0 =
    none; shared_gate: scaled by a sigmoid of the token. scoring: of the router's logits. normalise:
    weights of the chosen add up to 1 before `scale` multiplies them. groups: experts are chosen
    only from the `kept_groups` best groups, judged by their best expert ("max") or their two best
    ("pair"). correction: a bias per expert is added to scores while choosing, not to weights.
    wide_router: it runs in float32. block, expert, shared_name: names of tensors below a layer.
    """

    count: int
    chosen: int
    intermediate: int
    layers: tuple[bool, ...]
    shared: int = 0
    shared_gate: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_by: Literal["max", "pair"] = "max"
    correction: bool = False
    wide_router: bool = False
    block: str = "mlp"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_name: str = "mlp.shared_experts"

    def check(self, layers: int) -> None:
        """Raise ConfigError for numbers that contradict each other."""
        if len(self.layers) != layers:
            raise ConfigError(f"num_hidden_layers: {layers}, but {len(self.layers)} have MLPs")
        if self.count % self.groups:
            raise ConfigError(f"n_group: {self.groups} does not divide {self.count} experts")
        if self.kept_groups > self.groups:
            raise ConfigError(f"topk_group: {self.kept_groups} exceeds n_group = {self.groups}")
        each = self.count // self.groups
        if self.groups > 1 and self.group_by == "pair" and each < 2:
            raise ConfigError(f"n_group: groups of {each} expert; at least 2 are needed")
        if self.chosen > each * self.kept_groups:
            raise ConfigError(
                f"num_experts_per_tok: {self.chosen} exceeds the {each * self.kept_groups} experts"
                " there are to choose from"
            )


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention whose keys and values are made of one latent vector per token (DeepSeek-V2, arXiv
    2405.04434, section 2.1).

    kv_rank: its width. query_rank: width of the queries' own latent, 0 = none. nope, rope: channels
    of a query head without and with rotation. value: channels of a value head. interleaved: rotated
    channels are stored as pairs side by side. bias: on maps to the latents and on the output.
    """

    kv_rank: int
    query_rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool
    bias: bool

    @property
    def key(self) -> int:
        """Channels kept per token: the latent and the rotated key."""
        return self.kv_rank + self.rope

    def check(self) -> None:
        """Raise ConfigError for sizes that can't be."""
        if self.rope % 2:
            raise ConfigError(f"qk_rope_head_dim: {self.rope} is not an even number")


def qwen_experts(raw: Raw, layers: int, shared: bool) -> ExpertsConfig | None:
    """Qwen2-MoE (shared: with an expert for all, behind a gate) and Qwen3-MoE; None = all dense."""
    key = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    if not natural(raw, key):
        return None
    step = count(raw, "decoder_sparse_step", 1)
    dense = set(raw.get("mlp_only_layers") or ())
    return ExpertsConfig(
        count=count(raw, key),
        chosen=count(raw, "num_experts_per_tok"),
        intermediate=count(raw, "moe_intermediate_size"),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        shared=count(raw, "shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
        shared_name="mlp.shared_expert",
        normalise=bool(raw.get("norm_topk_prob", False)),
    )


def mixtral_experts(raw: Raw, layers: int) -> ExpertsConfig:
    """Mixtral: every layer is a mixture, weights of the chosen are normalised."""
    return ExpertsConfig(
        count=count(raw, "num_local_experts"),
        chosen=count(raw, "num_experts_per_tok"),
        intermediate=count(raw, "intermediate_size"),
        layers=(True,) * layers,
        block="block_sparse_moe",
        expert=("w1", "w3", "w2"),
    )


def deepseek_experts(raw: Raw, layers: int, third: bool) -> ExpertsConfig | None:
    """DeepSeek-V2's softmax and DeepSeek-V3's (third) sigmoid routing; None = all dense.

    arXiv 2405.04434, section 2.2, and 2412.19437, section 2.1.2.
    """
    if not natural(raw, "n_routed_experts"):
        return None
    limited: tuple[str, ...] = ("noaux_tc",) if third else ("greedy", "group_limited_greedy")
    method = one_of(raw, "topk_method", limited, limited[0])
    one_of(raw, "scoring_func", ("sigmoid",) if third else ("softmax",), "")
    normalise = bool(raw.get("norm_topk_prob", third))
    if normalise and not third:
        # The published code scales or normalises, others do both or neither.
        raise ConfigError("norm_topk_prob: true is not supported for DeepSeek-V2")
    width = count(raw, "moe_intermediate_size")
    first, every = natural(raw, "first_k_dense_replace"), count(raw, "moe_layer_freq", 1)
    grouped = method != "greedy"
    return ExpertsConfig(
        count=count(raw, "n_routed_experts"),
        chosen=count(raw, "num_experts_per_tok"),
        intermediate=width,
        layers=tuple(i >= first and i % every == 0 for i in range(layers)),
        shared=width * natural(raw, "n_shared_experts"),
        scoring="sigmoid" if third else "softmax",
        normalise=normalise,
        scale=float(raw.get("routed_scaling_factor") or 1.0),
        groups=count(raw, "n_group", 1) if grouped else 1,
        kept_groups=count(raw, "topk_group", 1) if grouped else 1,
        group_by="pair" if third else "max",
        correction=third,
        wide_router=True,
    )


def latent_attention(raw: Raw, interleaved: bool) -> LatentConfig:
    """The sizes of DeepSeek-V2's and V3's attention."""
    return LatentConfig(
        kv_rank=count(raw, "kv_lora_rank"),
        query_rank=natural(raw, "q_lora_rank"),
        nope=count(raw, "qk_nope_head_dim"),
        rope=count(raw, "qk_rope_head_dim"),
        value=count(raw, "v_head_dim"),
        interleaved=interleaved,
        bias=bool(raw.get("attention_bias", False)),
    )
