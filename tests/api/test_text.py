"""TextStream against a plain decode of the whole byte string and a plain search for stops.

The tokenizer here is a list of byte strings, so that characters and stop strings can be torn apart
at will; the last id is a control token.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_serve.api.text import StopStrings, TextStream


class Bytes:
    """Token i is table[i]; ids at the end of the table are control tokens."""

    def __init__(self, table: list[bytes], special: int = 0) -> None:
        self.table, self.special = table, special

    def token_bytes(self, token_id: int) -> bytes:
        return self.table[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id >= len(self.table) - self.special


ONE = Bytes([bytes([i]) for i in range(256)] + [b"<eos>"], special=1)


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first stop to be complete, the longest of those; text before it."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_characters_come_whole() -> None:
    text = "a\U0001f600\u6f22\u5b57\u00e9\U0001f469\u200d\U0001f467z" * 3
    stream = TextStream(ONE)
    parts = [stream.push([token]) for token in tokens_of(text)]
    assert "".join(parts) == text and stream.finish() == ""
    assert not any("\ufffd" in part for part in parts)


def test_a_cut_character_ends_as_a_replacement() -> None:
    stream = TextStream(ONE)
    assert stream.push(tokens_of("a\U0001f600")[:-1]) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@given(st.binary(max_size=40), st.data())
def test_runs_of_any_length_give_the_same_text(data: bytes, draw: st.DataObject) -> None:
    stream, out, left = TextStream(ONE), "", list(data)
    while left:
        size = draw.draw(st.integers(1, 5))
        out += stream.push(left[:size])
        del left[:size]
    assert out + stream.finish() == data.decode(errors="replace")


def test_control_tokens_are_hidden_unless_asked_for() -> None:
    assert TextStream(ONE).push([104, 256, 105]) == "hi"
    assert TextStream(ONE, skip_special=False).push([104, 256, 105]) == "h<eos>i"


ALPHABET = st.text("ab\u00e9", min_size=1, max_size=4)


@given(
    st.text("ab\u00e9", max_size=24), st.lists(ALPHABET, min_size=1, max_size=5), st.booleans(),
    st.data(),
)  # fmt: skip
def test_stops_against_a_plain_search(
    text: str, stops: list[str], include: bool, draw: st.DataObject
) -> None:
    wanted, stop = naive(text, stops)
    ids = tokens_of(text)
    stream = TextStream(ONE, stops, include_stop=include)
    out, left, shown = "", list(ids), []
    while left:
        size = draw.draw(st.integers(1, 4))
        shown.append(stream.push(left[:size]))
        out += shown[-1]
        # Never a piece that has to be taken back.
        assert (wanted + (stop or "" if include else "")).startswith(out)
        del left[:size]
    out += stream.finish()
    assert out == wanted + (stop if include and stop else "")
    assert stream.stopped == stop
    # The engine's side: the very token that completes the stop.
    found = TextStream(ONE, stops).feed(ids, 0)
    if stop is None:
        assert found is None
    else:
        assert found == (len(tokens_of(wanted + stop)), stop)


def test_a_decoy_delays_and_never_drops() -> None:
    stream = TextStream(ONE, ["the QQQ", "the end"])
    assert stream.push(tokens_of("see the ")) == "see "
    assert stream.push(tokens_of("Q")) == ""
    assert stream.push(tokens_of("x the en")) == "the Qx "
    assert stream.push(tokens_of("d and more")) == ""
    assert stream.finish() == "" and stream.stopped == "the end"


def test_text_held_back_comes_at_the_end() -> None:
    stream = TextStream(ONE, ["abcd"])
    assert stream.push(tokens_of("xabc")) == "x"
    assert stream.finish() == "abc"


def test_the_longest_of_stops_complete_at_once_counts() -> None:
    stream = TextStream(ONE, ["bc", "abc"])
    assert stream.push(tokens_of("xabcd")) == "x" and stream.stopped == "abc"


@pytest.mark.parametrize("least", range(6))
def test_a_stop_before_min_tokens_does_not_count(least: int) -> None:
    # "ab" is complete at tokens 2 and 4.
    stream = TextStream(ONE, ["ab"], min_tokens=least)
    shown = stream.push(tokens_of("ababx")) + stream.finish()
    assert shown == ("" if least <= 2 else "ab" if least <= 4 else "ababx")
    ends = {0: 2, 1: 2, 2: 2, 3: 4, 4: 4}
    watch = TextStream(ONE, ["ab"])
    found = watch.feed(tokens_of("ababx"), max(0, least - 1))
    assert found == ((ends[least], "ab") if least in ends else None)


def test_feed_goes_on_where_it_stood() -> None:
    watch = TextStream(ONE, ["abc"])
    assert watch.feed(tokens_of("xxa"), 0) is None
    assert watch.feed(tokens_of("b"), 0) is None
    assert watch.feed(tokens_of("cde"), 0) == (1, "abc")


def test_a_stop_may_begin_in_the_middle_of_a_token() -> None:
    table = Bytes([b"hello wor", b"ld. Bye", b"!"])
    assert TextStream(table, ["world"]).feed([0, 1, 2], 0) == (2, "world")
    stream = TextStream(table, ["world"])
    assert [stream.push([0]), stream.push([1, 2])] == ["hello ", ""]


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["x", ""])


def test_a_thousand_stops_follow_a_character_in_one_step() -> None:
    stops = StopStrings([f"{i:04d}" + "x" * 36 for i in range(1000)])
    stream = TextStream(ONE, stops)
    text = "nothing to see here 12 3"
    assert stream.push(tokens_of(text)) + stream.finish() == text
    watch = TextStream(ONE, stops)
    assert watch.feed(tokens_of("a0999" + "x" * 40), 0) == (41, "0999" + "x" * 36)
