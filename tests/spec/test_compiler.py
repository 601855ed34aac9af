"""Compiling constraints: refusals that say where, bounds on everything, and the cache."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import nullcontext
from time import monotonic
from typing import Any

import pytest
from llguidance import LLMatcher

from spec_serve.spec import compiler as module
from spec_serve.spec import trial
from spec_serve.spec.compiler import Compiler, compiler_of
from spec_serve.spec.request import Constraint, RequestError
from spec_serve.spec.trial import Busy, try_out
from tests.engines import engine, request
from tests.grammars import SIX, constrained, spelling


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def alternatives(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {
            "oneOf": [
                {"type": "object", "properties": {"a": schema}},
                {"type": "object", "properties": {"b": schema}},
            ]
        }
    return schema


def schema(value: object, **options: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value), **options)


REFUSED = {
    "(": Constraint("regex", "a(b"),
    "look-around": Constraint("regex", "a(?=b)"),
    "2000000000": Constraint("regex", "a{2000000000}"),
    "300000": schema({"type": "string", "pattern": "^a{300000}$"}),
    "nested": schema(nested(100)),
    "no text": schema({"$ref": "#"}),
    "uniqueItems": schema({"type": "array", "uniqueItems": True}),
    "JSON": Constraint("json_schema", '{"type":'),
    "NaN": Constraint("json_schema", '{"const": NaN}'),
    "object or a boolean": schema([]),
    "multipleOf": schema({"type": "integer", "multipleOf": 999983}),
    "multiply": schema({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
    "foo": Constraint("lark", "start: foo"),
    "all different": Constraint("lark", 'start: %json {"multipleOf": 999983}'),
    "list of at least": Constraint("choices", "[]"),
    "choice 1": Constraint("choices", '["a", 3]'),
    "surrogate": Constraint("choices", '["\\ud800"]'),
    "date, datetime": Constraint("name", "nothing"),
    "takes no source": Constraint("json_object", "{}"),
    "empty text": Constraint("regex", "(b{0})"),
    "constraint.max_chars": Constraint("text", max_chars=0),
    "constraint.min_chars": Constraint("text", max_chars=3, min_chars=4),
    "constraint.banned": Constraint("text", banned=("",)),
    "(at #/properties/a~1b/items/not)": schema(
        {"properties": {"a/b": {"items": {"not": {"type": "null"}}}, "not": {}}}
    ),
    "(at #/anyOf/1/type)": schema({"anyOf": [{"type": "null"}, {"type": "nil"}]}),
    "at its character 3": Constraint("regex", "ab[c-"),
    "2(6)": Constraint("lark", 'start: b\nb: "x'),
    "its bounds": Constraint("choices", '["abc"]', banned=("a",)),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refusals_name_what_is_wrong(said: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiler_of(spelling()).compile(REFUSED[said])
    assert said in str(caught.value)
    assert caught.value.field.split(".")[0] == "constraint"
    assert caught.value.code == "invalid_request"
    with pytest.raises(RequestError, match=r".") as again:
        compiler_of(spelling()).compile(REFUSED[said])
    assert (str(again.value), again.value.field) == (str(caught.value), caught.value.field)


BOMBS = {
    "repetitions": Constraint("regex", "(a{1,1000}b{1,1000}){1,1000}"),
    "squared": Constraint("regex", "(a{1,800}){1,800}"),
    "plus": Constraint("regex", "((((a+)+)+)+)+$"),
    "oneOf": schema(alternatives(12)),
    "deep": Constraint("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000),
    "names": schema({"type": "object", "properties": {f"name_{i}": {} for i in range(20_000)}}),
    "enum": schema({"enum": [f"string number {i}" for i in range(50_000)]}),
    "megabyte": schema({"description": "x" * (1 << 20)}),
    "patterns": schema(
        {"allOf": [{"type": "string", "pattern": f"^.*{i}.*$"} for i in range(300)]}
    ),
    "divisors": schema({"properties": {f"p{i}": {"multipleOf": 997 - i} for i in range(30)}}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_case_19_hostile_sources_are_refused_or_work_and_others_step_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 120.0)  # else a busy machine may be told of instead
    compiler = Compiler(spelling())
    compiler.compile(SIX["date"])
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1
            time.sleep(0.001)

    other = threading.Thread(target=count)
    other.start()
    try:
        for _ in range(2):
            try:
                made = compiler.compile(BOMBS[name])
                assert made.grammar.start().allowed().any()
            except RequestError as error:
                assert error.field == "constraint" and error.code == "invalid_request"
    finally:
        stop.set()
        other.join()
    assert counted, "another thread ran meanwhile"
    # What either way became of it is kept: asking again compiles nothing.
    assert BOMBS[name] in compiler._kept


def test_a_process_that_was_ended_is_replaced() -> None:
    hostile = schema({"type": "integer", "multipleOf": 999983})
    assert "multipleOf" in str(_refusal(hostile))
    source = LLMatcher.grammar_from_json_schema(hostile.source)
    for _ in range(2):
        assert "takes more than" in try_out(source, 0.2)
        assert try_out(LLMatcher.grammar_from_regex("[a-z]+")) == ""


def _refusal(constraint: Constraint) -> RequestError:
    with pytest.raises(RequestError) as caught:
        compiler_of(spelling()).compile(constraint)
    return caught.value


def test_who_has_no_turn_in_time_is_refused_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = Compiler(spelling())
    told: list[float | None] = []

    def busy(source: str, within_s: float, until: float | None) -> str:
        told.append(until)
        raise Busy

    monkeypatch.setattr(module, "try_out", busy)
    until = monotonic() + 60
    with pytest.raises(RequestError, match="too many") as caught:
        compiler.begin(SIX["date"], until).result()
    assert caught.value.code == "overloaded" and told == [until]
    with pytest.raises(RequestError, match="too many"):  # past: not even begun
        compiler.begin(SIX["date"], monotonic() - 1).result()
    assert told == [until] and SIX["date"] not in compiler._kept
    monkeypatch.undo()
    assert compiler.compile(SIX["date"]).grammar.start().allowed().any()


def test_a_trial_without_time_left_does_not_begin() -> None:
    source = LLMatcher.grammar_from_regex("[a-z]+")
    with pytest.raises(Busy):
        try_out(source, until=monotonic() - 1)
    assert try_out(source) == ""


@pytest.mark.parametrize(("now", "busy"), [(0.5, False), (1.5, True)])
def test_who_looks_late_does_not_take_the_end_of_time_for_a_refusal(
    now: float, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process ends by itself soon after its time, which is no fault of the grammar."""
    ours, theirs = socket.socketpair()
    theirs.close()  # as one that has ended
    clock = iter((0.0, now))
    monkeypatch.setattr(trial, "monotonic", lambda: next(clock))
    with pytest.raises(trial.Busy) if busy else nullcontext():
        assert trial._asked(ours, "", 0.4, 1.0) is None
    assert ours.fileno() == -1


