"""A real server process with a tiny model and itself as draft, asked over every transport.

Speculation off, on the same server, is the reference for everything; the engine in this process is
the reference for that. Cases of the public bug reports that need a whole server stand here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spec_serve.api import messages as m
from spec_serve.api.text import TextStream
from spec_serve.client import Client
from tests.api.tokens import TinyTokens
from tests.engines import engine, tokens
from tests.servers import CONTEXT, TRANSPORTS, Got, Server, ask, ask_socket, refusal, start
from tests.tiny import write_tiny_model_dir

TOKENS = TinyTokens()
PROMPT = "the other the other"
# Weights are random: where words shall come out, only letters may.
LETTERS = {"logit_bias": {str(i): 100.0 for i in TOKENS.encode("etaoinshr d")}}
# Raises letters above everything else, so that the random model's text can be cut into pieces.
LETTERS = {"logit_bias": {str(i): 100.0 for i in sorted({*TOKENS.encode("abcdefghijklm")})}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model_dir(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with start(model, log) as running:
        yield running
        running.wait_idle()
        said = log.read_text()
        assert running.process.poll() is None
    assert "Traceback" not in said and "rror" not in said, said


@pytest.mark.parametrize("mode", ["off", "auto", "max"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_same_tokens_everywhere(server: Server, transport: str, mode: str) -> None:
    got = ask(server, transport, prompt=PROMPT, max_tokens=32, ignore_eos=True, mode=mode)
    wanted = tokens(engine("none"), TOKENS.encode(PROMPT), 32)
    assert got.ids == wanted and got.text == TOKENS.decode(wanted)
    assert (got.reason, got.counted) == ("length", 32)
    if mode == "off":
        assert got.drafted == 0
    if mode == "max":
        # The draft is the target: what is proposed first is always right.
        assert got.accepted >= 16


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_seed_gives_the_same_text_with_and_without_speculation(
    server: Server, transport: str
) -> None:
    sampling = {"temperature": 0.9, "seed": 4711, "top_p": 0.95}
    asked = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "sampling": sampling}
    off, on = (ask(server, transport, mode=mode, **asked) for mode in ("off", "max"))
    assert on.told == off.told
    sampling["seed"] = 4712
    assert ask(server, transport, mode="off", **asked).ids != off.ids


@pytest.fixture(scope="module")
def plain(server: Server) -> Got:
    """OFF's long run: 24 greedy tokens."""
    asked = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "mode": "off"}
    return ask(server, m.MSGPACK, sampling=LETTERS, **asked)


def piece_ending_at(got: Got, place: int, least: int = 3) -> str:
    """A text that first becomes complete with token `place` (from 1) and spans several tokens."""
    whole, before = (TextStream(TOKENS) for _ in range(2))
    full, short = whole.push(got.ids[:place]), before.push(got.ids[: place - 1])
    assert len(full) > len(short)
    piece = full[max(0, len(short) - least) :]
    assert piece not in short and "\ufffd" not in piece, (piece, short)
    return piece


def place_of_stop(got: Got) -> int:
    """The first token at or after the 10th that ends such a piece."""
    for place in range(10, 24):
        try:
            piece_ending_at(got, place)
        except AssertionError:
            continue
        return place
    raise AssertionError(got.text)


@pytest.mark.parametrize("kind", ["string", "id"])
def test_a_stop_counts_before_the_limit(server: Server, plain: Got, kind: str) -> None:
    """Case 7, on one socket: the triple is the same with speculation, for every limit."""
    if kind == "string":
        place = place_of_stop(plain)
        piece = piece_ending_at(plain, place)
        stop: dict[str, Any] = {"stop": [piece]}
        text = TextStream(TOKENS).push(plain.ids[:place]).removesuffix(piece)
        matched: int | str = piece
    else:
        place = next(i for i in range(10, 24) if plain.ids[i - 1] not in plain.ids[: i - 1])
        matched = plain.ids[place - 1]
        stop = {"stop_token_ids": [matched]}
        text = TOKENS.decode(plain.ids[:place])

    async def go() -> None:
        async with Client(server.ws) as client:
            for limit in range(place - 2, place + 4):
                asked = {"prompt": PROMPT, "max_tokens": limit, "ignore_eos": True, **stop}
                asked["sampling"] = LETTERS
                asked["sampling"] = LETTERS
                off, on = [
                    await ask_socket(client, speculation={"mode": mode}, **asked)
                    for mode in ("off", "max")
                ]
                assert on.told == off.told
                assert on.ids == plain.ids[: min(limit, place)] and on.counted == len(on.ids)
                if limit < place:
                    assert (on.reason, on.matched) == ("length", None)
                    assert on.text == TOKENS.decode(on.ids)
                else:
                    assert (on.reason, on.matched, on.text) == ("stop", matched, text)

    asyncio.run(go())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stop_text_never_leaks(server: Server, plain: Got, transport: str) -> None:
    """Case 11: no letter of it is shown, a decoy delays and drops nothing."""
    piece = piece_ending_at(plain, place_of_stop(plain))
    before = plain.text.partition(piece)[0]
    decoys = [piece[:2] + "QQQ", plain.text[:2] + "QQQ"]
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}
    asked["sampling"] = LETTERS
    for mode in ("off", "max"):
        got = ask(server, transport, mode=mode, stop=[*decoys, piece], **asked)
        assert (got.text, got.reason, got.matched) == (before, "stop", piece)
        assert "".join(got.chunks) == before
        assert ask(server, transport, mode=mode, stop=decoys, **asked).text == plain.text


@pytest.mark.parametrize("limit", range(1, 12))
def test_chunks_are_whole_characters(server: Server, limit: int) -> None:
    """Cases 9 and 20: whatever the limit cuts, text is the decoded ids, and ids are counted."""
    bias = {str(i): 100.0 for i in (*TOKENS.encode("\u6f22\U0001f600\u00e9"), 65)}
    asked = {"prompt": "x", "max_tokens": limit, "ignore_eos": True, "mode": "max"}
    sampling = {"temperature": 1.0, "seed": 5, "logit_bias": bias}
    got = ask(server, m.JSON, sampling=sampling, **asked)
    assert got.counted == len(got.ids) == limit and got.reason == "length"
    assert got.text == TOKENS.decode(got.ids)
    assert set(got.ids) <= {int(token) for token in bias}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prompt_is_as_long_as_the_context_allows(server: Server, transport: str) -> None:
    """Case 27: the context is filled to the last place, and one token less is left to nobody."""
    longest = "a b" * (CONTEXT // 3)
    ids = TOKENS.encode(longest)[: CONTEXT - 6]
    text = TOKENS.decode(ids)
    assert TOKENS.encode(text) == ids
    got = ask(server, transport, prompt=text, ignore_eos=True, mode="max")
    assert (got.counted, got.reason) == (6, "length")
    assert got.told == ask(server, transport, prompt=text, ignore_eos=True, mode="off").told
    code, field, said = refusal(server, transport, prompt="a b" * CONTEXT)
    assert (code, field) == ("context_length_exceeded", "prompt")
    assert str(CONTEXT) in said and str(len(TOKENS.encode("a b" * CONTEXT))) in said
