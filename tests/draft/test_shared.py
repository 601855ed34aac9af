"""Texts served before: found by their last tokens, within one salt, in bounded memory."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from spec_serve.draft.shared import Corpora, Shared, SharedCorpus


def numbers(seed: int, count: int, top: int = 5000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(top) for _ in range(count)]


def test_a_text_served_before_is_found_behind_another_beginning() -> None:
    corpus = SharedCorpus(capacity=1000)
    text = numbers(1, 200)
    corpus.add(text)
    source = Shared(corpus)
    source.extend([1, 2, 3])
    assert source.guess(8) == []
    source.extend(text[50:54])
    (guess,) = source.guess(8)
    assert (guess.tokens, guess.kind) == (text[54:62], "shared:4-5")
    source.extend(text[54:60])
    (guess,) = source.guess(8)
    assert (guess.tokens, guess.kind) == (text[60:68], "shared:9-15")
    source.extend([9])
    assert source.guess(8) == []


def test_a_guess_ends_with_its_text() -> None:
    corpus = SharedCorpus(capacity=1000)
    first, second = numbers(1, 30), numbers(2, 30)
    corpus.add(first)
    corpus.add(second)
    source = Shared(corpus)
    source.extend(first[20:27])
    assert source.guess(10)[0].tokens == first[27:]
    source.extend(first[27:])
    assert source.guess(10) == []


def test_the_longer_match_wins_over_the_later_one() -> None:
    corpus = SharedCorpus(capacity=1000)
    shared = numbers(4, 4)
    corpus.add([*numbers(5, 20), *shared, 6001, 6002])
    corpus.add([*numbers(6, 20), *shared, 7001, 7002])
    source = Shared(corpus)
    source.extend([*numbers(5, 20), *shared])
    assert source.guess(2)[0].tokens == [6001, 6002]
    other = Shared(corpus)
    other.extend(shared)
    assert other.guess(2)[0].tokens == [7001, 7002]


def test_salts_share_nothing() -> None:
    corpora = Corpora(capacity=500)
    text = numbers(1, 100)
    corpora.of("a").add(text)
    for salt, found in (("a", True), ("b", False), ("", False)):
        source = Shared(corpora.of(salt))
        source.extend(text[:20])
        assert bool(source.guess(4)) is found


def test_the_least_recently_used_salt_is_forgotten() -> None:
    corpora = Corpora(capacity=100, salts=2)
    first = corpora.of("a")
    corpora.of("b")
    assert corpora.of("a") is first
    corpora.of("c")
    assert len(corpora) == 2
    assert corpora.of("a") is first
    corpora.of("b").add([1, 2, 3])
    assert len(corpora) == 2


def test_memory_is_bounded_and_the_oldest_text_goes_first() -> None:
    corpus = SharedCorpus(capacity=300)
    size = corpus.nbytes
    texts = [numbers(seed, 90) for seed in range(20)]
    for text in texts:
        corpus.add(text)
    assert corpus.nbytes == size
    assert corpus.size == 300
    found = []
    for text in texts:
        # A single place may be hidden by a collision in both tables; most are found.
        hits = sum(corpus.find(text[end - 20 : end])[1] == 20 for end in range(30, 60))
        assert hits == 0 or hits > 20
        found.append(hits > 0)
    assert found == [False] * 17 + [True] * 3


def test_a_text_longer_than_the_corpus_leaves_its_end() -> None:
    corpus = SharedCorpus(capacity=64)
    text = numbers(1, 1000)
    corpus.add(text)
    source = Shared(corpus)
    source.extend(text[950:960])
    assert source.guess(5)[0].tokens == text[960:965]


def test_a_row_keeps_the_piece_it_follows_when_the_corpus_moves_on() -> None:
    corpus = SharedCorpus(capacity=100)
    text = numbers(1, 60)
    corpus.add(text)
    source, late = Shared(corpus), Shared(corpus)
    source.extend(text[:20])
    corpus.add(numbers(2, 99))
    assert source.guess(4)[0].tokens == text[20:24]
    late.extend(text[:20])
    assert late.guess(4) == []


def test_a_long_text_is_followed_piece_by_piece() -> None:
    corpus = SharedCorpus(capacity=4000)
    text = numbers(1, 3 * Shared.PIECE)
    corpus.add(text)
    source = Shared(corpus)
    source.extend(text[:10])
    for at in range(10, len(text) - 8, 7):
        assert source.guess(7)[0].tokens[0] == text[at]
        source.extend(text[at : at + 7])


def test_a_changed_token_does_not_end_a_long_copy_but_a_short_one() -> None:
    corpus = SharedCorpus(capacity=1000)
    text = numbers(1, 200)
    corpus.add(text)
    long, short = Shared(corpus), Shared(corpus)
    long.extend(text[:40])
    short.extend(text[34:40])
    for source in (long, short):
        assert source.guess(2)[0].tokens == text[40:42]
        source.extend([9999])
    assert (text[41], "shared:replace") in {(g.tokens[0], g.kind) for g in long.guess(4)}
    assert short.guess(4) == []
    long.extend([text[41]])
    assert long.guess(4)[0].tokens == text[42:46]


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=8),
    st.lists(st.integers(0, 3), max_size=30),
    st.integers(1, 9),
)
def test_every_guess_was_served_and_every_match_is_real(
    texts: list[list[int]], told: list[int], limit: int
) -> None:
    corpus = SharedCorpus(capacity=40)
    for text in texts:
        corpus.add(text)
    source, tail = Shared(corpus), list[int]()
    for token in told:
        tail = [*tail, token]
        source.extend([token])
        for guess in source.guess(limit):
            assert 1 <= len(guess.tokens) <= limit
            assert len(guess.probs) == len(guess.tokens)
            assert all(0.0 < p < 1.0 for p in guess.probs)
            if guess.kind == "shared:edited":
                continue
            tokens = list(guess.tokens)
            assert any(
                text[i : i + len(tokens)] == tokens
                for text in texts
                for i in range(len(text) - len(tokens) + 1)
            )
        place, agreed = corpus.find(tail)
        if agreed:
            before = tail[len(tail) - agreed :]
            assert corpus.read(place - agreed, agreed) == before
