"""Generations that share a request: told apart again, and token for token the interpreter's."""

from __future__ import annotations

import re
from typing import Any

import pytest

import spec_serve.lang as ss
from spec_serve.client import Client, ServerError
from spec_serve.lang.backend import ClientBackend
from spec_serve.lang.chains import fused
from spec_serve.lang.explain import named
from tests.lang.test_compile import Counting, told
from tests.lang.test_program import on_tiny
from tests.lang.tiny_server import tokenizer


class Fusing(Counting):
    """Runs graphs on the client's side, and takes segments."""

    fuses = True

    def __init__(self, client: Client) -> None:
        super().__init__(ClientBackend(client))
        self.asked: list[int] = []

    def generate(self, token_ids: list[int], options: dict[str, Any]) -> Any:
        self.asked.append(1 + len(options.get("segments", ())))
        return super().generate(token_ids, options)


@ss.program
async def form(s: ss.State, name: str, key: str) -> Any:
    page = s.call(str.upper, key)
    s += ss.user("About ", name)
    s += ss.assistant(
        "Name: ", ss.gen("name", max_tokens=7, stop="e"),
        "\nAge: ", ss.gen("age", type=int, max_tokens=3),
        "\nKind:", ss.gen("kind", choices=[" new", " old and bad"]), ".",
    )  # fmt: skip
    s += ss.user("More of ", name, "?")
    s += ss.assistant("It is", ss.gen("more", max_tokens=6, temperature=1.2, seed=4))
    s += ss.user("So it is ", s["more"], page)
    s += ss.assistant(ss.gen("last", max_tokens=4), " and ", ss.gen("end", max_tokens=2))
    return [s[one] for one in ("name", "age", "kind", "more", "last", "end")]


def test_one_request_for_what_is_known_ahead() -> None:
    async def go(client: Client) -> None:
        graph = await form.acompile(on=client)
        chains = [[named(key) for key in chain] for chain in fused(graph.held.ops)]
        assert chains == [["name", "age", "kind", "more"], ["last", "end"]]
        assert "in one request: name, age, kind, more" in graph.explain()
        for name in ("him", "\n the <|im_end|>", ""):
            here = Fusing(client)
            made = await graph.arun(name, "k", on=here)
            interpreted = await form.arun(name, "k", on=client)
            assert await told(made) == await told(interpreted)
            assert await told(await graph.arun(name, "k", on=client)) == await told(interpreted)
            for one in ("name", "age", "kind", "more", "last", "end"):
                ours, theirs = made.state.meta(one), interpreted.state.meta(one)
                assert (ours.ids, ours.reason, ours.matched, ours.constraint) == (
                    theirs.ids, theirs.reason, theirs.matched, theirs.constraint,
                )  # fmt: skip
                assert ours.completion_tokens == theirs.completion_tokens
            assert sum(here.asked) >= 6 > len(here.asked)

    on_tiny(go)


def test_streams_are_told_by_variable() -> None:
    async def go(client: Client) -> None:
        graph = await form.acompile(on=client)
        for on in (client, Fusing(client)):
            texts: dict[str, str] = {}
            ends: list[str] = []
            async for event in graph.stream("x", "k", on=on):
                if isinstance(event, ss.Delta):
                    texts[event.var] = texts.get(event.var, "") + event.text
                elif isinstance(event, ss.Done):
                    ends.append(event.var)
            assert ends == ["name", "age", "kind", "more", "last", "end"]
            result = await graph.arun("x", "k", on=on)
            assert texts["more"] == result["more"] and texts["age"] == str(result["age"])

    on_tiny(go)


@ss.program
async def rounds(s: ss.State, many: int) -> Any:
    def once(s: ss.State) -> ss.Value:
        s += ss.assistant("A", ss.gen("a", max_tokens=3), "B", ss.gen("b", max_tokens=2))
        s += ss.user(s["a"], " and ", s["b"])
        return s["b"]

    s += ss.user("Begin ", many)
    s.loop(3, once, until="never")
    s += ss.assistant(ss.gen("c", max_tokens=2), ".", ss.gen("d", max_tokens=2, n=2))
    return [s["a"], s["b"], s["c"], s["d"]]


def test_rounds_of_a_loop_and_what_cant_be_fused() -> None:
    async def go(client: Client) -> None:
        graph = await rounds.acompile(on=client)
        here = Fusing(client)
        made = await graph.arun(1, on=here)
        assert here.asked == [2, 2, 2, 1, 1]
        assert await told(made) == await told(await rounds.arun(1, on=client))

    on_tiny(go)


def test_a_stop_within_a_token_and_what_is_refused_come_in_their_turn() -> None:
    def stopping(stop: str, more: int) -> ss.Program:
        @ss.program
        async def two(s: ss.State) -> Any:
            s += "the man in the"
            s += ss.gen("a", max_tokens=20, stop=stop)
            s += " and so on" * more
            s += ss.gen("b", max_tokens=3)
            return [s["a"], s["b"]]

        return two

    async def go(client: Client) -> None:
        (found,) = (await client.complete("the man in the", max_tokens=20, ids=True)).choices
        token = next(i for i in found.ids if len(tokenizer().token_bytes(i)) > 1)
        text = tokenizer().token_bytes(token).decode()
        for stop, asked in ((text, [2]), (text[1:], [2, 1])):
            two = stopping(stop, 1)
            graph, here = await two.acompile(on=client), Fusing(client)
            expected = await told(await two.arun(on=client))
            assert await told(await graph.arun(on=here)) == expected
            assert here.asked == asked
            assert await told(await graph.arun(on=client)) == expected
        two = stopping("q", 3000)
        graph, here = await two.acompile(on=client), Fusing(client)
        with pytest.raises(ServerError, match="tokens") as interpreted:
            await two.arun(on=client)
        with pytest.raises(ServerError, match=re.escape(str(interpreted.value))):
            await graph.arun(on=here)
        assert here.asked == [2, 1, 1]

    on_tiny(go)
