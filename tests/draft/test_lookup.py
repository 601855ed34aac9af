"""Look-ups in the row's own text and in the radix tree: what is guessed, and what never is."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_serve.cache.radix import RadixTree
from spec_serve.draft.base import Guess, Source
from spec_serve.draft.follow import Prediction
from spec_serve.draft.lookup import Continuations, Ngram
from spec_serve.draft.shared import Shared, SharedCorpus

TEXTS = st.integers(1, 6).flatmap(
    lambda letters: st.lists(st.integers(0, letters - 1), max_size=80)
)


def assert_well_formed(guesses: list[Guess], limit: int) -> None:
    for guess in guesses:
        assert 1 <= len(guess.tokens) <= limit
        assert len(guess.probs) == len(guess.tokens)
        assert all(0.0 < p < 1.0 for p in guess.probs)


def play(source: Source, output: Sequence[int], limit: int = 16) -> list[int]:
    """Emit `output` in steps as a verifier would (the best chain plus a bonus); tokens per step."""
    steps, at = [], 0
    while at < len(output):
        best = 0
        for guess in source.guess(limit):
            right = 0
            for token, truth in zip(guess.tokens, output[at:], strict=False):
                if token != truth:
                    break
                right += 1
            best = max(best, right)
        new = output[at : at + best + 1]
        source.extend(new)
        steps.append(len(new))
        at += len(new)
    return steps


@given(TEXTS, st.integers(1, 20), st.integers(0, 4))
def test_guesses_are_bounded_distinct_and_deterministic(
    text: list[int], limit: int, alternatives: int
) -> None:
    source, twin = Ngram(alternatives=alternatives), Ngram(alternatives=alternatives)
    source.extend(text[:40])
    twin.extend(text[:40])
    for token in [*text[40:], None]:
        guesses = source.guess(limit)
        assert_well_formed(guesses, limit)
        assert guesses == source.guess(limit) == twin.guess(limit)
        firsts = [guess.tokens[0] for guess in guesses if guess.kind != "suffix:edited"]
        assert len(set(firsts)) == len(firsts)
        assert set(firsts) <= set(text)
        if token is not None:
            source.extend([token])
            twin.extend([token])


@given(TEXTS)
def test_one_guess_continues_the_longest_match(text: list[int]) -> None:
    source = Ngram()
    source.extend(text)
    guesses = source.guess(8)
    length = 0
    for end in range(1, len(text)):
        same = 0
        while same < end and text[end - 1 - same] == text[-1 - same]:
            same += 1
        length = max(length, same)
    assert bool(guesses) == (length > 0)
    if length:
        followers = {
            text[end]
            for end in range(length, len(text))
            if text[end - length : end] == text[len(text) - length :]
        }
        assert followers & {guess.tokens[0] for guess in guesses}


@pytest.mark.parametrize("period", [[7], [1, 2], [1, 2, 3, 1, 4], list(range(11))])
def test_a_period_goes_on_for_as_long_as_asked(period: list[int]) -> None:
    source = Ngram()
    source.extend([50, 51, *(period * 3)])
    best = source.guess(3 * len(period) + 2)[0]
    assert best.tokens == (period * 5)[: 3 * len(period) + 2]


def test_nothing_repeated_means_no_guess() -> None:
    source = Ngram()
    assert source.guess(8) == []
    source.extend(list(range(30)))
    assert source.guess(8) == []
    assert source.guess(0) == []


def test_alternatives_follow_the_same_or_a_shorter_match() -> None:
    source = Ngram(alternatives=2)
    source.extend([1, 2, 5, 0, 1, 2, 5, 0, 1, 2, 6, 0, 9, 2, 7, 0, 1, 2])
    guesses = source.guess(1)
    assert [(guess.tokens[0], guess.kind) for guess in guesses] == [
        (6, "suffix:3/split"),  # as often as 5, but later
        (5, "suffix:3/other"),
        (7, "suffix:1/other"),
    ]
    assert guesses[0].probs[0] > guesses[1].probs[0] > guesses[2].probs[0]


def test_longer_matches_promise_more() -> None:
    text = list(range(100))
    first = []
    for length in (1, 2, 3, 4, 6, 9, 16, 32):
        source = Ngram()
        source.extend([*text, *text[50 - length : 50]])
        (guess,) = source.guess(4)
        assert guess.tokens == text[50:54]
        first.append((guess.probs[0], guess.kind))
    assert first == sorted(first, key=lambda pair: pair[0])
    assert len({kind for _, kind in first}) == len(first)


def test_a_copy_with_replaced_inserted_and_deleted_tokens_comes_back_at_once() -> None:
    rng = random.Random(3)
    passage = [rng.randrange(40) for _ in range(120)]
    for change in (
        [*passage[:60], 900, *passage[61:]],
        [*passage[:60], 901, 902, *passage[60:]],
        [*passage[:60], *passage[62:]],
    ):
        source = Ngram()
        source.extend([*passage, 950, 951])
        source.extend(change[:40])
        steps = play(source, change[40:], limit=16)
        # 80 tokens by at most 17: five steps without any edit, and no more than four for one.
        assert len(steps) <= 9, steps


def test_a_renaming_is_made_again() -> None:
    rng = random.Random(5)
    body = [rng.randrange(200) for _ in range(150)]
    for place in (30, 60, 90, 120):
        body[place : place + 2] = [700, 701]
    renamed: list[int] = []
    for token in body:
        renamed += {700: [800, 801, 802], 701: []}.get(token, [token])
    source = Ngram()
    source.extend([*body, 950])
    source.extend(renamed[:75])  # the first two are known by now
    assert len(play(source, renamed[75:], limit=24)) <= 5


def test_long_text_is_indexed_in_bursts_without_guesses_in_between() -> None:
    rng = random.Random(1)
    text = [rng.randrange(50) for _ in range(1000)]
    text += text[100:140]
    whole, slow = Ngram(burst=2000), Ngram(burst=300)
    whole.extend(text)
    slow.extend(text)
    assert slow.waiting == len(text) - 300
    waits = 0
    while not (guesses := slow.guess(8)):
        waits += 1
        assert slow.waiting > 0
    assert waits == 2
    assert guesses == whole.guess(8)
    assert guesses[0].tokens == text[140:148]
    slow.extend([text[140]])
    whole.extend([text[140]])
    assert slow.guess(8) == whole.guess(8)


class Cursor:
    """A cursor over fixed texts: continuations of those that begin with what was told."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.path: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.path += tokens

    def guess(self, limit: int) -> list[list[int]]:
        size = len(self.path)
        return [text[size : size + limit] for text in self.texts if text[:size] == self.path]


