"""Programs on a server that only speaks OpenAI's HTTP: ours, asked that way."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest

import spec_serve.lang as ss
from spec_serve.client import Client, ServerError
from tests.lang.tiny_server import running


@ss.program
async def talk(s: ss.State, name: str) -> Any:
    s += ss.system("You are the one.")
    s += ss.user("Hi ", name)
    s += ss.assistant(ss.gen("a", max_tokens=6))
    with s.fork(2) as branches:
        for branch in branches:
            branch += ss.user("And ", s["a"])
            branch += ss.assistant(ss.gen("b", schema={"type": "boolean"}, max_tokens=9))
    await branches.join()
    return [s["a"], branches[0]["b"], branches[1]["b"]]


@ss.program
async def bounded(s: ss.State, after: ss.Const[str]) -> Any:
    s += ss.user("the")
    s += ss.assistant(ss.gen("a", max_tokens=2, max_chars=90, banned=["zzz"], after=after))
    return s["a"]


@ss.program
async def lesser(s: ss.State, choices: ss.Const[list[str]]) -> Any:
    s += ss.user("the")
    s += ss.assistant("In ", ss.select("c", ["one", "the other"]), ss.gen("d", max_tokens=1))
    s += ss.user("on")
    s += ss.assistant(ss.gen("e", choices=choices, max_tokens=3, top_k=3))
    return [s["c"], s["e"]]


def test_the_same_program_on_a_server_without_ids() -> None:
    async def go() -> None:
        async with running() as server, Client(server.addresses()[0]) as client:
            url = server.addresses()[-1].replace("/health", "/v1")
            foreign = ss.OpenAIBackend(url, "tiny")
            ours, theirs = await talk.arun("you", on=client), await talk.arun("you", on=foreign)
            assert theirs.value == ours.value
            assert await theirs.state.messages() == await ours.state.messages()
            told = [made.state.meta("a").completion_tokens for made in (ours, theirs)]
            assert told[0] == told[1]
            graph = await talk.acompile(on=foreign)
            assert (await graph.arun("you", on=foreign)).value == ours.value
            events = [event async for event in graph.stream("you", on=foreign)]
            text = "".join(e.text for e in events if isinstance(e, ss.Delta) and e.var == "a")
            assert text == ours["a"]
            with pytest.raises(ExceptionGroup) as group:
                await talk.arun("you", on=ss.OpenAIBackend(url, "another"))
            failed = group.value.exceptions[0]
            assert isinstance(failed, ServerError) and failed.code == "model_not_found"
            with pytest.warns(ss.OpenAIWarning, match="left out: max_chars, banned"):
                await bounded.bind(after="").arun(on=foreign)
            with pytest.raises(ss.ProgramError, match="after"):
                await bounded.bind(after="x").arun(on=foreign)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                with pytest.raises(ss.ProgramError, match="none of the choices"):
                    await lesser.bind(choices=["x", "y"]).arun(on=foreign)
            said = " ".join(str(one.message) for one in warned)
            for part in ("select asks", "left out: top_k", "checked when", "may begin anew"):
                assert said.count(part) == 1, said
            assert {one.category for one in warned} == {ss.OpenAIWarning}

    asyncio.run(asyncio.wait_for(go(), 60))
    with pytest.raises(ValueError, match="url: "):
        ss.OpenAIBackend("ws://host", "m")
