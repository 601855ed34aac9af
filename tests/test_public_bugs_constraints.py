"""Cases of public bug reports that concern constrained text; numbers as in the case list.

Case 17 is tests/test_lossless_grammar.py, case 19 tests/spec/test_compiler.py.
"""

from __future__ import annotations

import json
import math

import jsonschema
import pytest

from spec_serve.spec.request import Constraint, Speculation
from spec_serve.target.native import load_native
from tests.engines import end, finish, ids, prompts, request, run
from tests.grammars import NESTED, SIX, constrained, spelling, text
from tests.tiny import tiny_checkpoint

EOS = tuple(sorted(spelling().eos_ids))
PROMPT = prompts(1, 20, 24, seed=5)[0]
OK = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TWO = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 12} for name in "ab"},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def schema(value: object, **options: object) -> Constraint:
    return Constraint("json_schema", json.dumps(value), **options)  # type: ignore[arg-type]


def test_case_14_log_probabilities_stay_raw_and_finite() -> None:
    """Of the model's own logits, before masks: what is forbidden has a finite value too."""
    choice = Constraint("regex", "(yes|no)")
    for on in (constrained(), constrained("near", depth=3, width=2)):
        (done,) = run(on, request(PROMPT, 8, constraint=choice, eos=EOS, logprobs=5))
        assert done.logprobs is not None and len(done.logprobs) == len(done.tokens)
        for entry in done.logprobs:
            values = [entry.logprob, *(value for _, value in entry.top)]
            assert len(values) == 6 and all(map(math.isfinite, values))
            json.dumps(values, allow_nan=False)
    (free,) = run(constrained(), request(PROMPT, 1, eos=EOS, logprobs=5))
    (held,) = run(constrained(), request(PROMPT, 8, constraint=choice, eos=EOS, logprobs=5))
    assert free.logprobs is not None and held.logprobs is not None
    assert free.logprobs[0].top == held.logprobs[0].top


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(8, 2), (12, 1)])
def test_case_16_json_that_is_complete_ends_and_neighbours_go_on(
    shape: tuple[int, int], temperature: float
) -> None:
    on = constrained("self", lookup=True, depth=shape[0], width=shape[1], nodes=15)
    asked = [
        request(prompt, 40, constraint=schema(OK), temperature=temperature, seed=i, eos=EOS)
        for i, prompt in enumerate(prompts(4, 4, 9, seed=3))
    ]
    free = [request(prompt, 30, seed=9) for prompt in prompts(3, 4, 9, seed=4)]
    alone = [run(constrained(), one)[0].tokens for one in free]
    done = run(on, *asked, *free)
    for one in done[: len(asked)]:
        assert one.reason == "stop" and one.error is None
        jsonschema.validate(json.loads(text(one.tokens)), OK)
        assert text(one.tokens).endswith("}")
    assert [one.tokens for one in done[len(asked) :]] == alone


@pytest.mark.parametrize("kind", ["none", "near", "lookup"])
def test_case_18_white_space_in_json_is_bounded(kind: str) -> None:
    blanks = {
        i: 8.0 for i in range(spelling().vocab_size)
        if spelling().token_bytes(i) and not spelling().token_bytes(i).strip(b" \t\n\r")
    }  # fmt: skip
    on = constrained(kind, depth=4, width=2)
    asked = request(PROMPT, 300, constraint=schema(TWO), eos=EOS, logit_bias=blanks)
    (done,) = run(on, asked)
    told = text(done.tokens)
    assert done.reason == "stop"
    jsonschema.validate(json.loads(told), TWO)
    outside = json.dumps(json.loads(told), separators=(",", ":"))
    assert len(told) - len(outside.encode().decode("unicode_escape")) < 9 * 22
    (alone,) = run(constrained(), asked)
    assert alone.tokens == done.tokens
    compact = request(
        PROMPT, 300, constraint=schema(TWO, whitespace="compact"), eos=EOS, logit_bias=blanks
    )
    (tight,) = run(on, compact)
    assert text(tight.tokens).startswith('{"a":"') and '","b":"' in text(tight.tokens)


@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_case_20_characters_of_several_tokens_are_whole(nodes: int) -> None:
    wanted = "\U0001f600\u6f22\u5b57\u00e9\U0001f469\u200d\U0001f467a"
    on = constrained("lookup", nodes=nodes)
    (done,) = run(on, request(PROMPT, 600, constraint=Constraint("regex", f"({wanted}){{12}}")))
    assert text(done.tokens) == wanted * 12 and done.reason == "stop"
    (cut,) = run(on, request(PROMPT, 7, constraint=Constraint("regex", f"({wanted}){{12}}")))
    assert cut.tokens == done.tokens[:7] and cut.reason == "length"
    assert cut.constraint is not None and not cut.constraint.complete


