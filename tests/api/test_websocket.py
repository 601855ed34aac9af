"""The WebSocket from a real client's side, in one process with the echoing engine."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest
import uvloop

from spec_serve.api import messages as m
from spec_serve.client import Client, ServerError
from tests.api.echo import Echo
from tests.api.serving import CODECS, collect, served, until

pytestmark = pytest.mark.usefixtures("each_websocket")

MIXED = "a\U0001f600\u6f22\u5b57\u00e9\U0001f469\u200d\U0001f467z" * 4


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("run", [1, 3, 8])
def test_a_generation_from_start_to_end(codec: str, run: int) -> None:
    async def go() -> None:
        async with served(Echo(run)) as (_, url), Client(url, codec) as client:
            assert client.hello is not None and client.hello.models == ["echo"]
            text, events = await collect(client, prompt=MIXED, ids=True)
            assert text == MIXED
            started, *deltas, finished = events
            assert isinstance(started, m.Started) and isinstance(finished, m.Finished)
            assert started.prompt_tokens == len(MIXED.encode()) and started.model == "echo"
            assert all("\ufffd" not in delta.text for delta in deltas)
            assert [event.seq for event in events] == list(range(len(events)))
            ids = [token for delta in deltas for token in delta.ids]
            assert ids == [*MIXED.encode(), 256]
            assert finished.reason == "stop" and finished.matched == 256 and finished.last
            assert finished.usage.completion_tokens == len(ids)
            steps = [step for delta in deltas for step in delta.steps]
            assert finished.speculation is not None
            assert finished.speculation.steps == len(steps) == -(-len(ids) // run)
            assert finished.speculation.accepted == sum(step.accepted for step in steps)
            assert steps[0].sources == {"lookup": (steps[0].drafted, steps[0].accepted)}

    uvloop.run(go())


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_cut_ends_as_a_replacement_everywhere(codec: str) -> None:
    async def go() -> None:
        async with served() as (_, url), Client(url, codec) as client:
            text, events = await collect(client, prompt="ab\U0001f600", max_tokens=4)
            assert text == "ab\ufffd" and events[-1].reason == "length"

    uvloop.run(go())


@pytest.mark.parametrize("run", [1, 4, 9])
def test_stop_strings(run: int) -> None:
    async def go() -> None:
        prompt = "one two three four"
        async with served(Echo(run)) as (_, url), Client(url) as client:
            text, events = await collect(client, prompt=prompt, stop=["three", "twQ"])
            assert text == "one two " and events[-1].matched == "three"
            assert events[-1].reason == "stop"
            assert events[-1].usage.completion_tokens == len("one two three")
            text, _ = await collect(client, prompt=prompt, stop=["three"], include_stop=True)
            assert text == "one two three"
            text, events = await collect(client, prompt=prompt, stop=["e"], min_tokens=4)
            assert text == "one two thr" and events[-1].matched == "e"

    uvloop.run(go())


def test_many_generations_share_a_socket() -> None:
    async def go() -> None:
        async with served(Echo(2, 0.001)) as (_, url), Client(url) as client:
            asked = [f"request number {i} " * (i + 1) for i in range(12)]
            got = await asyncio.gather(*(collect(client, prompt=text) for text in asked))
            assert [text for text, _ in got] == asked
            for _, events in got:
                assert [event.seq for event in events] == list(range(len(events)))

    uvloop.run(go())


def test_choices_end_one_by_one() -> None:
    async def go() -> None:
        async with served() as (_, url), Client(url) as client:
            _, events = await collect(client, prompt="abc", sampling={"n": 3})
            assert sum(isinstance(event, m.Started) for event in events) == 1
            ends = [event for event in events if isinstance(event, m.Finished)]
            assert sorted(end.index for end in ends) == [0, 1, 2]
            assert [end.last for end in ends] == [False, False, True]
            for index in range(3):
                assert (
                    "".join(e.text for e in events if isinstance(e, m.Delta) and e.index == index)
                    == "abc"
                )

    uvloop.run(go())


@pytest.mark.parametrize("codec", CODECS)
def test_impossible_logprobs_are_finite(codec: str) -> None:
    async def go() -> None:
        async with served() as (_, url), Client(url, codec) as client:
            _, events = await collect(client, prompt="ab", logprobs=2)
            scores = [s for e in events if isinstance(e, m.Delta) for s in e.logprobs]
            assert len(scores) == events[-1].usage.completion_tokens == 3
            assert [entry[1] for entry in scores[0].top] == [-9999.0, -9999.0]

    uvloop.run(go())


def test_cancel_and_leaving_free_the_engine() -> None:
    async def go() -> None:
        engine = Echo(1, 0.002)
        async with served(engine) as (server, url), Client(url) as client:
            reasons = []
            async for event in client.generate(prompt="x" * 50, ignore_eos=True, gen="mine"):
                if isinstance(event, m.Started):
                    await client.cancel("mine")
                if isinstance(event, m.Finished):
                    reasons.append(event.reason)
            assert reasons == ["cancelled"]
            leaving = client.generate(prompt="x" * 50, ignore_eos=True)
            await anext(leaving)
            await leaving.aclose()
            await until(engine.idle)
            # A dropped connection, without a close frame.
            other = Client(url)
            await other.__aenter__()
            running = [other.generate(prompt="y" * 9, ignore_eos=True) for _ in range(6)]
            await asyncio.gather(*(anext(one) for one in running[:3]))
            other.abort()
            await until(engine.idle)
            await until(lambda: len(server.app.sessions) == 1)
            assert other._reader is not None
            await other._reader
            assert engine.stats().aborted == 5
            assert server.link.idle()

    uvloop.run(go())


def test_a_second_use_of_a_running_id() -> None:
    async def go() -> None:
        async with served(Echo(1, 0.002)) as (_, url), Client(url) as client:
            running = asyncio.create_task(collect(client, prompt="abcdef" * 9, gen="one"))
            await client.ping()
            frame = m.Codec(m.MSGPACK).encode(m.Generate("one", prompt="x"))
            await client.send_raw(frame)
            assert (await running)[0] == "abcdef" * 9
            assert [error.code for error in client.errors] == ["duplicate_id"]
            assert (await collect(client, prompt="again", gen="one"))[0] == "again"

    uvloop.run(go())


def test_a_deadline_ends_with_an_error() -> None:
    async def go() -> None:
        async with served(Echo(1, 0.005)) as (_, url), Client(url) as client:
            with pytest.raises(ServerError) as caught:
                await collect(client, prompt="x", ignore_eos=True, timeout_s=0.05)
            assert caught.value.code == "timeout"

    uvloop.run(go())


def get(url: str, method: str = "GET") -> tuple[int, Any]:
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_health_readiness_and_version() -> None:
    async def go() -> None:
        async with served() as (server, _):
            base = f"http://127.0.0.1:{server.port}"

            async def ask(path: str, method: str = "GET") -> tuple[int, Any]:
                return await asyncio.to_thread(get, base + path, method)

            assert await ask("/health") == (200, {"status": "ok"})
            assert await ask("/ready") == (200, {"status": "ready", "model": "echo"})
            assert (await ask("/version"))[1]["version"]
            assert (await ask("/nothing"))[0] == 404
            assert (await ask("/health", "POST"))[0] == 405
            assert (await ask("/v1/stream"))[0] == 426
            server.service.draining = True
            assert (await ask("/ready"))[0] == 503
            assert (await ask("/health"))[0] == 200

    uvloop.run(go())


def test_a_drain_lets_running_requests_finish() -> None:
    async def go() -> None:
        engine = Echo(1, 0.002)
        async with served(engine) as (server, url), Client(url) as client:
            running = asyncio.create_task(collect(client, prompt="abcdef" * 20))
            await until(lambda: not engine.idle())
            server.stop()
            ended = asyncio.create_task(server.until_stopped())
            await until(lambda: client.draining)
            with pytest.raises(ServerError) as caught:
                await collect(client, prompt="late")
            assert caught.value.code == "draining" and caught.value.retryable
            assert (await running)[0] == "abcdef" * 20
            assert await ended == 0
            await server.close()
            await until(lambda: client._lost == 1012)

    uvloop.run(go())


def test_a_second_signal_ends_at_once() -> None:
    async def go() -> None:
        engine = Echo(1, 0.002)
        async with served(engine) as (server, url), Client(url) as client:
            running = asyncio.create_task(collect(client, prompt="a", ignore_eos=True))
            await until(lambda: not engine.idle())
            ended = asyncio.create_task(server.until_stopped())
            server.stop()
            await until(lambda: client.draining)
            server.stop()
            _, events = await running
            assert events[-1].reason == "cancelled"
            assert await ended == 1

    uvloop.run(go())


def test_an_engine_that_dies_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with served(Echo(1, 0.002, fail_at=5)) as (server, url), Client(url) as client:
            ended = asyncio.create_task(server.until_stopped())
            with pytest.raises(ServerError) as caught:
                await collect(client, prompt="abcdef" * 20)
            assert caught.value.code == "engine_error"
            assert "told to fail" not in str(caught.value)
            assert await ended == 1

    uvloop.run(go())
    assert "the engine stopped" in caplog.text
