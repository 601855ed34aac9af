"""The compiled model against the torch one on the same weights, and its independence of company."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import TokenTree, chain
from spec_serve.kernels.cpu import native
from spec_serve.kernels.cpu.attention import NativeAttention
from spec_serve.kernels.cpu.quantise import QUANTISERS
from spec_serve.kernels.reference import TorchAttention
from spec_serve.target.dequant import decode
from spec_serve.target.model import Transformer, load_model
from spec_serve.target.native import NativeTransformer, Pace, load_native, unfit
from tests.tiny import FAMILIES, MemoryCheckpoint, tiny_checkpoint

TOKENS = [(i * 37 + 11) % 290 for i in range(70)]


def rounded(checkpoint: MemoryCheckpoint, kind: str) -> MemoryCheckpoint:
    """The same model with its matrices as `kind` means them."""
    tensors = dict(checkpoint.tensors)
    for name, weight in tensors.items():
        if weight.dim() == 2:
            flat = torch.empty(weight.numel())
            decode(QUANTISERS[kind](weight), kind, flat)
            tensors[name] = flat.view(weight.shape)
    return MemoryCheckpoint(checkpoint.config, tensors)


class Run:
    """A model with a pool of its own, asked for logits."""

    def __init__(self, model: NativeTransformer | Transformer) -> None:
        self.model = model
        self.pool = KVPool(model.kv_specs, 400, 2, 300)
        compiled = isinstance(model, NativeTransformer)
        self.attention = NativeAttention() if compiled else TorchAttention(exact=True)

    def __call__(
        self, prefix: int, tree: TokenTree, slots: Sequence[int], taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        batch = build_batch([Twig(0, prefix, tree, slots, 0)])
        plan = self.attention.plan(batch, self.pool.table)  # type: ignore[attr-defined]
        out = self.model.forward(batch, self.pool.layers, plan, taps)
        return out.logits, out.taps

    def prompt(
        self, tokens: Sequence[int], taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        slots = range(1, len(tokens) + 1)
        made = self(0, chain(list(tokens), given=len(tokens)), slots, taps)
        self.pool.assign(0, 0, list(slots))
        return made


def compiled(family: str, kind: str = "q8_0", threads: int = 1) -> NativeTransformer:
    return load_native(tiny_checkpoint(family), threads, kind)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q5_1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_taps_are_the_torch_models(family: str, kind: str) -> None:
    checkpoint = tiny_checkpoint(family)
    reference = Run(load_model(rounded(checkpoint, kind.upper())))
    taps = (0, 2, 3)
    found, tapped = Run(load_native(checkpoint, 1, kind)).prompt(TOKENS, taps)
    wanted, features = reference.prompt(TOKENS, taps)
    assert ((found - wanted).norm() / wanted.norm()).item() < 0.004
    assert tapped is not None and features is not None
    assert torch.equal(tapped[:, :64], features[:, :64])  # the embedding is exact
    assert ((tapped - features).norm() / features.norm()).item() < 0.004
    assert (found.argmax(1) == wanted.argmax(1)).float().mean().item() > 0.98


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bit_activations_cost_accuracy_but_not_the_shape(family: str) -> None:
    checkpoint = tiny_checkpoint(family)
    wanted, _ = Run(load_model(rounded(checkpoint, "Q8_0"))).prompt(TOKENS)
    found, _ = Run(load_native(checkpoint, 1, "q8_0", activations=8)).prompt(TOKENS)
    assert 0.001 < ((found - wanted).norm() / wanted.norm()).item() < 0.025
    assert (found.argmax(1) == wanted.argmax(1)).float().mean().item() > 0.9


@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token_gives_the_same_bits(family: str) -> None:
    whole, _ = Run(compiled(family)).prompt(TOKENS)
    step = Run(compiled(family, threads=2))
    parts = []
    for i, token in enumerate(TOKENS):
        parts.append(step(i, chain([token], given=1), [i + 1])[0])
        step.pool.assign(0, i, [i + 1])
    assert torch.equal(torch.cat(parts), whole)


def test_taps_have_the_same_bits_in_any_company() -> None:
    taps = (0, 3, 1)
    model = compiled("llama", threads=2)
    _, whole = Run(model).prompt(TOKENS, taps)
    step = Run(model)
    parts = []
    for i, token in enumerate(TOKENS):  # each with another guess beside the next token
        tree = TokenTree([token, 7, TOKENS[(i + 1) % len(TOKENS)]], [-1, 0, 0], given=1)
        _, tapped = step(i, tree, [i + 1, 300, 301], taps)
        assert tapped is not None and whole is not None
        parts.append(tapped[0])
        if i + 1 < len(TOKENS):
            assert torch.equal(tapped[2], whole[i + 1])
        step.pool.assign(0, i, [i + 1])
    assert torch.equal(torch.stack(parts), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trees_paths_have_the_bits_of_chains(family: str) -> None:
    model = compiled(family)
    tokens, parents = [5, 7, 9, 11, 13, 15], [-1, 0, 0, 1, 2, 4]
    tree = TokenTree(tokens, parents, given=1)
    run = Run(model)
    run.prompt(TOKENS)
    start = len(TOKENS)
    logits, _ = run(start, tree, range(start + 1, start + 7))
    for leaf, path in ((3, [0, 1, 3]), (5, [0, 2, 4, 5])):
        alone = Run(model)
        alone.prompt(TOKENS)
        words = [tokens[i] for i in path]
        slots = range(300, 300 + len(path))
        chained, _ = alone(start, chain(words, given=len(words)), slots)
        assert torch.equal(logits[leaf], chained[-1])


def test_long_contexts_cross_segments_with_the_same_bits() -> None:
    tokens = [(i * 31 + 7) % 290 for i in range(290)]  # beyond a segment of 256
    run = Run(compiled("llama", threads=2))
    whole, _ = run.prompt(tokens)
    cut = Run(compiled("llama"))
    cut.prompt(tokens[:250])
    rest, _ = cut(250, chain(tokens[250:], given=40), range(251, 291))
    assert torch.equal(rest, whole[250:])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_eight_bits_of_keys_and_values_keep_order_and_nearly_the_logits(family: str) -> None:
    wanted, _ = Run(compiled(family)).prompt(TOKENS)
    model = load_native(tiny_checkpoint(family), 2, "q8_0", kv=torch.int8)
    assert {spec.bytes_per_slot for spec in model.kv_specs} == {2 * 2 * (16 + 4)}
    found, _ = Run(model).prompt(TOKENS)
    assert 1e-4 < ((found - wanted).norm() / wanted.norm()).item() < 0.01
    step = Run(model)
    parts = []
    for i, token in enumerate(TOKENS):
        parts.append(step(i, chain([token], given=1), [i + 1])[0])
        step.pool.assign(0, i, [i + 1])
    assert torch.equal(torch.cat(parts), found)


def test_threads_change_no_bit() -> None:
    model = compiled("qwen3", threads=1)
    alone, _ = Run(model).prompt(TOKENS)
    for threads in (2, 3, 5):
        model.use_threads(threads)
        assert torch.equal(Run(model).prompt(TOKENS)[0], alone)


@pytest.mark.parametrize("cap", [0.0, 0.05])
def test_the_likeliest_tokens_are_those_of_the_logits(cap: float) -> None:
    """Pieces of the head, its end, equals (the lowest id wins) and the logits' cap."""
    checkpoint = tiny_checkpoint("llama")
    tensors = dict(checkpoint.tensors)
    name = next(n for n in ("lm_head.weight", "model.embed_tokens.weight") if n in tensors)
    half = len(tensors[name]) // 2
    tensors[name] = tensors[name].clone()
    tensors[name][half : 2 * half] = tensors[name][:half]  # each logit twice
    for threads in (1, 3):
        run = Run(load_native(MemoryCheckpoint(checkpoint.config, tensors), threads, "q8_0"))
        assert isinstance(run.model, NativeTransformer)
        run.model.raw.logit_softcap = cap
        logits, _ = run.prompt(TOKENS)
        batch = build_batch([Twig(0, 0, chain(TOKENS, given=len(TOKENS)), range(1, 71), 0)])
        plan = NativeAttention().plan(batch, run.pool.table)
        for limit in (0, half - 3, 5):
            chosen, taps = run.model.choose(batch, run.pool.layers, plan, (1,), limit)
            wanted = torch.from_numpy(logits[:, : limit or None].numpy().argmax(-1))
            assert torch.equal(chosen, wanted) and len(set(chosen.tolist())) > 1
            assert taps is not None and taps.shape == (70, 64)
            again, _ = run.prompt(TOKENS)  # logits are made again after a step without
            assert torch.equal(again, logits)