# ---- what a constraint must not disturb, and what must not disturb it


@pytest.mark.parametrize("kind", ["lookup", "near"])
def test_preemption_choices_and_cancelling(kind: str) -> None:
    asked = [
        request(prompt, 70, constraint=SIX[name], temperature=0.9, seed=i, eos=EOS, n=1 + i % 2)
        for i, (prompt, name) in enumerate(zip(prompts(6, 10, 30), SIX, strict=True))
    ]
    alone = [[done.tokens for done in run(constrained(), one)] for one in asked]
    small = constrained(kind, depth=3, width=2, kv_tokens=190, max_rows=6)
    for one in asked:
        small.submit(one)
    doomed = request(PROMPT, 70, constraint=SIX["sql"], eos=EOS)
    small.submit(doomed)
    early = [event for _ in range(3) for event in small.step()]
    small.cancel(doomed.id)
    told = finish(small)
    for event in reversed(early):
        told.setdefault(event.request.id, []).insert(0, event)
    for one, expected in zip(asked, alone, strict=True):
        events = told[one.id]
        got = [
            ids([event for event in events if event.index == index]) for index in range(one.n)
        ]
        assert got == expected
    assert end(told[doomed.id]).reason == "cancelled"
    assert small.stats().preempted > 0, "the pool must be too small for the test to bite"


def test_the_compiled_model_is_as_exact() -> None:
    model = load_native(tiny_checkpoint("llama"), 2, "q8_0")
    for name in ("nested json", "choices", "sql"):
        for temperature in (0.0, 1.0):
            options = {
                "constraint": SIX[name], "temperature": temperature, "seed": 5, "eos": EOS
            }  # fmt: skip
            (off,) = run(constrained(model=model), request(PROMPT, 60, **options))  # type: ignore[arg-type]
            for kind in ("lookup", "near"):
                on = constrained(kind, model=model, depth=3, width=2)
                (done,) = run(on, request(PROMPT, 60, **options))  # type: ignore[arg-type]
                assert (done.tokens, done.reason) == (off.tokens, off.reason)


def test_every_sampling_option_at_once() -> None:
    options: dict[str, object] = {
        "constraint": SIX["nested json"], "temperature": 0.9, "seed": 3, "top_k": 40,
        "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.5,
        "presence_penalty": 0.3, "logit_bias": {7: 2.0, 100: 1.0}, "bad_words": ((7,), (35, 8)),
        "min_tokens": 6, "eos": EOS,
    }  # fmt: skip
    (off,) = run(constrained(), request(PROMPT, 80, **options))  # type: ignore[arg-type]
    jsonschema.validate(json.loads(text(off.tokens)), NESTED)
    for kind in ("lookup", "near", "second"):
        on = constrained(kind, depth=3, width=2)
        (done,) = run(on, request(PROMPT, 80, **options))  # type: ignore[arg-type]
        assert done.tokens == off.tokens


@pytest.mark.parametrize("mode", ["auto", "off", "max"])
def test_modes_and_sources_of_a_request(mode: str) -> None:
    asked = request(PROMPT, 70, constraint=SIX["nested json"], eos=EOS)
    (off,) = run(constrained(), asked)
    on = constrained("lookup")
    only = Speculation(mode=mode, sources=frozenset({"grammar"}))  # type: ignore[arg-type]
    (done,) = run(
        on, request(PROMPT, 70, constraint=SIX["nested json"], eos=EOS, speculation=only)
    )
    assert done.tokens == off.tokens
    names = {name for step in done.steps for name in step.sources}
    assert names == (set() if mode == "off" else {"grammar"})
    without = Speculation(sources=frozenset({"suffix"}))
    (done,) = run(
        on, request(PROMPT, 70, constraint=SIX["nested json"], eos=EOS, speculation=without)
    )
    assert done.tokens == off.tokens
    assert {name for step in done.steps for name in step.sources} <= {"suffix"}


def test_choices_are_sampled_as_the_masked_distribution_says() -> None:
    """Three choices of one token each: frequencies over seeds against the softmax of theirs."""
    from scipy.stats import chisquare

    from tests.engines import logits_after

    letters = [spelling().encode(letter)[0] for letter in "xyz"]
    weights = logits_after(PROMPT)[letters].double().softmax(0)
    on = constrained("self", depth=2, width=2)
    three = Constraint("choices", '["x","y","z"]')
    many = 600
    done = run(
        on, *(request(PROMPT, 4, constraint=three, temperature=1.0, seed=i) for i in range(many))
    )
    seen = [sum(one.tokens == [letter] for one in done) for letter in letters]
    assert sum(seen) == many
    assert chisquare(seen, (weights * many).tolist()).pvalue > 1e-3
