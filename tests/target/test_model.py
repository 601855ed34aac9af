"""The transformer against transformers' own models, built from the same random tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import TokenTree, chain, root
from spec_serve.kernels.reference import TorchAttention
from spec_serve.target.config import ConfigError
from spec_serve.target.layers import FEWEST, Linear, RMSNorm, can_pack, tier
from spec_serve.target.model import TargetOut, Transformer, load_model
from tests.late import Late
from tests.tiny import (
    FAMILIES,
    VOCAB,
    MemoryCheckpoint,
    noisy_copy,
    tiny_checkpoint,
    tiny_model,
    tiny_tokenizer,
    write_tiny_model_dir,
)

transformers = Late("transformers")
modeling_gemma3 = Late("transformers.models.gemma3.modeling_gemma3")

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PER_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 8.0},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_scaling": LINEAR}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-yarn": ("llama", {"rope_scaling": YARN, "rope_theta": 1e6}),
    "llama-mha-gelu": ("llama", {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    "llama-one-kv": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-rope5": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 30000.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_scaling": YARN}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-yarn": ("qwen3", {"rope_scaling": {**YARN, "attention_factor": 1.3}}),
    "gemma3": ("gemma3", {}),
    "gemma3-linear": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3-rope5": ("gemma3", {"rope_parameters": PER_KIND}),
    "gemma3-cap": ("gemma3", {"final_logit_softcapping": 5.0}),
}
TOKENS = [17, 3, 250, 9, 9, 101, 44, 260, 5, 78, 199, 31, 3, 250, 64, 12, 7, 8, 90, 222]
TREE = TokenTree(
    (40, 11, 12, 13, 11, 11, 21, 22, 21), (-1, 0, 0, 1, 1, 2, 4, 4, 5), 1
)  # several branches; the same tokens on different paths


@functools.cache
def checkpoint(variant: str) -> MemoryCheckpoint:
    family, overrides = VARIANTS[variant]
    return tiny_checkpoint(family, 3, **overrides)


@functools.cache
def ours(variant: str) -> Transformer:
    return load_model(checkpoint(variant))


@functools.cache
def theirs(variant: str) -> Any:
    held = checkpoint(variant)
    raw = {key: value for key, value in held.config.items() if key != "torch_dtype"}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**raw), attn_implementation="eager"
    ).eval()
    tensors = dict(held.tensors)
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    model.load_state_dict(tensors)
    return model


class Session:
    """A pool of 200 slots and whole rows on it."""

    def __init__(self, model: Transformer, exact: bool = False) -> None:
        self.model = model
        self.pool = KVPool(model.kv_specs, 200, 4, 100)
        self.backend = TorchAttention(exact)
        self.free = 1

    def run(self, *parts: tuple[int, int, TokenTree], taps: tuple[int, ...] = ()) -> TargetOut:
        """parts: (row, cached tokens, tree); the nodes of chains join the row's table."""
        twigs = []
        for row, prefix, tree in parts:
            slots = list(range(self.free, self.free + len(tree)))
            self.free += len(tree)
            twigs.append(Twig(row, prefix, tree, slots, 0))
        batch = build_batch(twigs)
        out = self.model.forward(
            batch, self.pool.layers, self.backend.plan(batch, self.pool.table), taps
        )
        for twig in twigs:
            if twig.tree.is_chain:
                self.pool.assign(twig.row, twig.prefix, twig.slots)
        return out


@torch.inference_mode()
def reference(variant: str, tokens: Sequence[int]) -> Any:
    return theirs(variant)(torch.tensor([tokens]), output_hidden_states=True)


