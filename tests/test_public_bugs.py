"""Faults users of other servers met, each impossible here: what is emitted (2 to 15, 29).

The numbers are those of the project's list of public bug reports. Cases about cache, context and
life stand in tests/test_public_bugs_cache.py, those of text and transports in tests/api; 1 and 12
in tests/test_lossless.py, 2 and 3 also in tests/spec.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from spec_serve.spec.request import RequestError, Speculation
from tests.engines import (
    PROMPT,
    engine,
    logits_after,
    prompts,
    reference,
    request,
    run,
    tokens,
    unique,
)
from tests.late import Late
from tests.tiny import VOCAB

stats = Late("scipy.stats")

CHAIN, TREE = (3, 1), (2, 2)


# Every pair of a draft, a shape and a filter occurs.
@pytest.mark.parametrize(
    ("kind", "shape", "filters"),
    [
        ("near", CHAIN, {}), ("near", TREE, {"top_p": 0.7}), ("near", CHAIN, {"top_k": 2}),
        ("far", TREE, {}), ("far", CHAIN, {"top_p": 0.7}), ("far", TREE, {"top_k": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_case_02_sampling_keeps_the_joint_distribution(
    kind: str, shape: tuple[int, int], filters: dict[str, float]
) -> None:
    allowed = (65, 66, 67, 68)
    bias = dict.fromkeys(allowed, 100.0)
    temperature = 0.8
    exact: dict[tuple[int, ...], float] = {}

    def expand(path: tuple[int, ...], mass: float) -> None:
        if len(path) == 3:
            exact[path] = mass
            return
        p = torch.softmax(logits_after([90, 90, *path])[list(allowed)].double() / temperature, 0)
        ranked = sorted(zip(p.tolist(), allowed, strict=True), reverse=True)
        kept, total = [], 0.0
        for share, token in ranked:
            if "top_k" in filters and len(kept) == filters["top_k"]:
                break
            if "top_p" in filters and total >= filters["top_p"]:
                break
            kept.append((share, token))
            total += share
        for share, token in kept:
            expand((*path, token), mass * share / total)

    expand((), 1.0)
    on = engine(kind, depth=shape[0], width=shape[1], nodes=6, max_rows=64, kv_tokens=4096)
    trials = 1200
    asked = [
        request(
            [90, 90],
            3,
            temperature=temperature,
            logit_bias=bias,
            n=8,
            speculation=Speculation(mode="max"),
            **filters,
        )
        for _ in range(trials // 8)
    ]
    counts = Counter(tuple(done.tokens) for done in run(on, *asked))
    assert set(counts) <= set(exact), "an excluded outcome occurred"
    cells = sorted(exact.items(), key=lambda cell: -cell[1])
    observed, expected = [0.0], [0.0]
    for path, mass in cells:
        if mass * trials >= 5:
            observed.append(counts[path])
            expected.append(mass * trials)
        else:
            observed[0] += counts[path]
            expected[0] += mass * trials
    if expected[0] == 0:
        observed, expected = observed[1:], expected[1:]
    assert stats.chisquare(observed, expected).pvalue > 0.001
    assert on.stats().accepted > 0 or kind == "far"


def test_case_04_the_first_token_is_never_lost() -> None:
    ids = reference()
    asked = [request(PROMPT, m) for m in range(1, 15)]
    for m, done in enumerate(run(engine("self", depth=4, max_rows=14), *asked), 1):
        assert done.tokens == ids[:m]
    assert tokens(engine("self", depth=4), PROMPT, 1) == ids[:1]
    (done,) = run(engine("self", depth=4), request(PROMPT, 8, stop_ids=[ids[0]]))
    assert (done.tokens, done.reason, done.matched) == (ids[:1], "stop", ids[0])
    assert sum(step.drafted for step in done.steps) == 0


def test_case_05_no_token_leaks_into_another_request() -> None:
    chooser = random.Random(5)
    asked = []
    for i in range(24):
        own = [8 * i + j for j in range(8)]
        prompt = (own[:2] * 150)[: chooser.randint(1, 300)]
        if i % 2:
            prompt = [chooser.randrange(VOCAB) for _ in prompt]
        bias = dict.fromkeys(own, 100.0)
        asked.append((set(own), request(prompt, chooser.randint(5, 40), logit_bias=bias)))
    alone = [run(engine(), one)[0].tokens for _, one in asked]
    on = engine("near", lookup=True, depth=3, width=2, max_rows=24, kv_tokens=9000)
    got: dict[str, list[int]] = {one.id: [] for _, one in asked}
    waiting = [one for _, one in asked]
    doomed = [request(prompt, 50) for prompt in prompts(3, seed=6)]
    step = 0
    while waiting or not on.idle():
        if step % 2 == 0 and waiting:
            on.submit(waiting.pop(0))
        if step in (3, 9, 15):
            on.submit(doomed[step // 6])
        if step in (7, 12, 19):
            on.cancel(doomed[(step - 3) // 6 if step != 12 else 1].id)
        for event in on.step():
            if event.request.id in got:
                got[event.request.id] += getattr(event, "tokens", [])
        step += 1
    on.store.check()
    for (own, one), expected in zip(asked, alone, strict=True):
        assert got[one.id] == expected
        assert set(got[one.id]) <= own


@pytest.mark.parametrize("shape", [(4, 1), (3, 2)], ids=str)
def test_case_06_a_seed_means_the_same_text_in_any_company(shape: tuple[int, int]) -> None:
    def seeded(seed: int = 4711) -> object:
        return request(PROMPT, 24, temperature=0.9, seed=seed)

    on = engine("near", depth=shape[0], width=shape[1])
    expected = run(on, seeded())[0].tokens  # type: ignore[arg-type]
    assert expected == tokens(engine(), PROMPT, 24, temperature=0.9, seed=4711)
    beside = run(on, seeded(), request(PROMPT, 24, temperature=0.9))  # type: ignore[arg-type]
    assert beside[0].tokens == expected
    others = [seeded(seed) for seed in range(7)]
    assert run(on, *others[:3], seeded(), *others[3:])[3].tokens == expected  # type: ignore[arg-type]
    run(on, *(request(prompt, 3, temperature=1.0) for prompt in prompts(20)))
    twice = run(on, seeded(), seeded())  # type: ignore[arg-type]
    assert twice[0].tokens == twice[1].tokens == expected
    assert run(on, seeded(4712))[0].tokens != expected  # type: ignore[arg-type]
    free = [request(PROMPT, 24, temperature=0.9) for _ in range(3)]
    assert len({tuple(done.tokens) for done in run(on, *free)}) == 3


def test_case_07_a_stop_inside_a_run_wins_over_the_limit() -> None:
    ids = reference()
    at = unique(9, ids)
    limits = range(at - 1, at + 7)
    both = [
        run(one, *(request(PROMPT, m, stop_ids=[ids[at]]) for m in limits))
        for one in (engine(), engine("self", depth=8))
    ]
    for m, off, on in zip(limits, *both, strict=True):
        assert (on.tokens, on.reason, on.matched) == (off.tokens, off.reason, off.matched)
        assert on.reason == ("length" if m <= at else "stop")
        assert on.usage.completion_tokens == min(m, at + 1) == len(on.tokens)


def test_case_08_generation_ends_at_an_eos_inside_a_run() -> None:
    ids = reference()
    at = unique(6, ids)
    for depth in range(1, 11):
        ends = [299, ids[at]]
        asked = [request(PROMPT, 40, eos=ends, ignore_eos=ignore) for ignore in (False, True)]
        one, other = run(engine("self", depth=depth), *asked)
        assert (one.tokens, one.reason) == (ids[: at + 1], "stop")
        assert (other.tokens, other.reason) == (ids, "length")


def test_case_09_exactly_as_many_tokens_as_asked() -> None:
    on = engine("self", depth=4, width=3)
    for m in range(1, 26):
        before = on.stats()
        (done,) = run(on, request(PROMPT, m, logprobs=0))
        assert done.logprobs is not None
        assert len(done.tokens) == len(done.logprobs) == done.usage.completion_tokens == m
        assert done.reason == "length"
        after = on.stats()
        assert after.tokens_out - before.tokens_out == m
        steps = done.steps
        assert sum(step.accepted for step in steps) == after.accepted - before.accepted
        assert sum(step.accepted for step in steps) <= m


@pytest.mark.parametrize("kind", ["self", "far"])
@pytest.mark.parametrize("through", ["eos", "stop_ids"])
def test_case_10_min_tokens_is_judged_per_node(kind: str, through: str) -> None:
    ids = reference()
    at = unique(4, ids)
    ends = {through: [ids[at]]}
    on = engine(kind, depth=6, max_rows=at + 6)
    both = [
        run(one, *(request(PROMPT, 14, min_tokens=n, **ends) for n in range(at + 6)))  # type: ignore[arg-type]
        for one in (engine(max_rows=at + 6), on)
    ]
    for n, (off, done) in enumerate(zip(*both, strict=True)):
        assert (done.tokens, done.reason) == (off.tokens, off.reason)
        if n <= at:
            assert done.tokens == ids[: at + 1]
        else:
            assert ids[at] not in done.tokens[:n]
            assert len(done.tokens) > n
    with pytest.raises(RequestError, match="min_tokens"):
        on.submit(request(PROMPT, 12, min_tokens=20))


@pytest.mark.parametrize("kind", ["self", "far", "lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_13_logprobs_are_those_of_the_target(kind: str, temperature: float) -> None:
    asked = {"temperature": temperature, "seed": 9, "logprobs": 3}
    (off,) = run(engine(), request(PROMPT, 32, **asked))  # type: ignore[arg-type]
    (on,) = run(engine(kind, depth=5), request(PROMPT, 32, **asked))  # type: ignore[arg-type]
    assert off.logprobs is not None and on.logprobs is not None
    assert on.tokens == off.tokens and len(on.logprobs) == 32
    for i, (a, b) in enumerate(zip(on.logprobs, off.logprobs, strict=True)):
        direct = logits_after(PROMPT + on.tokens[:i]).log_softmax(0)
        assert a.token == b.token == on.tokens[i]
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert a.logprob == pytest.approx(float(direct[a.token]), abs=1e-4)
        assert [token for token, _ in a.top] == direct.topk(3).indices.tolist()
        if temperature == 0.0:
            assert a.top[0][0] == a.token
    assert any(entry.logprob < -1e-3 for entry in on.logprobs)


def test_case_13_prompt_logprobs_with_chunks_and_cache() -> None:
    prompt = prompts(1, 150, 160, seed=3)[0]
    direct = [float(logits_after(prompt[:i]).log_softmax(0)[prompt[i]]) for i in range(1, 60)]
    on = engine("near", depth=3, width=2, step_tokens=48)
    for _ in range(2):
        (done,) = run(on, request(prompt, 4, prompt_logprobs=2))
        assert done.prompt_logprobs is not None
        assert [entry.token for entry in done.prompt_logprobs] == prompt[1:]
        got = [entry.logprob for entry in done.prompt_logprobs]
        assert got[:59] == pytest.approx(direct, abs=1e-4)
        assert done.tokens == tokens(engine(), prompt, 4)


def test_case_14_no_infinity_in_logprobs() -> None:
    best = reference()[0]
    for extra in ({"logit_bias": {best: -100.0}}, {"top_k": 1, "temperature": 1.0}):
        (done,) = run(engine("self", depth=3), request(PROMPT, 6, logprobs=5, **extra))  # type: ignore[arg-type]
        assert done.logprobs is not None
        values = [
            lp for entry in done.logprobs for lp in (entry.logprob, *dict(entry.top).values())
        ]
        assert len(values) == 6 * 6
        assert all(-1e4 < value <= 0 for value in values)


BAD = [
    ("prompt", {"prompt": [VOCAB]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [2**31]}),
    ("prompt", {"prompt": [3, "x"]}),
    ("prompt", {"prompt": []}),
    ("stop_token_ids", {"stop_ids": [VOCAB + 7], "min_tokens": 3}),
    ("stop_token_ids", {"stop_ids": [-2]}),
    ("logit_bias", {"logit_bias": {999999: 5.0}}),
    ("logit_bias", {"logit_bias": {-1: 5.0}}),
    ("logit_bias", {"logit_bias": {"foo": 5.0}}),
    ("logit_bias", {"logit_bias": {5: float("nan")}}),
    ("bad_words", {"bad_words": ((VOCAB,),)}),
    ("bad_words", {"bad_words": ((),)}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("temperature", {"temperature": float("inf")}),
    ("temperature", {"temperature": -0.5}),
    ("top_p", {"top_p": 0.0}),
    ("top_k", {"top_k": -1}),
    ("min_p", {"min_p": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("seed", {"seed": 2**70}),
    ("n", {"n": 10**6}),
    ("logprobs", {"logprobs": 10**6}),
    ("speculation.sources", {"speculation": Speculation(sources=frozenset({"oracle"}))}),
    ("speculation.prediction", {"speculation": Speculation(prediction=(VOCAB,))}),
]


def test_case_15_and_29_bad_input_names_its_field_and_disturbs_nobody() -> None:
    on = engine("near", depth=3, width=2)
    on.submit(request(PROMPT, 40))
    got: list[int] = []
    for field, wrong in BAD:
        options = {"prompt": PROMPT, "max_tokens": 8, **wrong}
        with pytest.raises(RequestError) as caught:
            on.submit(request(**options))  # type: ignore[arg-type]
        assert caught.value.field.startswith(field)
        assert field in str(caught.value)
        for event in on.step():
            got += getattr(event, "tokens", [])
    while not on.idle():
        for event in on.step():
            got += getattr(event, "tokens", [])
    assert got == reference(40)
    assert tokens(on, PROMPT, 40) == reference(40)
