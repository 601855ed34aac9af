"""Walks through grammars: masks of trees, forced tokens, traps of the library, bounds, endings."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from spec_serve.draft.budget import Calibration
from spec_serve.draft.mix import Candidates
from spec_serve.spec import constraint as constraint_module
from spec_serve.spec.compiler import compiler_of
from spec_serve.spec.constraint import Walk, _holds, _single
from spec_serve.spec.grammar import Matcher
from spec_serve.spec.request import Constraint
from tests.engines import request, run
from tests.grammars import NESTED, SIX, constrained, spelling, text
from tests.spec.walks import EOS, ORDER, PROMPT, ids, tree, walk
from tests.spec.walks import no_hurry as no_hurry


@pytest.mark.parametrize("name", SIX)
def test_every_row_of_random_trees_is_that_of_a_fresh_walk(name: str) -> None:
    """Along a text the grammar takes: illegal children are cut, others have the right mask."""
    chance = random.Random(name)
    size = spelling().vocab_size
    done = walk(SIX[name])
    for _ in range(25):
        matcher = compiler_of(spelling()).compile(SIX[name]).grammar.start()
        assert all(map(matcher.advance, done.tokens))
        root = matcher.allowed()
        paths = []
        for _ in range(6):
            path: list[int] = []
            probe = matcher.copy()
            for _ in range(4):
                may = [t for t in range(size) if _holds(probe.allowed(), t)]
                legal = may and chance.random() < 0.7
                path.append(chance.choice(may) if legal else chance.randrange(size))
                if not probe.advance(path[-1]):
                    break
            paths.append(path)
        guesses = tree(paths)
        kept = done.prune(guesses, 64, 0)
        found = {_path(kept, i) for i in range(len(kept))}
        for i in range(len(guesses)):
            path_ = _path(guesses, i)
            legal_path = _follow(matcher, path_)
            assert (path_ in found) == (legal_path is not None), "illegal is cut, legal is not"
        masks = done.masks(range(len(kept)))
        assert masks[0] is not None and (masks[0] & ~_ends(done) == root).all()
        for i in range(len(kept)):
            after = _follow(matcher, _path(kept, i))
            mask = masks[i + 1]
            if after is None or kept.tokens[i] in EOS:
                assert mask is None
                continue
            expected = after.allowed()
            if not expected.any():
                assert mask is None, "the choice ends there"
            else:
                assert mask is not None and (mask & ~_ends(done) == expected).all()
                assert _holds(mask, EOS[0]) == after.complete
        # The walk is where it was.
        again = done.prune(guesses, 64, 0)
        assert [_path(again, i) for i in range(len(again))] == [
            _path(kept, i) for i in range(len(kept))
        ]
        may = [t for t in range(size) if _holds(root, t)]
        done.take([chance.choice(may)])
        if done.over:
            break


def _ends(of: Walk) -> Any:
    return of._ends


def _path(of: Candidates, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node >= 0:
        path.append(of.tokens[node])
        node = of.parents[node]
    return tuple(reversed(path))


def _follow(matcher: Matcher, path: tuple[int, ...]) -> Matcher | None:
    """The matcher behind a path each of whose tokens its mask allows."""
    at = matcher.copy()
    for i, token in enumerate(path):
        if token in EOS:
            return at if at.complete and i == len(path) - 1 and at.allowed().any() else None
        if not _holds(at.allowed(), token) or not at.advance(token):
            return None
    return at


def test_forced_tokens_are_the_tokenizers_own_and_alone_in_their_masks() -> None:
    constraint = Constraint("json_schema", json.dumps(NESTED), whitespace="compact")
    on = walk(constraint)
    expected = ids(ORDER)
    at = forced = 0
    while at < len(expected):
        run_ = on.forced_run(32)
        assert run_ == expected[at : at + len(run_)]
        for token in run_:
            root = on.masks(())[0]
            assert root is not None and _single(root) and _holds(root, token)
            on.take([token])
            at += 1
            forced += 1
        if at < len(expected):
            assert on.take([expected[at]]) == 1
            at += 1
    assert on.over and on.complete and forced > len(expected) / 3
    outcome = on.outcome(False)
    assert outcome.schema_valid is True and outcome.forced >= forced


def test_tokens_known_behind_a_guess_are_added_below_it() -> None:
    on = walk(SIX["choices"])
    first = ids("negative")[0]
    kept = on.prune(tree([[first]]), 16, 16)
    best = max(range(len(kept)), key=lambda i: kept.depths[i])
    assert text(list(_path(kept, best))).startswith("ne") and len(kept) >= 1
    second = ids("positive")
    kept = on.prune(tree([second[:1]]), 32, 32)
    assert _path(kept, len(kept) - 1) == tuple(second)
    assert kept.reach[-1] == kept.reach[0], "what can't be wrong costs nothing"


def test_grammar_drafts_are_all_accepted() -> None:
    on = constrained("lookup", nodes=24)
    drafted = accepted = 0
    for temperature in (0.0, 1.0):
        asked = request(
            PROMPT, 90, constraint=SIX["nested json"], temperature=temperature, seed=4, eos=EOS
        )
        (done,) = run(on, asked)
        for step in done.steps:
            tried, right = step.sources.get("grammar", (0, 0))
            drafted, accepted = drafted + tried, accepted + right
    assert accepted > 40 and drafted >= accepted
    # Behind a guess that was wrong forced tokens fall with it; at the root they never do.
    off_ = run(constrained(), request(PROMPT, 90, constraint=SIX["nested json"], eos=EOS))[0]
    assert len(off_.steps) > 1.5 * len(
        run(on, request(PROMPT, 90, constraint=SIX["nested json"], eos=EOS))[0].steps
    )


# ---- traps of the library


def test_a_token_the_mask_forbids_never_reaches_the_matcher() -> None:
    """The matcher takes other spellings than its mask, and a wrong token would end it for good."""
    on = walk(SIX["nested json"])
    on.take(ids('{"'))
    forced = on.forced_run(8)[0]
    bytewise = ids("n")[0]
    assert forced != bytewise or not _holds(on.masks(())[0], 0)  # type: ignore[arg-type]
    kept = on.prune(tree([[forced], [ids("z")[0]], [ids("}")[0], forced]]), 16, 0)
    assert [_path(kept, i) for i in range(len(kept))] == [(forced,)]
    assert on.failed == "" and on.take([forced]) == 1


def test_case_16_nothing_is_asked_of_a_grammar_behind_its_end() -> None:
    on = walk(SIX["date"])
    tokens = ids("2024-01-31T10:59")
    paths = [[*tokens, EOS[0], 5, 6], [*tokens, 7, 8]]
    kept = on.prune(tree(paths), 64, 0)
    assert len(kept) == len(tokens)
    assert on.masks([len(kept) - 1])[-1] is None
    assert on.take([*tokens, EOS[0], 9]) == len(tokens)
    assert on.over and on.complete and on.tokens == tokens


def test_an_end_inside_a_tree() -> None:
    on = walk(Constraint("regex", "[0-9]+"))
    four = ids("4")[0]
    kept = on.prune(tree([[four, EOS[0], four], [EOS[0]]]), 16, 0)
    assert [_path(kept, i) for i in range(len(kept))] == [(four,), (four, EOS[0])]
    assert on.take([four, EOS[0]]) == 2 and on.over and on.complete


def test_limits_met_by_a_guess_end_nobody() -> None:
    on = walk(Constraint("text", max_chars=500, banned=tuple(f"word{i}" for i in range(100))))
    for token in ids("A word that is none, wordless, word 7 and wor"):
        assert on.take([token]) == 1
    kept = on.prune(tree([ids("d12"), ids("d of")]), 16, 0)
    assert "d1" not in "".join(text(list(_path(kept, i))) for i in range(len(kept)))
    assert not on.failed


def test_masks_that_take_long_cost_guesses_not_others_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constraint_module, "WITHIN_S", -1.0)
    on = constrained("near", depth=4, width=2)
    asked = request(PROMPT, 60, constraint=SIX["nested json"], eos=EOS)
    (done,) = run(on, asked)
    assert sum(step.drafted for step in done.steps) == 0
    (off,) = run(constrained(), asked)
    assert done.tokens == off.tokens


# ---- bounds


@pytest.mark.parametrize("kind", ["none", "near", "lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_bounds_are_never_exceeded(kind: str, temperature: float) -> None:
    on, off = constrained(kind, depth=4, width=2), constrained()
    asked = {
        "chars": Constraint("text", max_chars=17, min_chars=9),
        "words": Constraint("regex", "[a-z \n]+", max_words=3),
        "sentences": Constraint("regex", "[a-z]([a-z .!]|é)*", max_sentences=2),
        "banned": Constraint("regex", "[a-f3à-ï]+", banned=("a3", "33", "é", "bcd")),
        "both": Constraint("regex", "(ü|é|[0-9]){1,60}", max_chars=9, min_chars=5),
    }
    for name, constraint in asked.items():
        for seed in range(2):
            options: dict[str, Any] = {"temperature": temperature, "seed": seed, "eos": EOS}
            (done,) = run(on, request(PROMPT, 60, constraint=constraint, **options))
            assert done.error is None, (name, done.error)
            told = text(done.tokens)
            assert "\ufffd" not in told or done.reason == "length"
            if constraint.max_chars is not None:
                assert len(told) <= constraint.max_chars
                if done.reason == "stop":
                    assert len(told) >= constraint.min_chars
            if constraint.max_words is not None:
                assert len(told.split()) <= constraint.max_words
            if constraint.max_sentences is not None:
                ends = told.replace("!", ".").replace(". ", ".\n").split("\n")
                assert len([part for part in ends if part.strip(". ")]) <= 2 or " ." in told
            assert not any(word in told for word in constraint.banned)
            (alone,) = run(off, request(PROMPT, 60, constraint=constraint, **options))
            assert (alone.tokens, alone.reason) == (done.tokens, done.reason), name


def test_a_text_cut_by_its_bound_is_told_as_such() -> None:
    cut = Constraint("json_schema", json.dumps(NESTED), max_chars=20, whitespace="compact")
    (done,) = run(constrained(), request(PROMPT, 60, constraint=cut, eos=EOS))
    assert done.reason == "length" and done.constraint is not None
    assert not done.constraint.complete and done.constraint.schema_valid is None


def test_where_no_token_is_left_the_choice_ends_with_an_error() -> None:
    dead = Constraint("regex", "abc", banned=("bc",))
    (done, other) = run(constrained(), request(PROMPT, 60, constraint=dead), request(PROMPT, 5))
    assert done.reason == "error" and done.error is not None
    assert done.error.field == "constraint" and "no token" in str(done.error)
    assert other.reason == "length" and other.constraint is None


# ---- behind a marker


@pytest.mark.parametrize("after", ["</think>", "<|im_start|>"])
@pytest.mark.parametrize("k", range(1, 9))
def test_free_until_a_marker_inside_an_accepted_run(after: str, k: int) -> None:
    constraint = Constraint("choices", '["yes","no"]', after=after, max_chars=3)
    free = ids("let me see, yes")
    marker = spelling().encode(after, special=True)
    tokens = [*free, *marker, *ids("no")]
    for start in range(0, len(tokens), k):
        on = walk(constraint)
        on.take(tokens[:start])
        rest = tokens[start : start + k]
        kept = on.prune(tree([rest, [*rest[:-1], ids("x")[0]]]), 32, 0)
        assert tuple(rest) in {_path(kept, i) for i in range(len(kept))}
        assert on.take(rest) == len(rest)
    on = walk(constraint)
    assert on.take([*tokens, 5]) == len(tokens) and on.over and on.complete
    on = walk(constraint)
    on.take([*free, *marker])
    assert on.prune(tree([[ids("x")[0]], ids("</think>")]), 8, 0).tokens == []


def test_a_marker_is_waited_for() -> None:
    on = walk(Constraint("choices", '["yes","no"]', after="</think>"))
    for token in ids("yes no 123 < / think"):
        assert on.take([token]) == 1
        root = on.masks(())[0]
        assert root is not None and not _holds(root, EOS[0])
    assert not on.complete


# ---- endings beside the grammar's own


def test_min_tokens_and_bad_words_yield_where_nothing_else_is_left() -> None:
    date = SIX["date"]
    words = [(token,) for token in range(256) if text([token]).isdigit()]
    options: dict[str, Any] = {"constraint": date, "eos": EOS}
    (done,) = run(constrained(), request(PROMPT, 60, min_tokens=40, bad_words=words, **options))
    assert done.reason == "stop" and len(text(done.tokens)) == 16
    number = Constraint("regex", "[0-9]+")
    (done,) = run(constrained(), request(PROMPT, 60, min_tokens=25, constraint=number, eos=EOS))
    assert len(done.tokens) >= 25


def test_a_complete_text_may_end_by_an_end_id() -> None:
    number = Constraint("regex", "[0-9]+")
    bias = {EOS[0]: 100.0}
    (done,) = run(constrained(), request(PROMPT, 60, constraint=number, eos=EOS, logit_bias=bias))
    assert done.matched == EOS[0] and len(done.tokens) == 2 and done.constraint is not None
    assert done.constraint.complete


def test_a_stop_id_ends_it_anywhere() -> None:
    (done,) = run(constrained(), request(PROMPT, 60, constraint=SIX["date"], stop_ids=ids("-")))
    assert text(done.tokens).endswith("-") and done.constraint is not None
    assert not done.constraint.complete


def test_calibration_never_lowers_what_is_certain() -> None:
    on = walk(SIX["nested json"])
    made = Candidates()
    made.add_certain(on.forced_run(8), "grammar")
    made.settle()
    assert made.reach and set(made.reach) == {1.0}
    assert Calibration().rate("grammar", 1, 1.0) == 1.0