def test_an_answer_is_due_by_when_the_request_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "monotonic", lambda: 100.0)
    assert module.due(99.9) == 99.9 + module.ANSWER_S
    assert module.due(90.0) == 100.0 + module.LEAST_S  # it was long to read


def test_grammars_are_kept_within_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(spelling())
    first = compiler.compile(SIX["date"])
    assert compiler.compile(SIX["date"]) is first
    monkeypatch.setattr(module, "KEPT_BYTES", 1 << 20)
    for i in range(40):
        compiler.compile(Constraint("regex", f"{i}[0-9]+"))
        compiler.compile(SIX["simple json"])  # in use, so not the one to go
    assert compiler.kept_bytes <= 1 << 20
    assert compiler.compile(SIX["date"]) is not first
    assert len(compiler._kept) < 20 and SIX["simple json"] in compiler._kept


def test_bounds_share_the_grammar() -> None:
    compiler = Compiler(spelling())
    plain = compiler.compile(Constraint("regex", "[a-z]+"))
    assert compiler.compile(Constraint("regex", "[a-z]+", max_chars=3)).grammar is plain.grammar


def test_an_engine_refuses_what_it_can_not_enforce() -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        engine().validate(request([1, 2], constraint=SIX["date"]))
    on = constrained()
    with pytest.raises(RequestError, match="ignore_eos"):
        on.validate(request([1, 2], constraint=SIX["date"], ignore_eos=True))
    with pytest.raises(RequestError, match="look-around"):
        on.submit(request([1, 2], constraint=Constraint("regex", "(?=a)")))
    assert on.idle()


def test_lenient_lists_what_is_ignored() -> None:
    lenient = schema(
        {"type": "array", "items": {"oneOf": [{"type": "number"}, {"minimum": 2}]},
         "uniqueItems": True, "contains": {"const": 3}},
        strict=False,
    )  # fmt: skip
    made = compiler_of(spelling()).compile(lenient)
    assert {"uniqueItems", "contains", "oneOf"} <= set(made.grammar.ignored)
