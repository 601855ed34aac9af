"""`cond`, `loop` and healed text: a run's own way, the same interpreted, compiled and by hand."""

from __future__ import annotations

from typing import Any

import pytest

import spec_serve.lang as ss
from spec_serve.client import Client
from spec_serve.lang.backend import ClientBackend
from tests.lang.test_compile import Counting, told
from tests.lang.test_program import on_tiny
from tests.lang.tiny_server import tokenizer


async def shout(text: str) -> str:
    return text.upper() + "!"


def write(s: ss.State) -> None:
    s += ss.user("Write.")
    s += ss.assistant("It: ", ss.gen("draft", max_tokens=3))


def better(s: ss.State) -> ss.Value:
    s += ss.user("Better than ", s["draft"], " and ", s.call(shout, s["draft"]), "?")
    s += ss.assistant(ss.gen("draft", max_tokens=4, temperature=1.0, seed=3))
    s += ss.assistant("Go ", ss.select("on", ["on", "in"]))
    s.cond(s["on"], {"in": write, "on": None}, other=write)
    return s["on"]


@ss.program
async def refining(s: ss.State, kind: str, most: ss.Const[int]) -> Any:
    s += ss.user("the")
    s += ss.assistant(ss.gen("draft", max_tokens=2))
    first = s["draft"]
    s.loop(most, better, until=["never"])
    s.cond(s.call(shout, kind), {"THE!": write, "IN!": lambda s: write(s)})
    s += ss.user("Take ", s["draft"], " over ", first)
    s += ss.assistant(ss.gen("end", max_tokens=2))
    return {"draft": s["draft"], "first": first, "on": s["on"], "end": s["end"]}


@ss.program
async def unrolled(s: ss.State, kind: str, most: int) -> Any:
    """The same in Python's own words."""
    s += ss.user("the")
    s += ss.assistant(ss.gen("draft", max_tokens=2))
    first = s["draft"]
    for _ in range(most):
        on = better_by_hand(s)
        if await on == "in":
            write(s)
    if await s.call(shout, kind) in ("THE!", "IN!"):
        write(s)
    s += ss.user("Take ", s["draft"], " over ", first)
    s += ss.assistant(ss.gen("end", max_tokens=2))
    return {"draft": s["draft"], "first": first, "on": s["on"], "end": s["end"]}


def better_by_hand(s: ss.State) -> ss.Value:
    s += ss.user("Better than ", s["draft"], " and ", s.call(shout, s["draft"]), "?")
    s += ss.assistant(ss.gen("draft", max_tokens=4, temperature=1.0, seed=3))
    s += ss.assistant("Go ", ss.select("on", ["on", "in"]))
    return s["on"]


def test_bodies_are_what_python_would_do(tmp_path: Any) -> None:
    async def go(client: Client) -> None:
        most = 2
        bound = refining.bind(most=most)
        graph = await bound.acompile(on=client)
        graph.save(tmp_path / "g")
        loaded = ss.Graph.load(tmp_path / "g", functions={"shout": shout})
        here = Counting(ClientBackend(client))  # the server runs no programs for it
        for kind, on in (("the", client), ("other", here)):
            by_hand = await told(await unrolled.arun(kind, most, on=client))
            assert await told(await bound.arun(kind, on=client)) == by_hand
            assert await told(await graph.arun(kind, on=on)) == by_hand
            assert await told(await loaded.arun(kind, on=client)) == by_hand
        text = graph.explain()
        assert "loop at most 2 until on in ['never']" in text and "'in': state 0: user" in text
        assert "<title>" in graph.svg() and "cond call:" in text

    on_tiny(go)