def test_continuations_follow_the_cursor_and_gain_confidence() -> None:
    texts = [list(range(20)), [0, 1, 2, 70, 71]]
    source = Continuations(Cursor(texts))
    source.extend([0, 1, 2])
    guesses = source.guess(6)
    assert_well_formed(guesses, 6)
    assert [(guess.tokens, guess.kind) for guess in guesses] == [
        ([3, 4, 5, 6, 7, 8], "radix:0"),
        ([70, 71], "radix:other"),
    ]
    source.extend([3, 4, 5])
    (guess,) = source.guess(6)
    assert (guess.tokens, guess.kind) == ([6, 7, 8, 9, 10, 11], "radix:3")
    assert guess.probs[0] > guesses[0].probs[0]
    source.extend([6, 7, 8, 9, 10, 11, 12])
    (guess,) = source.guess(6)
    assert (guess.tokens, guess.kind) == ([13, 14, 15, 16, 17, 18], "radix:9-15")
    source.extend([13, 99])
    assert source.guess(6) == []
    assert source.guess(0) == []


def test_continuations_read_a_radix_tree_of_the_same_salt_only() -> None:
    tree = RadixTree()
    tree.insert(list(range(30)), "a")
    source, stranger = Continuations(tree.cursor("a")), Continuations(tree.cursor("b"))
    for row in (source, stranger):
        row.extend([0, 1, 2, 3])
    assert [guess.tokens for guess in source.guess(5)] == [[4, 5, 6, 7, 8]]
    assert stranger.guess(5) == []
    tree.insert([0, 1, 2, 3, 4, 5, 60, 61], "a")
    source.extend([4, 5])
    assert {tuple(guess.tokens) for guess in source.guess(2)} == {(60, 61), (6, 7)}
    source.extend([60])
    assert [guess.tokens for guess in source.guess(5)] == [[61]]
    source.extend([99])
    assert source.guess(5) == []


def test_what_follows_forced_tokens_is_found_and_nothing_changes() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 51, 52, 60, 61]
    served = [*range(70, 90), *text[:12], 7, 7]
    corpus = SharedCorpus(256)
    corpus.add(served)
    sources: list[Source] = [
        Ngram(),
        Prediction([1, 2, *text[2:], 9, 9]),
        Continuations(Cursor([[*text, 1, 2, 3, 4, 5, 6, 90, 91], [*text, 1, 2, 8]])),
        Shared(corpus),
    ]
    told = {"suffix": text, "prediction": text[:5], "radix": text, "shared": served[:24]}
    ahead = {"suffix": [1, 2, 3], "prediction": [6, 7], "radix": [1, 2, 3, 4], "shared": [5, 6]}
    found = {"suffix": [4, 5], "prediction": [8, 9], "radix": [5, 6], "shared": [7, 8]}
    for source in sources:
        name = source.name
        source.extend(told[name])
        before = source.guess(4)
        (guess,) = source.behind(ahead[name], 2)
        assert_well_formed([guess], 2)
        assert list(guess.tokens) == found[name] and guess.kind.startswith(name)
        assert source.behind([99, 98, 97, 96], 2) == []
        assert source.guess(4) == before
        # As if the tokens had been told.
        source.extend(ahead[name])
        assert source.guess(2)[0].tokens[0] == guess.tokens[0]
