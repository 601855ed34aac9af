"""Compiled programs: token for token what the interpreter makes of them, with less to ask."""

from __future__ import annotations

import asyncio
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spec_serve.lang as ss
from spec_serve.client import Client
from spec_serve.lang.backend import Backend, ClientBackend
from spec_serve.lang.conversation import Question
from tests.api.serving import served
from tests.lang.test_program import on_tiny
from tests.lang.tiny_server import tokenizer


class Counting:
    """A backend that counts what is asked of another one."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.questions: list[Question] = []
        self.prompts: list[list[int]] = []

    async def pieces(self, question: Question) -> list[list[int]]:
        self.questions.append(question)
        return await self.inner.pieces(question)

    def generate(self, token_ids: list[int], options: dict[str, Any]) -> AsyncGenerator[Any, None]:
        self.prompts.append(token_ids)
        return self.inner.generate(token_ids, options)

    async def score(
        self, token_ids: list[int], continuations: list[list[int]]
    ) -> list[list[float]]:
        return await self.inner.score(token_ids, continuations)


async def fetch(key: str, name: str = "") -> str:
    await asyncio.sleep(0.01)
    return f"<{key}{name}>"


@ss.program
async def wide(s: ss.State, name: str, key: ss.Const[str], count: int = 2) -> Any:
    s += ss.system("You are the one. " * 3)
    page = s.call(fetch, key, name)
    s += ss.user("Hi ", name, ": ", count)
    s += ss.assistant("So: ", ss.gen("a", max_tokens=6, stop="q"), "; ", ss.gen("b", max_tokens=3))
    with s.fork(2, names=["x", "y"]) as branches:
        for number, branch in enumerate(branches):
            branch += ss.user("more ", str(number))
            branch += ss.assistant(ss.gen("d", max_tokens=4, temperature=1.0, seed=number))
    await branches.join()
    s += ss.user("Use ", page, branches["y"]["d"])
    s += ss.assistant("I take ", ss.select("c", ["one", "the other", "in"]))
    s += ss.user("Why")
    s += ss.assistant(ss.gen("out", max_tokens=5))
    return {"out": await s["out"], "both": (s["c"], branches["x"]["d"]), "three": 3}


async def told(result: ss.Result) -> Any:
    """Everything about a result."""
    return result.value, await result.state.ids(), await result.state.messages()


def test_compiled_is_what_interpreted_is_and_a_loaded_one_too(tmp_path: Path) -> None:
    bound = wide.bind(key="k")

    async def go(client: Client) -> None:
        graph = await bound.acompile(on=client)
        graph.save(tmp_path / "wide.graph")
        loaded = ss.Graph.load(tmp_path / "wide.graph", functions={"fetch": fetch})
        for name in ("you", "the <|im_end|> other", ""):
            interpreted = await told(await bound.arun(name, count=7, on=client))
            assert await told(await graph.arun(name, count=7, on=client)) == interpreted
            here = Counting(ClientBackend(client))  # the server runs no programs for it
            assert await told(await graph.arun(name, count=7, on=here)) == interpreted
            assert await told(await loaded.arun(name, 7, on=client)) == interpreted
        short = await bound.arun("x", on=client)
        assert (await graph.arun("x", on=client))["out"] == short["out"]

    on_tiny(go)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.lists(st.text(max_size=12), min_size=1, max_size=3))
def test_pieces_are_the_encoding_of_the_whole(texts: list[str]) -> None:
    table = tokenizer()
    turns: list[dict[str, Any]] = [{"role": "user", "content": text} for text in texts]
    (whole,) = table.render_around(turns, "", "\uf8f0")
    assert "\uf8f0" in "".join(texts) or whole == table.render_chat(turns)


def test_arguments_of_every_kind_make_the_same_prompt() -> None:
    @ss.program
    async def small(s: ss.State, text: str) -> None:
        s += ss.user("the ", text, "in")
        s += ss.assistant(ss.gen("a", max_tokens=1))

    texts = ["", " ", "\n", "\n\n ", "é", "😀" * 3, "<|im_start|>", "<|im", "a" * 200, "\x00", "ǅ"]

    async def go(client: Client) -> None:
        graph = await small.acompile(on=client)
        for text in texts:
            result = await graph.arun(text, on=client)
            expected = tokenizer().render_chat([{"role": "user", "content": f"the {text}in"}])
            assert (await result.state.ids())[: len(expected)] == expected

    on_tiny(go)


def test_constants_are_not_asked_for_and_arguments_only_once() -> None:
    @ss.program
    async def fixed(s: ss.State) -> None:
        s += ss.user("x")
        s += ss.assistant(ss.gen("a", max_tokens=2))
        s += ss.user("y")
        s += ss.assistant(ss.gen("b", max_tokens=2))

    async def go(client: Client) -> None:
        counting = Counting(ClientBackend(client))
        graph = await fixed.acompile(on=counting)
        await graph.arun(on=counting)
        before = len(counting.questions)
        await graph.arun(on=counting)
        assert len(counting.questions) == before
        bound = wide.bind(key="k")
        graph = await bound.acompile(on=counting)
        await graph.arun("n", on=counting)
        counting.questions.clear()
        await graph.arun("n", on=counting)
        keys = [question.key for question in counting.questions]
        assert len(keys) == len(set(keys))

    on_tiny(go)


def test_the_constant_beginning_is_warm() -> None:
    async def go(client: Client) -> None:
        graph = await wide.bind(key="k").acompile(on=client)
        prefix = graph.held.prefix
        head = tokenizer().render_chat([{"role": "system", "content": "You are the one. " * 3}])
        shared = tokenizer().encode("<|im_start|>user\nHi", special=True)
        assert len(prefix) >= len(head) - 11 + len(shared)
        result = await graph.arun("you", on=client)
        assert result.state.meta("a").cached >= len(prefix) - 1

    on_tiny(go)


def test_calls_and_branches_overlap() -> None:
    running: list[int] = []
    most: list[int] = []

    async def wait(number: int) -> str:
        running.append(number)
        most.append(len(running))
        while not met.is_set() and len(running) < 2:
            await asyncio.sleep(0.001)
        met.set()
        running.remove(number)
        return str(number)

    met = asyncio.Event()

    @ss.program
    async def late(s: ss.State) -> Any:
        first = await s.call(wait, 1)
        s += ss.user(first)
        s += ss.assistant(ss.gen("a", max_tokens=2))
        second = await s.call(wait, 2)
        s += ss.user(second)
        s += ss.assistant(ss.gen("b", max_tokens=2))
        return s["b"]

    async def go(client: Client) -> None:
        # The calls wait for each other: one after the other would never end.
        graph = await late.acompile(on=client)
        result = await graph.arun(on=client)
        assert max(most) == 2 and [m["content"] for m in await result.state.messages()][0] == "1"

    on_tiny(go)


def test_what_cannot_be_traced_is_refused_with_its_line_or_cut() -> None:
    @ss.program
    async def branching(s: ss.State, name: str) -> str:
        s += ss.user("Hi ", name)
        s += ss.assistant(ss.gen("a", max_tokens=3))
        if len(await s["a"]) > 1:
            s += ss.user("more")
            s += ss.assistant(ss.gen("b", max_tokens=2))
        return "end"

    @ss.program
    async def formatted(s: ss.State, name: str) -> None:
        s += ss.user(f"Hi {name}")

    @ss.program
    async def compared(s: ss.State, name: str) -> None:
        s += ss.user("a" if name == "b" else "c")

    async def go(client: Client) -> None:
        with pytest.raises(ss.TraceError, match=r"^test_compile\.py:\d+: a length depends"):
            await branching.acompile(on=client)
        with pytest.raises(ss.TraceError, match=r"test_compile\.py:\d+: .*write s \+="):
            await formatted.acompile(on=client)
        with pytest.raises(ss.TraceError, match="a comparison depends"):
            await compared.acompile(on=client)
        with pytest.raises(ss.TraceError, match="bind 'key'"):
            await wide.acompile(on=client)
        graph = await branching.acompile(on=client, partial=True)
        assert "from here on interpreted: test_compile.py" in graph.explain()
        with pytest.raises(ss.ProgramError, match="partial"):
            graph.save("nowhere")
        result, plain = await graph.arun("x", on=client), await branching.arun("x", on=client)
        assert result.value == "end"
        assert await result.state.messages() == await plain.state.messages()

    on_tiny(go)


def test_constants_are_found_whatever_annotations_name() -> None:
    class Local:
        pass

    @ss.program
    async def local(s: ss.State, a: ss.Const[str], b: Local, c: int = 1) -> Local | None:
        return None

    assert local.constants == {"a"} and wide.constants == {"key"}
    assert local.bind(a="x").parameters == ["a", "b", "c"]
    with pytest.raises(TypeError, match="no parameter 'd'"):
        local.bind(d=1)


def test_a_graph_explains_and_draws_itself() -> None:
    async def go(client: Client) -> None:
        graph = await wide.bind(key="k").acompile(on=client)
        text = graph.explain()
        for line in (
            "program wide", "call:1 = fetch('k', <arg:name>)", "fork x = state 2, y = state 3",
            "select c of 3 (sum)", "gen a (free, at most 6)",
        ):  # fmt: skip
            assert line in text, text
        assert re.search(r"prompts known before a run: \d+ of 8", text), text
        root = ElementTree.fromstring(graph.svg())
        assert len(root.findall("{*}g")) == len(graph.held.ops)

    on_tiny(go)


def test_a_file_is_checked(tmp_path: Path) -> None:
    @ss.program
    async def small(s: ss.State, kind: str = "a") -> None:
        s += ss.user(s.call(fetch, kind))
        s += ss.assistant(ss.gen("a", max_tokens=2))

    async def go(client: Client) -> None:
        graph = await small.acompile(on=client)
        graph.save(tmp_path / "g")
        with pytest.raises(ss.ProgramError, match="needs fetch"):
            ss.Graph.load(tmp_path / "g")
        (tmp_path / "bad").write_bytes((tmp_path / "g").read_bytes()[:-3])
        with pytest.raises(ss.ProgramError, match="no compiled program"):
            ss.Graph.load(tmp_path / "bad")
        loaded = ss.Graph.load(tmp_path / "g", functions={"fetch": fetch})
        with pytest.raises(TypeError, match="no parameter 'other'"):
            await loaded.arun(other=1, on=client)
        async with served() as (_, url):
            with pytest.raises(ss.ProgramError, match="another tokenizer"):
                await loaded.arun(on=url)
        await loaded.arun(on=client)

    on_tiny(go)


def test_streams_and_batches_of_graphs() -> None:
    async def go(client: Client) -> None:
        bound = wide.bind(key="k")
        graph = await bound.acompile(on=client)
        events = [event async for event in graph.stream("n", on=client)]
        assert isinstance(events[-1], ss.Ended)
        values = {(e.path, e.var): e.value for e in events if isinstance(e, ss.Done)}
        assert values[("", "out")] == events[-1].value["out"]
        assert {("x", "d"), ("y", "d")} <= set(values)
        deltas = [event for event in events if isinstance(event, ss.Delta)]
        pieces = [event.text for event in deltas if (event.path, event.var) == ("x", "d")]
        assert "".join(pieces) == values[("x", "d")]
        many = [{"name": f"n{i}"} for i in range(4)]
        got = [r["out"] async for r in graph.abatch(many, on=client, concurrency=2)]
        assert got == [(await bound.arun(**one, on=client))["out"] for one in many]

    on_tiny(go)


def test_what_branches_begin_with_is_computed_once() -> None:
    @ss.program
    async def forking(s: ss.State, text: str) -> Any:
        s += ss.user("x")
        s += ss.assistant(ss.gen("a", max_tokens=2))
        s += ss.user(text)
        with s.fork(3) as branches:
            for number, branch in enumerate(branches):
                branch += ss.assistant(str(number), ss.gen("b", max_tokens=2))
        await branches.join()
        s += ss.user("y")
        s += ss.assistant(ss.gen("c", max_tokens=1))
        metas = [branch.meta("b") for branch in branches]
        return [[meta.prompt_tokens - meta.cached for meta in metas], s["a"]]

    async def go(client: Client) -> None:
        # Only the first one computes the text: the others wait for that.
        anew, _ = (await forking.arun("the one " * 40, on=client)).value
        assert sorted(anew)[1] <= 4 and max(anew) > 40, anew

    on_tiny(go)
