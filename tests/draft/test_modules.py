"""NEXTN in its rarer forms: several modules against the chain written out, Qwen3-Next's block."""

from __future__ import annotations

import torch
from torch import Tensor

from spec_serve.draft.feature import FeatureDrafter
from spec_serve.draft.head import FeatureHead
from spec_serve.draft.modules import ModulesDrafter
from spec_serve.draft.nextn import read_nextn
from spec_serve.kernels.reference import TorchAttention
from tests.draft.heads import (
    CONFIG,
    NH,
    NK,
    PROMPT,
    SAMPLED,
    D,
    H,
    V,
    bound,
    checkpoint,
    features,
    fill,
    module_shapes,
    nextn_shapes,
    parts,
    propose,
    seen_of,
    target_config,
)

TOKENS = (*PROMPT, SAMPLED)
TAPS = features(9, H)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: Tensor, channels: int = D) -> Tensor:
    """Rotary embedding of the first `channels` of x [n, heads, D], positions 0..n-1."""
    angle = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(0, channels, 2) / channels)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :channels].chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., channels:]), -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(NH // NK, 1) for x in (k, v))
    score = torch.einsum("qhd,khd->hqk", q, k) / D**0.5
    score = score.masked_fill(~torch.ones(len(q), len(q)).tril().bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", score.softmax(-1), v)


def module(held: dict[str, Tensor], k: int, tokens: Tensor, before: Tensor) -> Tensor:
    """z [n, H] of MiMo's module k over pairs (tokens [n], what stood before them [n, H])."""

    def at(name: str) -> Tensor:
        return held[f"model.mtp_layers.{k}.{name}"]

    def linear(name: str, x: Tensor) -> Tensor:
        out = x @ at(name + ".weight").T
        bias = held.get(f"model.mtp_layers.{k}.{name}.bias")
        return out if bias is None else out + bias

    e = norm(held["model.embed_tokens.weight"][tokens], at("token_layernorm.weight"))
    x = linear("input_proj", torch.cat((norm(before, at("hidden_layernorm.weight")), e), 1))
    y = norm(x, at("input_layernorm.weight"))
    q, key, v = (linear(f"self_attn.{p}_proj", y).view(len(x), -1, D) for p in "qkv")
    x = x + linear("self_attn.o_proj", attended(turned(q), turned(key), v).reshape(len(x), -1))
    y = norm(x, at("post_attention_layernorm.weight"))
    gate = torch.nn.functional.silu(linear("mlp.gate_proj", y))
    x = x + linear("mlp.down_proj", gate * linear("mlp.up_proj", y))
    return norm(x, at("final_layernorm.weight"))


def three() -> dict[str, Tensor]:
    return fill(module_shapes(), 77)


def drafter(held: dict[str, Tensor]) -> ModulesDrafter:
    files = read_nextn(checkpoint(CONFIG, held), target_config())
    assert len(files) == 3
    own = parts(held["model.embed_tokens.weight"], held["lm_head.weight"])
    return ModulesDrafter([FeatureHead(file, own) for file in files], TorchAttention())


def written_out(held: dict[str, Tensor]) -> list[int]:
    """Greedy guesses: module k for guess k, each over all pairs it can have."""
    tokens = list(TOKENS)
    before = TAPS
    for k in range(3):
        # Pair i of module k: token i + 1 + k, and what module k - 1 made of the pair before it.
        ids = torch.tensor(tokens[1 + k :])
        before = module(held, k, ids, before)
        tokens.append(int((before[-1] @ held["lm_head.weight"].T).argmax()))
    return tokens[-3:]


def test_each_module_makes_its_own_guess() -> None:
    held = three()
    made = drafter(held)
    bound(made)
    guesses = propose(made, seen_of(TOKENS, TAPS), 3, 1, 3).tokens[0].tolist()
    assert guesses == written_out(held)
    assert len(propose(made, seen_of(TOKENS, TAPS), 6, 1, 6).tokens[0]) == 6, "the last again"


def test_outputs_kept_in_the_slots_are_found_by_the_next_step() -> None:
    held = three()
    whole, pieces = drafter(held), drafter(held)
    bound(whole)
    bound(pieces)
    wanted = propose(whole, seen_of(TOKENS, TAPS), 4, 2, 12)
    for end in range(1, len(TOKENS) + 1):
        # One token at a time, the first alone: even module 3 begins in the middle of nothing.
        chunk = seen_of(TOKENS[:end], TAPS[: end - 1], end - 1)
        if end > 1:
            found = propose(pieces, chunk, 4, 2, 12)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    torch.testing.assert_close(found.score, wanted.score, atol=1e-4, rtol=0)


def test_qwen3_next_gates_its_heads_and_turns_a_part_of_them() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        name.replace("model.mtp_layers.0.", "mtp.layers.0."): shape
        for name, shape in nextn_shapes("mimo").items()
        if ".self_attn." in name or ".mlp." in name
        if not name.endswith(".bias")
    }
    shapes["mtp.layers.0.self_attn.q_proj.weight"] = (2 * NH * D, H)
    shapes |= {f"mtp.layers.0.self_attn.{n}_norm.weight": (D,) for n in "qk"}
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.input_layernorm")
    shapes |= {f"mtp.{n}.weight": (H,) for n in (*names, "layers.0.post_attention_layernorm")}
    held = fill({**shapes, "mtp.fc.weight": (H, 2 * H)}, 78)
    table = fill({"embed_tokens.weight": (V, H), "head.weight": (V, H)}, 79)
    raw = {**CONFIG, "model_type": "qwen3_next", "partial_rotary_factor": 0.25}
    (file,) = read_nextn(checkpoint(raw, held), target_config())
    assert file.config.gated and file.config.rotary == 4 and file.config.block.zero_centred
    own = parts(table["embed_tokens.weight"], table["head.weight"])
    made = FeatureDrafter(FeatureHead(file, own), TorchAttention())
    bound(made)
    trees = propose(made, seen_of(TOKENS, TAPS), 1, 3, 3)

    def at(name: str) -> Tensor:
        return held[f"mtp.{name}.weight"]

    e = norm(table["embed_tokens.weight"][list(TOKENS[1:])], 1 + at("pre_fc_norm_embedding"))
    x = torch.cat((e, norm(TAPS, 1 + at("pre_fc_norm_hidden"))), 1) @ at("fc").T
    y = norm(x, 1 + at("layers.0.input_layernorm"))
    q, gate = (y @ at("layers.0.self_attn.q_proj").T).view(-1, NH, 2 * D).chunk(2, -1)
    k, v = ((y @ at(f"layers.0.self_attn.{n}_proj").T).view(-1, NK, D) for n in "kv")
    q = turned(norm(q, 1 + at("layers.0.self_attn.q_norm")), 4)
    k = turned(norm(k, 1 + at("layers.0.self_attn.k_norm")), 4)
    mixed = attended(q, k, v).reshape(len(x), -1) * gate.reshape(len(x), -1).sigmoid()
    x = x + mixed @ at("layers.0.self_attn.o_proj").T
    y = norm(x, 1 + at("layers.0.post_attention_layernorm"))
    act = torch.nn.functional.silu(y @ at("layers.0.mlp.gate_proj").T)
    x = x + (act * (y @ at("layers.0.mlp.up_proj").T)) @ at("layers.0.mlp.down_proj").T
    best = (norm(x, 1 + at("norm"))[-1] @ table["head.weight"].T).log_softmax(-1).topk(3)
    assert trees.tokens[0].tolist() == best.indices.tolist()
    torch.testing.assert_close(trees.score[0], best.values, atol=1e-4, rtol=0)


def test_ernie_has_no_norm_behind_its_block() -> None:
    held = {n: x for n, x in fill(nextn_shapes("mimo"), 80).items() if not n.endswith(".bias")}
    prefix = "model.mtp_layers.0."
    held[prefix + "final_layernorm.weight"] = torch.ones(H)
    names = {
        "token_layernorm": "mtp_emb_norm.0", "hidden_layernorm": "mtp_hidden_norm.0",
        "input_proj": "mtp_linear_proj.0",
    }  # fmt: skip
    ernie = {}
    for name, tensor in held.items():
        rest = name.removeprefix(prefix).removesuffix(".weight")
        if name.startswith(prefix) and rest != "final_layernorm":
            ernie[f"model.{names.get(rest, f'mtp_block.0.{rest}')}.weight"] = tensor
    swapped = held[prefix + "input_proj.weight"].chunk(2, 1)
    ernie["model.mtp_linear_proj.0.weight"] = torch.cat(swapped[::-1], 1)  # the embedding first
    (file,) = read_nextn(checkpoint(CONFIG, ernie), target_config())
    own = parts(held["model.embed_tokens.weight"], held["lm_head.weight"])
    made = FeatureDrafter(FeatureHead(file, own), TorchAttention())
    bound(made)
    trees = propose(made, seen_of(TOKENS, TAPS), 1, 3, 3)
    # A norm with weights of one changes the size of all logits, not their order.
    logits = module(held, 0, torch.tensor(TOKENS[1:]), TAPS)[-1] @ held["lm_head.weight"].T
    assert trees.tokens[0].tolist() == logits.topk(3).indices.tolist()
