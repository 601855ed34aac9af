"""pack, adjust and choose against a plain reference that treats one node at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_serve.cache.tree import TokenTree, chain, root, trie
from spec_serve.kernels.noise import HostNoise, gumbel
from spec_serve.spec import filters
from spec_serve.spec import sampling as sampling_
from spec_serve.spec.request import Sampling
from spec_serve.spec.sampling import RowNoise, RowSampling, adjust, choose, pack

V = 12
NEVER = -math.inf


def reference(
    logits: Sequence[float],
    s: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    min_tokens: int = 0,
    ends: frozenset[int] = frozenset(),
    unused: Sequence[int] = (),
) -> list[float]:
    """Final logits of one node; `output` is what was emitted plus the guesses on its path."""
    x = [np.float32(value) for value in logits]
    for v in range(len(x)):
        if v in prompt or v in output:
            p = np.float32(s.repetition_penalty)
            x[v] = x[v] / p if x[v] > 0 else x[v] * p
        times = list(output).count(v)
        if times:
            x[v] -= np.float32(s.frequency_penalty) * np.float32(times) + np.float32(
                s.presence_penalty
            )
        if v in s.logit_bias:
            x[v] += np.float32(s.logit_bias[v])
    kept = [float(value) for value in x]
    context = [*prompt, *output]
    banned = {
        word[-1]
        for word in s.bad_words
        if len(context) >= len(word) - 1
        and context[len(context) - len(word) + 1 :] == list(word[:-1])
    }
    early = set(ends) if len(output) < min_tokens else set()
    for masks in ({*unused, *banned, *early}, {*unused, *banned}, {*unused}):
        final = [NEVER if v in masks else kept[v] for v in range(len(x))]
        if max(final) > NEVER:
            break
    if s.temperature <= 0:
        return final
    order = sorted(range(len(x)), key=lambda v: (-final[v], v))
    order = order[: s.top_k or None]
    z = {v: (final[v] - final[order[0]]) / s.temperature for v in order}
    total = math.fsum(math.exp(z[v]) for v in order)
    survivors: list[int] = []
    mass = 0.0
    for v in order:
        if survivors and s.top_p < 1 and mass >= s.top_p * total:
            break
        survivors.append(v)
        mass += math.exp(z[v])
    survivors = [v for v in survivors if v == order[0] or math.exp(z[v]) >= s.min_p]
    return [z[v] if v in survivors else NEVER for v in range(len(x))]


def agree(got: torch.Tensor, want: Sequence[float], sampled: bool) -> None:
    a, b = got.double().numpy(), np.array(want)
    assert (np.isinf(a) == np.isinf(b)).all(), (a, b)
    fin = np.isfinite(b)
    if not fin.any():
        return
    if sampled:
        a, b = a - a[fin].max(), b - b[fin].max()
    np.testing.assert_allclose(a[fin], b[fin], rtol=1e-5, atol=1e-5)


tokens_ = st.integers(0, V - 1)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    known = draw(st.lists(tokens_, min_size=1, max_size=3))
    branches = draw(st.lists(st.lists(tokens_, max_size=4), max_size=3))
    return trie(known, branches)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.4, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 5, V, 40]),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
    seed=st.just(0),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0, -0.75]),
    logit_bias=st.dictionaries(tokens_, st.sampled_from([-100.0, -1.0, 3.0, 100.0]), max_size=3),
    bad_words=st.lists(st.lists(tokens_, min_size=1, max_size=3).map(tuple), max_size=5).map(tuple),
)


@dataclass
class Case:
    """One row: prompt without the tree's given tokens, tokens emitted before the last given one."""

    sampling: Sampling
    prompt: list[int]
    emitted: list[int]
    tree: TokenTree
    logits_from: int
    min_tokens: int
    ends: frozenset[int]
    unused: list[int]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tree = draw(trees())
    return Case(
        draw(st.one_of(st.just(Sampling()), samplings)),
        draw(st.lists(tokens_, max_size=5)),
        draw(st.lists(tokens_, max_size=4)),
        tree,
        draw(st.integers(0, len(tree))),
        draw(st.integers(0, 8)),
        draw(st.frozensets(tokens_, max_size=3)),
        draw(st.lists(tokens_, max_size=2)),
        draw(st.integers(-(2**70), 2**70)),
    )


