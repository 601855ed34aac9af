"""The automaton against a search by brute force: lengths, occurrences, counts, continuations."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from spec_serve.draft.suffix import ROOT, SuffixAutomaton

TEXTS = st.integers(1, 5).flatmap(
    lambda letters: st.lists(st.integers(0, letters - 1), max_size=60)
)


def longest_repeated_suffix(text: list[int]) -> int:
    """Length of the longest suffix that also ends somewhere before the end."""
    best = 0
    for end in range(1, len(text)):
        length = 0
        while length < end and text[end - 1 - length] == text[-1 - length]:
            length += 1
        best = max(best, length)
    return best


def ends(text: list[int], piece: list[int]) -> list[int]:
    """Where `piece` ends in text, the end of the text excluded."""
    size = len(piece)
    return [end for end in range(size, len(text)) if text[end - size : end] == piece]


@given(TEXTS)
def test_longest_suffix_and_its_latest_occurrence_equal_brute_force(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for size, token in enumerate(text, start=1):
        automaton.extend([token])
        seen = text[:size]
        match = automaton.longest()
        length = automaton.length(match)
        assert length == longest_repeated_suffix(seen)
        if match != ROOT:
            assert automaton.occurrence(match) == ends(seen, seen[size - length :])[-1]


@given(TEXTS)
def test_every_shorter_match_is_a_real_earlier_occurrence(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match, above = automaton.longest(), len(text)
    while match != ROOT:
        length = automaton.length(match)
        assert length < above
        assert automaton.occurrence(match) in ends(text, text[len(text) - length :])
        match, above = automaton.shorter(match), length


@given(TEXTS)
def test_continuations_of_the_longest_match_are_complete_and_counted(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match = automaton.longest()
    if match == ROOT:
        return
    length = automaton.length(match)
    expected = Counter(text[end] for end in ends(text, text[len(text) - length :]))
    found = {token: times for times, _, token, _ in automaton.continuations(match)}
    # What ends at the very end of the text is booked a token later, so one may be missing there.
    late = text[-1]
    assert found.keys() == expected.keys()
    for token, times in expected.items():
        assert found[token] == times or (token == late and found[token] == times - 1)
    for _, end, token, _ in automaton.continuations(match):
        assert text[end - 1] == token
        assert text[end - 1 - length : end - 1] == text[len(text) - length :]


@given(TEXTS, st.integers(1, 8))
def test_indexing_in_pieces_makes_no_difference(text: list[int], piece: int) -> None:
    whole, pieces = SuffixAutomaton(), SuffixAutomaton()
    whole.extend(text)
    for start in range(0, len(text), piece):
        pieces.extend(text[start : start + piece])
    assert pieces.text == whole.text == text
    assert pieces.longest() == whole.longest()
    assert pieces.continuations(ROOT) == whole.continuations(ROOT)


@given(TEXTS, st.integers(0, 20))
def test_followed_path_is_text_that_follows_the_match(text: list[int], limit: int) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match = automaton.longest()
    path = automaton.follow(match, limit)
    assert len(path) <= limit
    piece = text[len(text) - automaton.length(match) :] + path
    assert any(text[i : i + len(piece)] == piece for i in range(len(text) - len(piece) + 1))


def test_the_majority_wins_at_a_fork_and_the_latest_among_equals() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1, 5, 9, 1, 6, 9, 1, 5, 8, 1])
    match = automaton.longest()
    assert automaton.length(match) == 2 - 1
    assert [(times, token) for times, _, token, _ in automaton.continuations(match)] == [
        (2, 5),
        (1, 6),
    ]
    assert automaton.follow(match, 2) == [5, 8]


def test_of_many_continuations_the_first_and_the_last_seen_are_looked_at() -> None:
    automaton = SuffixAutomaton()
    for token in range(10, 10 + 3 * automaton.FORKS):
        automaton.extend([1, token])
    automaton.extend([1])
    tokens = {token for _, _, token, _ in automaton.continuations(automaton.longest())}
    assert len(tokens) == automaton.FORKS
    assert {10, 9 + 3 * automaton.FORKS} <= tokens


def test_states_and_links_stay_linear_in_repetitive_text() -> None:
    for period in ([1], [1, 2], [1, 1, 2], [1, 2, 1, 2, 3]):
        automaton = SuffixAutomaton()
        automaton.extend(period * 500)
        assert len(automaton._length) <= 2 * len(automaton.text)
        assert sum(map(len, automaton._branches)) <= 3 * len(automaton.text)
        assert automaton.length(automaton.longest()) == len(automaton.text) - len(period)