def test_a_loop_ends_and_a_name_of_a_case_not_taken_keeps_what_it_was() -> None:
    def step(s: ss.State) -> ss.Value:
        s += ss.assistant("x ", ss.select("act", ["stop"]), " ", ss.gen("n", max_tokens=1))
        s.cond(s["act"], {"go": write})
        return s["act"]

    def late(s: ss.State) -> None:
        s += ss.assistant(ss.gen("late", max_tokens=1))

    @ss.program
    async def ending(s: ss.State) -> Any:
        s += ss.user("the")
        s.loop(5, step, until="stop")
        s.cond(s["act"], {"go": late})
        s += ss.user("[", s["late"], "]")
        s += ss.assistant(ss.gen("b", max_tokens=1))
        return [s["act"], s["late"], s["draft"]]

    async def go(client: Client) -> None:
        result = await ending.arun(on=client)
        assert result.value == ["stop", None, None]
        said = [turn["content"] for turn in await result.state.messages()]
        assert len(said) == 4 and said[2] == "[]"
        graph = await ending.acompile(on=client)
        assert await told(await graph.arun(on=client)) == await told(result)
        events = [event async for event in graph.stream(on=client)]
        done = [event.var for event in events if isinstance(event, ss.Done)]
        assert done == ["act", "n", "b"]

    on_tiny(go)


def test_what_a_body_may_not_do() -> None:
    async def go(client: Client) -> None:
        async def coroutine(s: ss.State) -> None: ...

        bodies: list[tuple[Any, str]] = [
            (lambda s: s.loop(2, lambda s: s.fork(2)), "can't fork"),
            (lambda s: s.loop(2, lambda s: None, until="x"), "both or neither"),
            (lambda s: s.loop(0, write), "most must be"),
            (lambda s: s.cond(s["a"], {"x": coroutine}), "plain function"),
            (lambda s: s.cond("text", {}), "by a value"),
            (lambda s: s.loop(2, lambda s: bool(s["a"])), "a condition depends"),
        ]
        for body, message in bodies:

            @ss.program
            async def wrong(s: ss.State) -> None:
                s += ss.user("the")
                s += ss.assistant(ss.gen("a", max_tokens=1))
                body(s)  # noqa: B023 (run before the next one is made)

            with pytest.raises((ss.ProgramError, TypeError, ValueError), match=message):
                await wrong.arun(on=client)
            with pytest.raises((ss.ProgramError, TypeError, ValueError), match=message):
                await wrong.acompile(on=client)

    on_tiny(go)


def test_healed_text_goes_on_within_a_token() -> None:
    @ss.program
    async def healing(s: ss.State, heal: ss.Const[bool]) -> Any:
        s += ss.user("the")
        s += ss.assistant("So it is: ", ss.gen("a", max_tokens=4, heal=heal), "; th", ss.gen(
            "b", choices=["e", "ing"], max_tokens=9, heal=heal
        ))  # fmt: skip
        s += ss.user("ok")
        yes = ss.gen("c", schema={"type": "boolean"}, max_tokens=9, heal=heal)
        s += ss.assistant('{"a": ', yes)
        return [s["a"], s["b"], s["c"]]

    async def go(client: Client) -> None:
        table = tokenizer()
        bound = healing.bind(heal=True)
        result = await bound.arun(on=client)
        a, b, c = result.value
        assert b in ("e", "ing") and c in (True, False)
        said = [turn["content"] for turn in await result.state.messages()]
        assert said[1] == f"So it is: {a}; th{b}"
        assert said[3] == f'{{"a": {str(c).lower()}'
        ids = await result.state.ids()
        assert f"So it is: {a}; th{b}" in table.decode(ids)
        # By hand: what is left of the prompt, and the text it must begin with.
        head = table.render_chat([{"role": "user", "content": "the"}])
        prompt = head + table.encode("So it is:")
        assert ids[: len(prompt)] == prompt
        by_hand = await client.complete(
            token_ids=prompt, max_tokens=5,
            constraint={"kind": "regex", "source": r" (?s:.)*"},
        )  # fmt: skip
        assert by_hand.text == " " + a
        graph = await bound.acompile(on=client)
        assert await told(await graph.arun(on=client)) == await told(result)
        plain = await healing.bind(heal=False).arun(on=client)
        assert (await plain.state.ids())[: len(prompt) + 1] != ids[: len(prompt) + 1]

    on_tiny(go)
    with pytest.raises(ValueError, match="heal can't stand beside a grammar"):
        ss.gen(grammar='start: "a"', heal=True)