@settings(max_examples=250, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=4), st.integers(0, 2**31), st.booleans())
def test_every_node_is_judged_along_its_own_path(
    rows: list[Case], noise_of_logits: int, wide: bool
) -> None:
    packed = []
    wants: list[tuple[Case, int, list[int], list[int]] | None] = []
    for case in rows:
        tree = case.tree
        known = list(tree.tokens[: tree.given])
        # The last given token was emitted; those before it belong to the prompt.
        prompt, output = [*case.prompt, *known[:-1]], [*case.emitted, known[-1]]
        state = RowSampling(
            case.sampling, case.seed, V, prompt, case.min_tokens, case.ends, case.unused
        )
        state.extend(case.emitted)
        state.extend(known[-1:])
        position = len(case.prompt) + len(case.emitted)
        packed.append((state, tree, position, case.logits_from))
        for node in range(case.logits_from, len(tree)):
            path = tree.path(node)
            guesses = [tree.tokens[i] for i in path if i >= tree.given]
            drawn_at = position + len(path)
            judged = node >= tree.given - 1
            wants.append((case, drawn_at, prompt, [*output, *guesses]) if judged else None)
    generator = torch.Generator().manual_seed(noise_of_logits)
    logits = torch.randint(-24, 25, (len(wants), V), generator=generator).float() / 8
    before = logits.clone()
    nodes = pack(packed, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        for module in (filters, sampling_):
            patch.setattr(module, "_WIDE", 1 if wide else 10**9)
        final = logits if nodes is None else adjust(logits, nodes)
        chosen = choose(logits, nodes)
    assert torch.equal(logits, before), "the input stays as it is"
    for m, judged_row in enumerate(wants):
        if judged_row is None:
            continue
        case, drawn_at, prompt, output = judged_row
        want = reference(
            logits[m].tolist(), case.sampling, prompt, output,
            case.min_tokens, case.ends, case.unused,
        )  # fmt: skip
        sampled = case.sampling.temperature > 0
        agree(final[m], want, sampled)
        draw = final[m]
        if sampled:
            seed = torch.tensor([(case.seed + 2**63) % 2**64 - 2**63])
            draw = draw + gumbel(seed, torch.tensor([drawn_at]), V)[0]
        assert chosen[m] == min(v for v in range(V) if draw[v] == draw.max())


def test_plain_rows_need_nothing() -> None:
    state = RowSampling(Sampling(), 1, V, [1, 2], 0, frozenset({3}))
    assert state.plain and pack([(state, root(2), 1, 0)], "cpu") is None
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert choose(logits, None).tolist() == [1]


def test_prompt_chunks_without_logits_take_no_place() -> None:
    warm = Sampling(temperature=1.0)
    first = RowSampling(warm, 1, V, [1, 2, 3], 0, frozenset())
    second = RowSampling(warm, 2, V, [4], 0, frozenset())
    nodes = pack([(first, chain([1, 2, 3]), 0, 3), (second, root(4), 0, 0)], "cpu")
    alone = pack([(second, root(4), 0, 0)], "cpu")
    logits = torch.zeros(1, V)
    assert torch.equal(choose(logits, nodes), choose(logits, alone))


def test_min_tokens_is_decided_per_node() -> None:
    state = RowSampling(Sampling(), 1, V, [0], 3, frozenset({5}))
    state.extend([1])
    assert not state.plain
    tree = trie([1], [[2, 3, 4]])  # nodes see 1, 2, 3 and 4 emitted tokens
    logits = torch.zeros(4, V)
    logits[:, 5] = 9.0
    logits[:, 7] = 8.0
    assert choose(logits, pack([(state, tree, 1, 0)], "cpu")).tolist() == [7, 7, 5, 5]
    state.extend([2, 3])
    assert state.plain


def test_each_accepted_token_is_counted() -> None:
    """State after a run of accepted tokens equals state after one at a time."""
    s = Sampling(frequency_penalty=1.0, repetition_penalty=1.2)
    run, single = (RowSampling(s, 1, 300, list(range(200)), 0, frozenset()) for _ in range(2))
    tokens = [250, 3, 250, 250, *range(200, 299)]
    run.extend(tokens)
    for token in tokens:
        single.extend([token])
    for a, b in zip(run.table(), single.table(), strict=True):
        assert a.tolist() == b.tolist()
    ids, counts = run.table()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True))[250] == 4
    assert len(ids) == 299 and run.emitted == len(tokens)


