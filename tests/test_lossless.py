"""Speculation changes no token: on equals off for every draft, tree, sampling option and batch.

OFF is the same engine without drafts. Everything runs in float32 on tiny models, so equality is
exact; what must hold on real models is in tests/test_real_models.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from spec_serve.spec.request import Speculation
from tests.engines import engine, prompts, request, run, tokens

DRAFTS = ("lookup", "self", "near", "far", "second", "third")
SHAPES = ((1, 1), (6, 1), (3, 3))  # depth, width

SURFACE: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 1.5},
    "negative frequency": {"frequency_penalty": -1.5},
    "presence": {"presence_penalty": 2.0},
    "bias": {"logit_bias": {7: 4.0, 65: -100.0, 100: 3.0}},
    "bad words": {"bad_words": (*((i,) for i in range(240, 256)), (292, 169), (97, 98, 99))},
    "all": {
        "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2,
        "frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": {7: 2.0, 100: 1.0},
        "bad_words": ((242,), (292, 169)), "min_tokens": 6, "stop_ids": (5, 17, 40),
    },
}  # fmt: skip

PROMPT = prompts(1, 20, 24, seed=5)[0]


@cache
def off(
    prompt: tuple[int, ...], max_tokens: int, options: tuple[tuple[str, Any], ...]
) -> list[int]:
    return tokens(engine(), prompt, max_tokens, **_thaw(options))


def _freeze(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, tuple(value.items()) if isinstance(value, dict) else value)
        for key, value in options.items()
    )


def _thaw(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {key: dict(value) if key == "logit_bias" else value for key, value in options}


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_case_01_every_draft_and_tree_yields_the_tokens_of_off(
    kind: str, shape: tuple[int, int]
) -> None:
    """Side by side, as that costs little more than one request alone; OFF answers each alone."""
    on = engine(kind, depth=shape[0], width=shape[1])
    ways = [
        (prompt, {"temperature": temperature, "seed": 100 + i})
        for temperature in (0.0, 0.7, 1.0)
        for i, prompt in enumerate(prompts(2, seed=1))
    ]
    expected = [off(tuple(prompt), 24, _freeze(options)) for prompt, options in ways]
    for how in ("cold", "cached"):
        done = run(on, *(request(prompt, 24, **options) for prompt, options in ways))  # type: ignore[arg-type]
        for one, wanted, (_, options) in zip(done, expected, ways, strict=True):
            assert one.tokens == wanted, (how, options)
    prompt, options = ways[-1]
    alone = engine(kind, depth=shape[0], width=shape[1])
    assert tokens(alone, prompt, 24, **options) == expected[-1]


@pytest.mark.parametrize("kind", ["lookup", "self", "near", "second"])
@pytest.mark.parametrize("shape", [(6, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_case_12_sampling_surface_is_exact_per_node(
    kind: str, shape: tuple[int, int], temperature: float
) -> None:
    """All options side by side, each row with its own; OFF answers each alone."""
    plain = {"temperature": temperature, "seed": 3}
    ways = {name: {**plain, **options} for name, options in SURFACE.items()}
    expected = {name: off(tuple(PROMPT), 32, _freeze(way)) for name, way in ways.items()}
    for name, ids in expected.items():
        if name != "plain" and not (temperature == 0.0 and name in ("top_k", "top_p", "min_p")):
            assert ids != expected["plain"], f"{name} must bite"
    on = engine(kind, depth=shape[0], width=shape[1], max_rows=len(ways))
    done = run(on, *(request(PROMPT, 32, **way) for way in ways.values()))
    assert {name: one.tokens for name, one in zip(ways, done, strict=True)} == expected


@pytest.mark.parametrize(
    "family", ["mistral", "qwen2", "qwen3", "gemma3", "qwen2-moe", "deepseek-v3"]
)
def test_other_families(family: str) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "seed": 1}
    expected = tokens(engine(family=family), PROMPT, 40, **options)
    for kind in ("lookup", "self", "near"):
        on = engine(kind, family=family, depth=3, width=2)
        assert tokens(on, PROMPT, 40, **options) == expected
        assert tokens(on, PROMPT, 40, **options) == expected


@pytest.mark.parametrize("kind", ["lookup", "near", "second"])
def test_ragged_batch_with_cancelled_neighbours(kind: str) -> None:
    batch = prompts(10, 3, 60, seed=2)
    asked = [
        request(
            prompt, 10 + 3 * i, temperature=(0.0, 0.8, 1.0)[i % 3], seed=i,
            frequency_penalty=0.4 * (i % 2), logprobs=2 if i % 4 == 0 else None,
        )
        for i, prompt in enumerate(batch)
    ]  # fmt: skip
    alone = [run(engine(), one)[0].tokens for one in asked]
    on = engine(kind, depth=3, width=2, max_rows=6)
    for one in asked:
        on.submit(one)
    doomed = [request(prompt, 60) for prompt in prompts(4, 5, 80, seed=3)]
    for one in doomed:
        on.submit(one)
    got: dict[str, list[int]] = {one.id: [] for one in asked + doomed}
    step = 0
    while not on.idle():
        for event in on.step():
            got[event.request.id] += getattr(event, "tokens", [])
        on.store.check()
        step += 1
        if step in (2, 5, 9, 14):
            on.cancel(doomed[(2, 5, 9, 14).index(step)].id)
    assert [got[one.id] for one in asked] == alone


@pytest.mark.parametrize("mode", ["auto", "off", "max"])
def test_the_mode_of_a_request_changes_no_token(mode: str) -> None:
    speculation = Speculation(mode=mode)  # type: ignore[arg-type]
    expected = off(tuple(PROMPT), 40, ())
    on = engine("near", lookup=True, depth=3, width=2)
    (done,) = run(on, request(PROMPT, 40, speculation=speculation))
    assert done.tokens == expected
    assert (sum(step.drafted for step in done.steps) > 0) == (mode != "off")


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_node_and_source_limits_of_a_request(limit: int) -> None:
    on = engine("self", lookup=True, depth=4, width=2)
    asked = Speculation(max_nodes=limit, sources=frozenset({"standalone"}))
    (done,) = run(on, request(PROMPT, 30, speculation=asked))
    assert done.tokens == off(tuple(PROMPT), 30, ())
    assert all(step.drafted <= limit for step in done.steps)
    assert {name for step in done.steps for name in step.sources} <= {"standalone"}
    assert (limit == 0) == (not any(step.drafted for step in done.steps))


def test_preemption_and_eviction_change_no_token() -> None:
    asked = [request(p, 40, temperature=0.9, seed=i) for i, p in enumerate(prompts(6, 10, 30))]
    alone = [run(engine(), one)[0].tokens for one in asked]
    on = engine("near", depth=3, width=2, kv_tokens=160, max_rows=6)
    assert [done.tokens for done in run(on, *asked)] == alone
    assert on.stats().preempted > 0, "the pool must be too small for the test to bite"


def test_several_choices_differ_and_equal_off() -> None:
    asked = request(PROMPT, 24, n=3, temperature=1.0, seed=11)
    expected = [done.tokens for done in run(engine(), asked)]
    assert len({tuple(choice) for choice in expected}) == 3
    assert [done.tokens for done in run(engine("near", depth=3, width=2), asked)] == expected
