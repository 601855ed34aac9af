"""Continuations: one tree, one pass, and the very log-probabilities of each text scored alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from spec_serve.cache.tree import TokenTree
from spec_serve.spec.continuations import tree_of
from spec_serve.spec.request import Constraint, RequestError
from tests.engines import engine, request

PROMPT = [5, 9, 200, 31, 7, 7, 80]
TEXTS = [(1, 2, 3), (1, 2), (1, 4, 5, 6), (7,), (1, 2, 3)]


def test_beginnings_that_are_shared_are_one_node() -> None:
    tree, chains = tree_of([8, 9], TEXTS)
    tree.check()
    assert isinstance(tree, TokenTree) and len(tree) == 2 + 7 and tree.given == 2
    assert chains == [[2, 3, 4], [2, 3], [2, 5, 6, 7], [8], [2, 3, 4]]


def scored(made: Any, prompt: list[int], texts: Any, **changes: Any) -> Any:
    asked = request(prompt, 1, **changes)
    asked.continuations = tuple(texts)
    (done,) = made.generate([asked])
    made.store.check()
    return done


def alone(made: Any, prompt: list[int], text: Any) -> list[float]:
    """By scoring the whole as a prompt of its own."""
    (done,) = made.generate([request([*prompt, *text], 1, prompt_logprobs=0)])
    return [one.logprob for one in done.prompt_logprobs[len(prompt) - 1 :]]


@pytest.mark.parametrize("kind", ["none", "lookup", "near"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_scores_are_those_of_each_text_alone(kind: str, family: str) -> None:
    made = engine(kind, family=family)
    chooser = random.Random(3)
    for _ in range(3):
        prompt = [chooser.randrange(290) for _ in range(chooser.choice((1, 6, 90)))]
        texts = [
            tuple(chooser.randrange(4) for _ in range(chooser.randint(1, 6))) for _ in range(9)
        ]
        done = scored(made, prompt, texts)
        (plain,) = made.generate([request(prompt, 1)])
        assert done.tokens == plain.tokens, "what is chosen does not depend on what is scored"
        (step,) = done.steps
        assert (step.drafted, step.accepted, step.tree_tokens) == (0, 0, [])
        told = [one.logprob for one in done.prompt_logprobs]
        assert [one.token for one in done.prompt_logprobs] == [t for text in texts for t in text]
        at = 0
        for text in texts:
            assert told[at : at + len(text)] == pytest.approx(alone(made, prompt, text), abs=1e-4)
            at += len(text)
        again = scored(made, prompt, texts)
        assert again.usage.cached_tokens >= len(prompt) - 1
        assert [one.logprob for one in again.prompt_logprobs] == told


def test_beside_other_rows_and_with_little_room() -> None:
    made = engine("lookup", kv_tokens=64, max_rows=4)
    asked = request(PROMPT, 1)
    asked.continuations = tuple(TEXTS)
    others = [request([3, 4, 5], 20), request([6, 7], 20, temperature=1.0, seed=4)]
    found = made.generate([others[0], asked, others[1]])
    made.store.check()
    told = [one.logprob for one in found[1].prompt_logprobs or []]
    expected = [lp for text in TEXTS for lp in alone(engine("none"), PROMPT, text)]
    assert told == pytest.approx(expected, abs=1e-4)
    assert [len(done.tokens) for done in found] == [20, 1, 20]


@pytest.mark.parametrize(
    ("texts", "changes", "told"),
    [
        ([()], {}, "one of them is empty"),
        ([(1,) * 1025], {}, "at most 1024"),
        ([(9999,)], {}, "9999"),
        ([(1,)], {"prompt_logprobs": 0}, "together with prompt_logprobs"),
        ([(1,)], {"n": 2}, "several choices"),
        ([(1,)], {"constraint": Constraint("regex", "a")}, "which a constraint contradicts"),
        ([(1,) * 1000], {}, "that are held"),
    ],
)
def test_refused(texts: Any, changes: dict[str, Any], told: str) -> None:
    made = engine("none", kv_tokens=512)
    with pytest.raises(RequestError, match=told) as error:
        scored(made, PROMPT, texts, **changes)
    assert error.value.field == "continuations"


def test_more_than_one_token_is_refused() -> None:
    asked = request(PROMPT, 2)
    asked.continuations = ((1,),)
    with pytest.raises(RequestError, match="max_tokens 1 only"):
        engine("none").validate(asked)