def test_end_masks_yield_before_bad_words() -> None:
    s = Sampling(bad_words=((4,),))
    state = RowSampling(s, 1, 5, [0], 2, frozenset({2}), [1])
    grammar = torch.full((1, 5), NEVER)
    grammar[0, [1, 2, 4]] = torch.tensor([9.0, 1.0, 5.0])
    assert choose(grammar, pack([(state, root(0), 0, 0)], "cpu")).tolist() == [2]
    grammar[0, 2] = NEVER
    assert choose(grammar, pack([(state, root(0), 0, 0)], "cpu")).tolist() == [4]


def test_every_way_of_ranking_is_a_stable_sort() -> None:
    logits = torch.randint(-8, 9, (40, 300), generator=torch.Generator().manual_seed(5)) / 4
    logits[logits == 0] *= -1.0  # negative zeros, equal to the zeros below
    logits[::2, 7] = 0.0
    logits[::3, 100:] = NEVER
    logits[1, 3] = math.inf
    want = torch.sort(logits, dim=-1, descending=True, stable=True)
    for count in (1, 5, 120, 299, 300, 400):
        values, ids = filters.ranked(logits, count)
        assert torch.equal(ids, want.indices[:, :count])
        assert torch.equal(values, want.values[:, :count])
        if count <= 300:
            assert torch.equal(filters._ids_by_key(logits, count), ids)


