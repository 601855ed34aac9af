"""What a constraint forces: nodes without logits, forcing left out, what comes first."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spec_serve.spec.compiler import compiler_of
from spec_serve.spec.grammar import Matcher, MatchError
from spec_serve.spec.request import Constraint, Speculation
from tests.engines import request, run
from tests.grammars import SIX, constrained, spelling
from tests.spec.walks import EOS, PROMPT, ids, tree, walk
from tests.spec.walks import no_hurry as no_hurry


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_nodes_without_a_choice_need_no_logits(temperature: float) -> None:
    """Unless they are to be told; the tokens are the same either way, guesses or not."""
    found, rows = {}, {}
    for name, most, logprobs in (("skip", None, None), ("told", None, 0), ("off", 0, None)):
        on = constrained("lookup")
        inner, counts = on._device.model.forward, []  # type: ignore[attr-defined]

        def forward(batch: Any, *rest: Any, inner: Any = inner, counts: Any = counts) -> Any:
            counts.append((len(batch.logits_at), int((batch.logit_of < -1).sum())))
            return inner(batch, *rest)

        on._device.model = _Spied(on._device.model, forward)  # type: ignore[attr-defined]
        asked = request(
            PROMPT, 64, constraint=SIX["nested json"], temperature=temperature, seed=3, eos=EOS
        )
        asked.logprobs = logprobs
        if most is not None:
            asked.speculation = Speculation(max_nodes=most)
        (done,) = run(on, asked)
        assert done.error is None and done.constraint is not None
        found[name] = (done.tokens, done.reason, done.constraint)
        rows[name] = [sum(kind) for kind in zip(*counts, strict=True)]
    assert found["skip"] == found["told"] == found["off"]
    forced = found["skip"][2].forced
    assert forced > 5 and rows["told"][1] == 0
    assert rows["off"][1] == forced, "one row for every token that was decided, and no other"
    assert rows["off"][0] == len(found["off"][0]) - forced
    assert rows["skip"][1] >= forced and rows["skip"][0] < rows["told"][0]


class _Spied:
    """A model with another forward."""

    def __init__(self, model: Any, forward: Any) -> None:
        self._model = model
        self.forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_what_is_forced_may_be_left_free_and_digits_are_ascii() -> None:
    """`forcing` is about tokens only; scripts' digits have bytes above ASCII's."""
    for kind, after in (("regex", ""), ("regex", "then"), ("json_schema", "")):
        source = "the other" if kind == "regex" else json.dumps({"const": "the other"})
        ways = []
        for forcing in (True, False):
            on = walk(Constraint(kind, source, after=after, forcing=forcing))
            on.take(ids(after))
            # The single letters of a word that the tokenizer would write with longer ones.
            for token in [*ids('"t' if kind == "json_schema" else "t")][:-1]:
                on.take([token])
            (mask,) = on.masks(())
            assert mask is not None
            ways.append(sum(int(word).bit_count() for word in mask))
        assert ways[0] == 1 < ways[1]
    for kind, source in (
        ("regex", r"[\d]\d\w"),
        ("json_schema", json.dumps({"type": "object", "patternProperties": {
            r"^\d\d\w$": {"const": {"pattern": r"\d"}}}, "additionalProperties": False})),
    ):  # fmt: skip
        matcher = compiler_of(spelling()).compile(Constraint(kind, source)).grammar.start()
        begun = '{"' if kind == "json_schema" else ""
        assert all(map(matcher.advance, ids(begun + "4")))
        assert matcher.copy().advance(ids("2")[0])
        assert not matcher.copy().advance(ids("٢")[0]), "ARABIC-INDIC DIGIT TWO"
        assert all(map(matcher.advance, ids("2")))
        assert matcher.copy().advance(ids("é")[0]) == (kind == "regex")
        if kind == "json_schema":
            assert all(map(matcher.advance, ids('x":{"pattern":"\\\\d"}}'))) and matcher.complete


def test_a_guess_the_matcher_gives_up_at_fails_only_who_follows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gives_up(self: Matcher) -> Any:
        raise MatchError("too much")

    good, bad = ids("4"), ids("7")
    for followed in (good, bad):
        on = walk(SIX["expressions"])
        kept = on.prune(tree([bad]), 8, 8)
        with monkeypatch.context() as broken:
            broken.setattr(Matcher, "allowed", gives_up)
            assert on.masks(range(len(kept)))[1] is None
        assert on.failed == "" and not on.over
        assert on.take(followed) == 1
        assert (on.failed, on.over) == (("too much", True) if followed is bad else ("", False))


def test_what_is_forced_first_comes_with_the_first_token() -> None:
    """Known without the model, it delays nothing; other guesses wait for the first token."""
    nested = len(ids('{"name_of_person":'))
    for name, least, most in (("nested json", nested, nested + 2), ("date", 1, 1)):
        asked = request(PROMPT, 64, constraint=SIX[name], eos=EOS)
        (done,), (plain,) = run(constrained("lookup", nodes=32), asked), run(constrained(), asked)
        assert done.tokens == plain.tokens
        assert least <= done.steps[0].accepted + 1 <= most
