"""The finger in a copied text, and predictions of the client: in step, out of step, back again."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from spec_serve.draft.follow import CLASSES, Follower, Prediction, length_class

TEXT = list(range(100, 160))


def test_length_classes() -> None:
    edges = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 5), (6, 8), (9, 15), (16, 31), (32, 1000)]
    for name, (low, high) in zip(CLASSES, edges, strict=True):
        assert length_class(low) == length_class(high) == name


def test_prediction_is_followed_from_its_beginning_after_the_prompt() -> None:
    source = Prediction(TEXT, skip=5)
    source.extend([1, 2, 3])
    assert source.guess(4) == []
    source.extend([4, 5])
    (guess,) = source.guess(4)
    assert (guess.tokens, guess.kind) == (TEXT[:4], "prediction:0")
    source.extend(TEXT[:6])
    (guess,) = source.guess(4)
    assert (guess.tokens, guess.kind) == (TEXT[6:10], "prediction:6-8")
    assert source.hits == 6


def test_prompt_and_output_may_come_together() -> None:
    source = Prediction(TEXT, skip=2)
    source.extend([7, 8, *TEXT[:3]])
    assert source.guess(2)[0].tokens == TEXT[3:5]


def test_a_replaced_token_is_one_of_two_hypotheses_and_settled_by_the_next() -> None:
    source = Prediction(TEXT)
    source.extend([*TEXT[:10], 7])
    assert {(guess.tokens[0], guess.kind) for guess in source.guess(5)} == {
        (TEXT[10], "prediction:insert"),
        (TEXT[11], "prediction:replace"),
    }
    source.extend([TEXT[11]])
    (guess,) = source.guess(5)
    assert (guess.tokens, guess.kind) == (TEXT[12:17], "prediction:1")


def test_deleted_and_inserted_tokens() -> None:
    source = Prediction(TEXT)
    source.extend([*TEXT[:10], TEXT[14]])
    assert source.guess(3)[0].tokens == TEXT[15:18]
    source = Prediction(TEXT)
    source.extend([*TEXT[:10], 7, 8, 9, TEXT[10], TEXT[11]])
    assert source.guess(3)[0].tokens == TEXT[12:15]


def test_the_nearest_place_is_preferred() -> None:
    text = [*range(10), 77, 1000, *range(20, 40), 77, 1001]
    source = Prediction(text)
    source.extend([*range(9), 50, 77])
    assert source.guess(1)[0].tokens == [1000]


def test_a_wrong_realignment_is_taken_back() -> None:
    text = [*range(20), 90, 20, 21, 22, 23, 24, 25, 26, 27, 90, 50, 51, 52]
    source = Prediction(text)
    source.extend([*range(20), 7, 90])  # 90 was put in as well; the copy goes on with 20
    source.extend([20, 21])
    assert source.guess(3)[0].tokens == [22, 23, 24]


def test_far_away_places_are_found_by_three_tokens() -> None:
    text = list(range(400))
    source = Prediction(text)
    source.extend([0, 1, 2, 300, 301])
    assert source.guess(2) == [] or source.guess(2)[0].tokens != [302, 303]
    source.extend([302])
    assert source.guess(2)[0].tokens == [303, 304]
    source.extend([20, 21, 22])
    assert source.guess(2)[0].tokens == [23, 24]


def test_after_long_unrelated_text_it_keeps_silent_until_the_copy_goes_on() -> None:
    source = Prediction(TEXT)
    source.extend([*TEXT[:8], *range(50)])
    assert source.guess(4) == []
    source.extend(TEXT[30:33])
    assert source.guess(4)[0].tokens == TEXT[33:37]


def test_an_edit_is_made_again_until_it_proves_wrong() -> None:
    text = [1, 2, 3, 70, 71, 4, 5, 6, 7, 8, 9, 70, 71, 10, 11, 12, 13, 14, 70, 71, 15, 16]
    source = Prediction(text)
    source.extend([1, 2, 3, 80, 4, 5, 6, 7])
    edited = [guess for guess in source.guess(6) if guess.kind == "prediction:edited"]
    assert [guess.tokens for guess in edited] == [[8, 9, 80, 10, 11, 12]]
    assert edited[0].probs[2] < edited[0].probs[1]
    source.extend([8, 9, 80])
    assert source.guess(3)[0].tokens == [10, 11, 12]
    source.extend([10, 11, 12, 13])
    assert any(guess.tokens == [14, 80, 15, 16] for guess in source.guess(8))
    source.extend([14, 70, 71])
    assert all(guess.kind != "prediction:edited" for guess in source.guess(8))


def test_the_middle_of_a_known_edit() -> None:
    text = [1, 2, 70, 3, 4, 5, 6, 7, 70, 8, 9, 10]
    source = Prediction(text)
    source.extend([1, 2, 80, 81, 82, 3, 4, 5, 6, 7, 80])
    best = source.guess(4)[0]
    assert (best.tokens, best.kind) == ([81, 82, 8, 9], "prediction:edited")


def test_an_empty_prediction_guesses_nothing() -> None:
    source = Prediction([])
    source.extend([1, 2, 3, 4])
    assert source.guess(4) == []
    assert source.hits == 0


def test_nothing_is_guessed_behind_the_end() -> None:
    source = Prediction(TEXT)
    source.extend(TEXT)
    assert source.guess(4) == []
    source.extend([1, 2])
    assert all(guess.tokens for guess in source.guess(4))


@given(
    st.lists(st.integers(0, 4), max_size=30),
    st.lists(st.integers(0, 4), max_size=80),
    st.integers(1, 9),
)
def test_any_text_against_any_output(text: list[int], output: list[int], limit: int) -> None:
    whole, pieces = Prediction(text), Prediction(text)
    whole.extend(output)
    for token in output:
        pieces.extend([token])
        for guess in pieces.guess(limit):
            assert 1 <= len(guess.tokens) <= limit
            assert len(guess.probs) == len(guess.tokens)
            assert all(0.0 < p < 1.0 for p in guess.probs)
        plain = [g.tokens[0] for g in pieces.guess(limit) if g.kind != "prediction:edited"]
        assert len(set(plain)) == len(plain)
    assert whole.guess(limit) == pieces.guess(limit)
    assert whole.hits == pieces.hits <= len(output)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.data())
def test_in_step_it_agrees_with_the_text(text: list[int], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(text) - 1))
    follower = Follower(text)
    assert follower.lost and not follower.settled
    follower.start(begin, 0)
    for token in text[begin:]:
        follower.advance(token)
        assert follower.settled
    assert follower.at == len(text)
    assert follower.agreed == len(text) - begin
    assert follower.expect() == [(len(text), len(text) - begin)]


def test_edits_kept_are_bounded() -> None:
    rng = random.Random(0)
    text = [rng.randrange(1000) for _ in range(2000)]
    source = Prediction(text)
    for start in range(0, 1900, 10):
        source.extend([*text[start : start + 9], 5000 + start])
    edits = source._follower._edits
    assert 0 < len(edits) <= Follower.EDITS