def test_many_query_heads_per_kv_head() -> None:
    changes = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32}
    checkpoint = tiny_checkpoint("qwen3", **changes)
    found, _ = Run(load_native(checkpoint, 1, "q8_0")).prompt(TOKENS)
    wanted, _ = Run(load_model(rounded(checkpoint, "Q8_0"))).prompt(TOKENS)
    assert ((found - wanted).norm() / wanted.norm()).item() < 0.004


def test_what_can_not_be_compiled_says_why() -> None:
    assert unfit(tiny_checkpoint("llama")) == "the weights are not quantised"
    assert unfit(tiny_checkpoint("llama"), "q4_0") == ""
    odd = tiny_checkpoint("llama", intermediate_size=100)
    assert "100 inputs" in unfit(odd, "q8_0")
    with pytest.raises(ValueError, match="not quantised"):
        load_native(tiny_checkpoint("llama"))


def test_without_the_library_models_run_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise native.NativeUnavailable("not built: the installation found no C++ compiler")

    monkeypatch.setattr(native, "load", missing)
    assert "no C++ compiler" in unfit(tiny_checkpoint("llama"), "q8_0")


def test_threads_are_used_while_they_are_quicker() -> None:
    pace = Pace(4)
    took = {4: 0.003, 1: 0.005}

    def run(steps: int) -> list[int]:
        used = []
        for _ in range(steps):
            threads = pace.choose()
            used.append(threads)
            pace.learn(threads, 1, took[threads])
        return used

    used = run(400)
    assert pace.using == 4 and used.count(1) < 12
    took[4] = 0.030  # another program came
    assert run(4)[-1] == 1 and pace.using == 1
    assert run(400).count(4) < 12
    took[4] = 0.003
    run(300)
    assert pace.using == 4


def test_one_thread_has_nothing_to_choose() -> None:
    pace = Pace(1)
    for _ in range(300):
        assert pace.choose() == 1
        pace.learn(1, 1, 0.1)