def close(got: Tensor, wanted: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_taps(variant: str) -> None:
    model = ours(variant)
    layers = model.config.layers
    out = Session(model).run((0, 0, chain(TOKENS)), taps=tuple(range(layers)))
    wanted = reference(variant, TOKENS)
    assert out.logits.dtype == torch.float32
    close(out.logits, wanted.logits[0])
    assert 1.5 < out.logits.std() < 5
    assert out.taps is not None
    for b, tap in enumerate(out.taps.split(model.config.hidden, -1)):
        close(tap, wanted.hidden_states[b][0], 5e-4 if "gemma" in variant else 1e-4)
    close(out.hidden, wanted.hidden_states[layers][0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_decoding_and_trees(variant: str) -> None:
    """Prefill in chunks beside a neighbour, two decoding steps, then a tree: each path is plain."""
    session = Session(ours(variant))
    wanted = reference(variant, TOKENS).logits[0]
    close(session.run((0, 0, chain(TOKENS[:7]))).logits, wanted[:7])
    out = session.run((1, 0, chain([5, 6, 7])), (0, 7, chain(TOKENS[7:18])))
    close(out.logits[3:], wanted[7:18])
    close(session.run((0, 18, root(TOKENS[18]))).logits, wanted[18:19])
    close(session.run((0, 19, root(TOKENS[19]))).logits, wanted[19:])
    out = session.run((1, 3, root(8)), (0, 20, TREE))
    for node in range(len(TREE)):
        path = [TREE.tokens[i] for i in TREE.path(node)]
        close(out.logits[1 + node], reference(variant, TOKENS + path).logits[0, -1])


def test_attention_softcap_reaches_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' Gemma 3 reads the cap but does not apply it, so it is put into its formula."""
    capped = functools.partial(modeling_gemma3.eager_attention_forward, softcap=2.0)
    monkeypatch.setattr(modeling_gemma3.real(), "eager_attention_forward", capped)
    model = tiny_model("gemma3", 3, attn_logit_softcapping=2.0)
    wanted = reference("gemma3", TOKENS).logits[0]
    close(Session(model).run((0, 0, chain(TOKENS))).logits, wanted)
    close(Session(model, exact=True).run((0, 0, chain(TOKENS))).logits, wanted)
    monkeypatch.undo()
    assert (wanted - reference("gemma3", TOKENS).logits[0]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_company_changes_no_bit(family: str, dtype: torch.dtype) -> None:
    """With exact attention a token's logits are the same bits alone, in a chunk and in a tree."""
    if not can_pack(dtype):
        pytest.skip("torch's plain linear on this machine does not promise it")
    model = tiny_model(family, 3, dtype)
    plain = Session(model, exact=True)
    alone = [plain.run((0, i, root(token))).logits[0] for i, token in enumerate(TOKENS)]
    chunked = Session(model, exact=True)
    out = chunked.run((0, 0, chain(TOKENS)))
    assert torch.equal(out.logits, torch.stack(alone))
    out = chunked.run((1, 0, chain([1, 2])), (0, 20, TREE))
    for node in range(len(TREE)):
        session = Session(model, exact=True)
        session.run((0, 0, chain(TOKENS)))
        for i, at in enumerate(TREE.path(node)):
            last = session.run((0, 20 + i, root(TREE.tokens[at])))
        assert torch.equal(last.logits[0], out.logits[2 + node])


def test_taps_come_in_the_order_asked() -> None:
    model = ours("llama")
    hidden = model.config.hidden
    out = Session(model).run((0, 0, chain(TOKENS)), taps=(3, 0, 3, 1))
    every = Session(model).run((0, 0, chain(TOKENS)), taps=(0, 1, 2, 3))
    assert out.taps is not None and every.taps is not None
    assert out.taps.shape == (len(TOKENS), 4 * hidden)
    parts = every.taps.split(hidden, -1)
    assert torch.equal(out.taps, torch.cat((parts[3], parts[0], parts[3], parts[1]), -1))
    with torch.inference_mode():
        assert torch.equal(model.norm(parts[3]), out.hidden)  # L lies before the final norm
        close(model.head(out.hidden), out.logits, 0)
        close(model.embed(torch.tensor(TOKENS)), parts[0], 0)
    assert Session(model).run((0, 0, chain(TOKENS))).taps is None
    with pytest.raises(ValueError, match="boundary 4 is outside 0..3"):
        Session(model).run((0, 0, chain(TOKENS)), taps=(4,))


def test_logits_only_where_they_are_wanted() -> None:
    model = ours("qwen2")
    pool = KVPool(model.kv_specs, 50, 2, 30)
    twigs = [
        Twig(0, 0, chain(TOKENS), range(1, 21), len(TOKENS) - 1),
        Twig(1, 0, chain([4, 5, 6]), range(21, 24), 3),
    ]
    batch = build_batch(twigs)
    plan = TorchAttention().plan(batch, pool.table)
    out = model.forward(batch, pool.layers, plan)
    assert out.logits.shape == (1, VOCAB)
    close(out.logits[0], reference("qwen2", TOKENS).logits[0, -1])
    batch = build_batch(twigs[1:])
    plan = TorchAttention().plan(batch, pool.table)
    out = model.forward(batch, pool.layers, plan)
    assert out.logits.shape == (0, VOCAB) and out.hidden.shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_follows_float32(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, 3, dtype)
    assert {spec.dtype for spec in model.kv_specs} == {dtype}
    session = Session(model)
    out = session.run((0, 0, chain(TOKENS)), taps=(1,))
    wanted = Session(tiny_model(family, 3)).run((0, 0, chain(TOKENS)))
    assert out.logits.dtype == torch.float32 and out.taps is not None and out.taps.dtype == dtype
    assert (out.logits - wanted.logits).abs().max() < (0.5 if dtype == torch.bfloat16 else 0.08)
    out = session.run((0, 20, TREE))
    assert out.logits.isfinite().all()


@pytest.mark.parametrize("zero_centred", [False, True])
def test_half_precision_norm_is_the_reference_norm(zero_centred: bool) -> None:
    """Statistics in float32; the cast comes before the weight, or after it when zero-centred."""
    x = torch.randn(5, 64).bfloat16() * 3
    weight = (torch.randn(64) * 0.3 + 1).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    wanted = (
        (normed * (1 + weight.float())).bfloat16() if zero_centred else weight * normed.bfloat16()
    )
    got = RMSNorm(weight, 1e-5, zero_centred)(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted, rtol=0.008, atol=1e-6)  # one unit in the last place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (200, 33), (576, 50)])
def test_linear_packs_without_changing_the_map(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype
) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    b = torch.randn(outputs).to(dtype) if bias else None
    packed, plain = Linear(weight, b), Linear(weight, b, pack=False)
    assert torch.equal(packed.weight, weight) and plain.weight is weight
    assert packed.nbytes == dtype.itemsize * outputs * (inputs + bias)
    x = torch.randn(40, inputs).to(dtype)
    whole = packed(x)
    torch.testing.assert_close(whole, plain(x), rtol=4 * torch.finfo(dtype).eps, atol=1e-4)
    for n in (0, 1, 2, 3, 4, 5, 8, 17):
        part = packed(x[:n])
        assert part.shape == (n, outputs)
        assert torch.equal(part, whole[:n]) or not can_pack(dtype)


def test_tiers_are_few_and_close() -> None:
    assert tier(0) == 0 and tier(1) == FEWEST
    assert all(n <= tier(n) == tier(tier(n)) for n in range(1, 3000))
    assert all(tier(n) <= tier(n + 1) for n in range(3000))
    assert all(tier(n) - n <= max(3, n / 8) for n in range(1, 3000))
    assert len({tier(n) for n in range(1, 513)}) <= 50


@pytest.mark.parametrize("count", [1, 3, 9, 17, 20])
def test_padding_shows_nowhere(count: int) -> None:
    model = ours("qwen3")
    taps = (0, 2, 3)
    out = Session(model).run((0, 0, chain(TOKENS[:count])), taps=taps)
    every = Session(model).run((0, 0, chain(TOKENS)), taps=taps)
    assert out.taps is not None and every.taps is not None
    assert out.taps.shape == (count, 3 * 64) and out.logits.shape == (count, VOCAB)
    close(out.taps, every.taps[:count])
    close(out.logits, every.logits[:count])


def test_inputs_are_left_alone() -> None:
    """Loading takes copies: the checkpoint's tensors may be shared with others."""
    held = tiny_checkpoint("gemma3", 3)
    before = {name: tensor.clone() for name, tensor in held.tensors.items()}
    Session(load_model(held)).run((0, 0, chain(TOKENS)))
    assert all(torch.equal(before[name], tensor) for name, tensor in held.tensors.items())


def test_bfloat16_embedding_is_narrowed_only_where_nothing_is_lost() -> None:
    held = tiny_checkpoint("llama", 3, tie_word_embeddings=True)
    assert load_model(held).embedding.dtype == torch.float32
    rounded = MemoryCheckpoint(
        held.config, {name: t.bfloat16().float() for name, t in held.tensors.items()}
    )
    model = load_model(rounded)
    assert model.embedding.dtype == torch.bfloat16
    got = model.embed(torch.tensor(TOKENS))
    assert torch.equal(got, rounded.tensors["model.embed_tokens.weight"][TOKENS])
    assert torch.equal(model.lm_head.weight, rounded.tensors["model.embed_tokens.weight"])


def test_progress_counts_every_element_once() -> None:
    held = tiny_checkpoint("qwen3", 3)
    seen: list[tuple[int, int]] = []
    load_model(held, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.numel() for tensor in held.tensors.values())
    assert seen[-1] == (total, total) and len(seen) == len(held.tensors)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


class Untouchable(MemoryCheckpoint):
    """A checkpoint whose tensors must not be read."""

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        raise AssertionError(f"{name} was read")


def test_a_wrong_checkpoint_is_refused_before_a_tensor_is_read() -> None:
    held = tiny_checkpoint("qwen2", 3)
    name = "model.layers.2.self_attn.k_proj.bias"
    fewer = {key: t for key, t in held.tensors.items() if key != name}
    with pytest.raises(ConfigError, match=f"{name}: missing"):
        load_model(Untouchable(held.config, fewer))
    wrong = {**held.tensors, name: torch.zeros(7)}
    with pytest.raises(ConfigError, match=rf"{name}: has shape \[7\].* \[32\]"):
        load_model(Untouchable(held.config, wrong))
    headless = {key: t for key, t in held.tensors.items() if key != "lm_head.weight"}
    with pytest.raises(ConfigError, match=r"lm_head\.weight: missing"):
        load_model(Untouchable(held.config, headless))
    with pytest.raises(ConfigError, match="vocab_size|embed_tokens"):
        load_model(Untouchable({**held.config, "vocab_size": 320}, held.tensors))


def test_names_and_extras() -> None:
    """Other prefixes are found, rotary buffers ignored, and a head that is shipped is used."""
    held = tiny_checkpoint("llama", 3)
    wanted = Session(load_model(held)).run((0, 0, chain(TOKENS))).logits
    bare = {name.removeprefix("model."): tensor for name, tensor in held.tensors.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((8,), float("nan"))
    got = Session(load_model(MemoryCheckpoint(held.config, bare))).run((0, 0, chain(TOKENS)))
    assert torch.equal(got.logits, wanted)
    tied = MemoryCheckpoint({**held.config, "tie_word_embeddings": True}, held.tensors)
    got = Session(load_model(tied)).run((0, 0, chain(TOKENS)))
    assert torch.equal(got.logits, wanted)


def test_gemma3_text_part_of_a_multimodal_checkpoint() -> None:
    held = tiny_checkpoint("gemma3", 3)
    wanted = Session(load_model(held)).run((0, 0, chain(TOKENS))).logits
    text = {key: value for key, value in held.config.items() if key != "architectures"}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    for prefix in ("language_model.model.", "model.language_model."):
        tensors = {
            prefix + name.removeprefix("model."): tensor for name, tensor in held.tensors.items()
        }
        tensors["vision_tower.patch.weight"] = torch.zeros(3)
        got = Session(load_model(MemoryCheckpoint(config, tensors))).run((0, 0, chain(TOKENS)))
        assert torch.equal(got.logits, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_are_fit_for_tests(family: str) -> None:
    """Logits differ clearly, other seeds disagree, noisy copies agree in part."""
    held = tiny_checkpoint(family)
    tokens = torch.randint(0, VOCAB, (60,)).tolist()
    models = [held, noisy_copy(held), tiny_checkpoint(family, 99)]
    outs = [Session(load_model(m)).run((0, 0, chain(tokens))).logits for m in models]
    best = outs[0].topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.2
    near, far = (outs[0].argmax(-1) == out.argmax(-1) for out in outs[1:])
    assert 0.3 < near.float().mean() < 0.95
    assert far.float().mean() < 0.1


def test_tiny_model_directory(tmp_path: Any) -> None:
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    path = write_tiny_model_dir(tmp_path / "tiny", "qwen2", 5)
    held = tiny_checkpoint("qwen2", 5)
    stored = load_file(path / "model.safetensors")
    assert stored.keys() == held.tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in held.tensors.items())
    text = "the zürich \N{SNOWMAN} théâtre\n"
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.encode(text)
    assert ids == tiny_tokenizer().encode(text).ids
    assert tokenizer.decode(ids) == text and max(ids) < VOCAB
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "in an on"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nin an on<|im_end|>\n<|im_start|>assistant\n"
    special = [VOCAB - 3 + i for i in range(3)]
    assert (
        tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == special
    )
    assert held.config["eos_token_id"] == [special[2], special[0]]
    assert tokenizer.encode(prompt, add_special_tokens=False).count(special[1]) == 2