@pytest.mark.parametrize("scale", [0.02, 1.0, 6.0])
def test_thresholds_find_what_sorting_finds(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, vocab = 60, 5000
    logits = torch.randn(rows, vocab, generator=generator) * scale
    logits[::3] = (logits[::3] * 4).round() / 4  # many equal logits
    logits[::7, 1000:] = NEVER
    temperature = torch.rand(rows, generator=generator).double() * 1.5 + 0.05
    top_k = torch.randint(0, 60, (rows,), generator=generator) * (torch.arange(rows) % 2)
    top_p = torch.rand(rows, generator=generator).double()
    top_p[::5] = 1.0
    min_p = torch.rand(rows, generator=generator).double() * 0.3
    min_p[::2] = 0.0
    results = []
    for wide, few in ((1, 0), (10**9, 0)):
        monkeypatch.setattr(filters, "_WIDE", wide)
        ids, z = filters.survivors(logits, temperature, top_k, top_p, min_p, few)
        full = torch.full_like(logits, NEVER)
        results.append(full.scatter_reduce_(1, ids, z, "amax"))
    assert torch.equal(*results)
    some = top_k > 0
    ids, z = filters.survivors(
        logits[some], temperature[some], top_k[some], top_p[some], min_p[some], int(top_k.max())
    )
    full = torch.full_like(logits[some], NEVER).scatter_reduce_(1, ids, z, "amax")
    assert torch.equal(full, results[0][some])


@pytest.mark.parametrize("loud", [0.02, 8, 1000])
@pytest.mark.parametrize("scale", [0.02, 1.0, 6.0])
def test_drawing_from_contenders_is_drawing_from_all(
    scale: float, loud: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The less noise counts as loud, the more winners are found from the noise's side."""
    monkeypatch.setattr(sampling_, "_LOUD", loud)
    found: list[int] = []
    above = HostNoise.above

    def spy(self: HostNoise, least: float, vocab: int) -> npt.NDArray[np.int64]:
        ids = above(self, least, vocab)
        found.extend(ids.tolist())
        return ids

    monkeypatch.setattr(HostNoise, "above", spy)
    vocab, count = 4000, 60
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(count, vocab, generator=generator) * scale
    logits[::4, 50:] = NEVER
    states = [
        RowSampling(Sampling(temperature=0.3 + 0.05 * i), i, vocab, [0], 0, frozenset())
        for i in range(count)
    ]
    rows = [(state, root(0), i, 0) for i, state in enumerate(states)]
    nodes = pack(rows, "cpu")
    chosen = choose(logits, nodes)
    drafted = RowNoise(states, "cpu").add(logits, torch.arange(count), torch.arange(count) + 1)
    monkeypatch.setattr(sampling_, "_WIDE", 10**9)
    assert torch.equal(chosen, choose(logits, nodes))
    assert torch.equal(chosen, drafted.argmax(-1))
    assert found or loud > 1


def test_extreme_temperatures_and_bias_stay_finite() -> None:
    for temperature in (1e-300, 1e-45, 1e-12, 1e12, 1e300):
        s = Sampling(temperature=temperature, logit_bias={3: 100.0, 4: -100.0}, top_p=0.9)
        state = RowSampling(s, 5, V, [0], 0, frozenset())
        nodes = pack([(state, root(0), 0, 0)], "cpu")
        assert nodes is not None
        logits = torch.linspace(-30, 30, V)[None]
        assert not adjust(logits, nodes).isnan().any()
        if temperature < 1:
            assert choose(logits, nodes).tolist() == [3]


@pytest.mark.parametrize("wide", [1, 10**9])
@pytest.mark.parametrize("hole", [math.nan, math.inf, NEVER])
def test_broken_logits_give_some_token(
    hole: float, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that overflows must not stop the engine or hand out ids that don't exist."""
    monkeypatch.setattr(filters, "_WIDE", wide)
    monkeypatch.setattr(sampling_, "_WIDE", wide)
    kinds = [Sampling(temperature=1.0, top_p=p, top_k=k) for p in (1.0, 0.5) for k in (0, 3)]
    for s in kinds:
        state = RowSampling(s, 5, V, [0], 0, frozenset())
        nodes = pack([(state, root(0), 0, 0)] * 2, "cpu")
        logits = torch.full((2, V), hole)
        logits[1] = 0.0
        logits[1, 4] = hole
        assert all(0 <= token < V for token in choose(logits, nodes).tolist())


def test_choice_does_not_depend_on_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.8, top_p=0.9),
        Sampling(temperature=0.8, top_k=5, presence_penalty=1.0),
        Sampling(temperature=1.2, min_p=0.1, logit_bias={1: 2.0}),
        Sampling(frequency_penalty=0.7),
    ]
    vocab = 3000
    states = [RowSampling(s, i, vocab, [1, 2, 3], 0, frozenset()) for i, s in enumerate(kinds)]
    tree = trie([3], [[5, 6], [7]])
    rows = [(state, tree, 2, 0) for state in states]
    logits = torch.randn(len(rows) * 4, vocab, generator=generator) * 3
    together = choose(logits, pack(rows, "cpu"))
    for i, row in enumerate(rows):
        alone = choose(logits[4 * i : 4 * i + 4], pack([row], "cpu"))
        assert torch.equal(alone, together[4 * i : 4 * i + 4])


def test_row_noise_is_the_targets_noise() -> None:
    """A drafter with the target's own logits takes the target's own token."""
    vocab = 50
    kinds = [Sampling(temperature=0.7), Sampling(), Sampling(temperature=1.3)]
    states = [RowSampling(s, 9 + i, vocab, [1], 0, frozenset()) for i, s in enumerate(kinds)]
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([0, 1, 2, 0, 1, 2])
    positions = torch.tensor([4, 4, 4, 4, 4, 5])
    noisy = RowNoise(states, "cpu").add(logits, rows, positions)
    for i in range(6):
        b = int(rows[i])
        nodes = pack([(states[b], root(1), int(positions[i]) - 1, 0)], "cpu")
        assert noisy[i].argmax() == choose(logits[i : i + 1], nodes)
    assert torch.equal(noisy[[1, 4]], logits[[1, 4]])
    only = RowNoise([states[1]], "cpu")
    assert only.add(logits, rows * 0, positions) is logits
