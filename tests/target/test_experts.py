"""Mixtures of experts and latent attention: transformers' own models, bits, routing by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_serve.cache.tree import chain, root
from spec_serve.target.config import ConfigError, ModelConfig
from spec_serve.target.experts import Mixture, Router, StackedExperts
from spec_serve.target.latent import LatentAttention
from spec_serve.target.layers import Linear, activation, can_pack, gated
from spec_serve.target.model import load_model
from spec_serve.target.sparse import ExpertsConfig
from spec_serve.target.weights import open_checkpoint
from tests.late import Late
from tests.target.test_model import TOKENS, TREE, Session, close
from tests.tiny import tiny_config, tiny_model, write_tiny_model_dir

transformers = Late("transformers")

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
    "mscale_all_dim": 0.9,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-moe": ("qwen2-moe", {"mlp_only_layers": [1]}),
    "qwen2-moe-window": (
        "qwen2-moe",
        {"use_sliding_window": True, "sliding_window": 6, "qkv_bias": False},
    ),
    "qwen3-moe": ("qwen3-moe", {"decoder_sparse_step": 2}),
    "qwen3-moe-plain": ("qwen3-moe", {"norm_topk_prob": False}),
    "mixtral": ("mixtral", {}),
    "deepseek-v2": (
        "deepseek-v2",
        {"q_lora_rank": None, "rope_scaling": YARN, "attention_bias": True},
    ),
    "deepseek-v2-greedy": ("deepseek-v2", {"topk_method": "greedy", "attention_bias": True}),
    "deepseek-v3": ("deepseek-v3", {}),
    "deepseek-v3-halves": ("deepseek-v3", {"rope_interleave": False, "rope_scaling": YARN}),
}
LEAVES = (3, 6, 7, 8)  # of TREE


@pytest.mark.parametrize("variant", VARIANTS)
def test_files_on_disk_yield_transformers_logits(variant: str, tmp_path: Path) -> None:
    """A prompt in two chunks, then every path of a tree behind it."""
    family, overrides = VARIANTS[variant]
    write_tiny_model_dir(tmp_path, family, 3, **overrides)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    checkpoint = open_checkpoint(tmp_path)
    session = Session(load_model(checkpoint))
    checkpoint.close()
    with torch.inference_mode():
        wanted = theirs(torch.tensor([TOKENS])).logits[0]
    close(session.run((0, 0, chain(TOKENS[:7]))).logits, wanted[:7])
    close(session.run((1, 0, chain([5, 6])), (0, 7, chain(TOKENS[7:]))).logits[2:], wanted[7:])
    assert 1.5 < wanted.std() < 6
    out = session.run((1, 2, root(8)), (0, 20, TREE)).logits[1:]
    for leaf in LEAVES:
        path = TREE.path(leaf)
        with torch.inference_mode():
            ids = torch.tensor([TOKENS + [TREE.tokens[i] for i in path]])
            close(out[path], theirs(ids).logits[0, len(TOKENS) :])


@pytest.mark.parametrize("family", ["qwen2-moe", "deepseek-v2", "deepseek-v3"])
def test_company_and_what_unused_slots_hold_change_no_bit(family: str) -> None:
    if not can_pack(torch.float32):
        pytest.skip("torch's plain linear on this machine does not promise it")
    model = tiny_model(family, 3)
    plain = Session(model, exact=True)
    alone = [plain.run((0, i, root(token))).logits[0] for i, token in enumerate(TOKENS)]
    chunked = Session(model, exact=True)
    for kv in chunked.pool.layers:
        kv.k.fill_(float("nan"))
        kv.v.fill_(float("nan"))
    assert torch.equal(chunked.run((0, 0, chain(TOKENS))).logits, torch.stack(alone))
    out = chunked.run((1, 0, chain([1, 2, 3])), (0, 20, TREE)).logits[3:]
    for i, node in enumerate(TREE.path(LEAVES[-1])):
        # Along one path, token by token, in a pool that has not been poisoned.
        last = plain.run((0, 20 + i, root(TREE.tokens[node]))).logits[0]
        assert torch.equal(last, out[node])


def test_a_slot_keeps_one_latent_for_all_heads() -> None:
    model = tiny_model("deepseek-v3")
    spec = model.kv_specs[0]
    assert (spec.heads, spec.head_dim, spec.latent) == (1, 24, 16)
    assert spec.bytes_per_slot == 24 * 4
    kv = Session(model).pool.layers[0]
    assert kv.shared and kv.v.shape[1:] == (1, 16) and kv.v.data_ptr() == kv.k.data_ptr()
    attention = model.blocks[0].attention
    assert isinstance(attention, LatentAttention)


@pytest.mark.parametrize("family", ["qwen2-moe", "deepseek-v3"])
def test_half_precision_follows_float32(family: str) -> None:
    """Weights that can't be packed: experts in one tensor, heads in one product.

    Where two experts are nearly tied another may be chosen, so not every token's logits are close.
    """
    model = tiny_model(family, 3, torch.float16)
    mixture = model.blocks[-1].mlp
    assert isinstance(mixture, Mixture) and isinstance(mixture.experts, StackedExperts)
    wanted = Session(tiny_model(family, 3)).run((0, 0, chain(TOKENS))).logits
    got = Session(model).run((0, 0, chain(TOKENS))).logits
    assert got.isfinite().all()
    off = (got - wanted).abs().amax(1)
    assert off.median() < 0.05, off


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_threads_part_no_row_of_a_gate(name: str) -> None:
    """A row's bits are the same with any company, with threads whose shares end amid a row."""
    y = torch.randn(301, 1024, generator=torch.Generator().manual_seed(0)) * 3
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        whole = gated(y, activation(name))
        for size in (1, 7, 100, 299, 300):
            parts = [gated(part, activation(name)) for part in y.split(size)]
            assert torch.equal(torch.cat(parts), whole)
    finally:
        torch.set_num_threads(threads)
    gate, up = y.chunk(2, -1)
    torch.testing.assert_close(whole, activation(name)(gate) * up)


def router(logits: list[float], **options: Any) -> tuple[list[float], list[int]]:
    """What a token with these router logits gets."""
    correction = options.pop("correct", None)
    config = ExpertsConfig(len(logits), intermediate=1, layers=(True,), **options)
    gate = Linear(torch.tensor(logits)[:, None], pack=False)
    bias = None if correction is None else torch.tensor(correction)
    weights, chosen = Router(config, gate, bias)(torch.ones(1, 1))
    assert weights.dtype == torch.float32
    return weights[0].tolist(), chosen[0].tolist()


def soft(*logits: float) -> Tensor:
    return torch.tensor(logits).softmax(0)


def test_routing_by_hand() -> None:
    one, two = soft(1.0, 3.0, 2.0, 0.0)[[1, 2]].tolist()
    weights, chosen = router([1.0, 3.0, 2.0, 0.0], chosen=2, normalise=False, scale=2.0)
    assert chosen == [1, 2] and weights == pytest.approx([2 * one, 2 * two])
    weights, chosen = router([1.0, 3.0, 2.0, 0.0], chosen=2)
    assert chosen == [1, 2] and weights == pytest.approx([one / (one + two), two / (one + two)])
    # The best group is judged by its best expert, or by its two best.
    logits = [4.0, -9.0, 3.0, 2.9]
    assert router(logits, chosen=1, groups=2, kept_groups=1)[1] == [0]
    pair = {"groups": 2, "kept_groups": 1, "group_by": "pair", "scoring": "sigmoid"}
    assert router(logits, chosen=2, **pair)[1] == [2, 3]
    # A correction decides who is chosen, not with which weight.
    weights, chosen = router(
        [0.0, 0.0, 1.0], chosen=1, scoring="sigmoid", correct=[0.0, 0.9, 0.0], normalise=False
    )
    assert chosen == [1] and weights == [0.5]


def test_of_equal_experts_the_lower_number_is_chosen() -> None:
    assert router([1.0] * 64, chosen=4)[1] == [0, 1, 2, 3]
    assert router([0.0, 2.0, 1.0, 2.0, 2.0, 1.0], chosen=4)[1] == [1, 3, 4, 2]
    groups = {"groups": 4, "kept_groups": 2, "scoring": "sigmoid", "group_by": "pair"}
    assert router([1.0] * 8, chosen=3, **groups)[1] == [0, 1, 2]


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob: true"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc'"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        ("deepseek-v3", {"n_group": 3}, "n_group: 3 does not divide 8"),
        ("deepseek-v3", {"topk_group": 5}, "topk_group: 5 exceeds"),
        ("deepseek-v3", {"n_group": 8}, "n_group: groups of 1 expert"),
        ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank: missing"),
        ("deepseek-v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim: 7"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok: 6 exceeds the 5"),
        ("qwen3-moe", {"moe_intermediate_size": None}, "moe_intermediate_size: missing"),
    ],
)
def test_what_contradicts_itself_is_refused(
    family: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_checkpoint_config(tiny_config(family, **overrides))
