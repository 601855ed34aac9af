"""What a WebSocket refuses, and whom: bad requests, odd frames, deaf readers, foreign pages."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import uvloop
import websockets
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

from spec_serve.api import messages as m
from spec_serve.api.websocket_door import origin_allowed
from spec_serve.client import Client, ConnectionLost, ServerError
from tests.api.echo import Echo
from tests.api.serving import CODECS, collect, served, until

pytestmark = pytest.mark.usefixtures("each_websocket")

BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({}, "prompt"),
    ({"prompt": "a", "token_ids": [1]}, "token_ids"),
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [257]}, "token_ids"),
    ({"token_ids": [-1]}, "token_ids[0]"),
    ({"token_ids": [3, "x"]}, "token_ids[1]"),
    ({"token_ids": [2**31]}, "token_ids"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "raise"}]}, "messages"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 2**63}, "max_tokens"),
    ({"prompt": "a", "min_tokens": 20, "max_tokens": 12}, "min_tokens"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": ["", ".x"]}, "stop[0]"),
    ({"prompt": "a", "stop": ["x" * 40] * 1000}, "stop"),
    ({"prompt": "a", "stop_token_ids": [300], "min_tokens": 3}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [-2]}, "stop_token_ids[0]"),
    ({"prompt": "a", "sampling": {"logit_bias": {"999999": 5}}}, "sampling.logit_bias"),
    ({"prompt": "a", "sampling": {"logit_bias": {"-1": 5}}}, "sampling.logit_bias"),
    ({"prompt": "a", "sampling": {"logit_bias": {"foo": 5}}}, "sampling.logit_bias"),
    ({"prompt": "a", "sampling": {"logit_bias": {"1": 1e9}}}, "sampling.logit_bias"),
    ({"prompt": "a", "sampling": {"n": 10**6}}, "sampling.n"),
    ({"prompt": "a", "sampling": {"temperature": -1}}, "sampling.temperature"),
    ({"prompt": "a", "sampling": {"top_p": 0}}, "sampling.top_p"),
    ({"prompt": "a", "sampling": {"seed": 2**63}}, "sampling.seed"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "bogus": 1}, "bogus"),
    ({"prompt": "a", "model": "gpt-9"}, "model"),
    ({"prompt": "a", "speculation": {"sources": ["magic"]}}, "speculation.sources"),
    ({"prompt": "x" * 5000}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
def test_bad_requests_are_named_and_disturb_nobody(codec: str) -> None:
    async def go() -> None:
        async with served(Echo(1, 0.001)) as (_, url), Client(url, codec) as client:
            stream = asyncio.create_task(collect(client, prompt="steady " * 60))
            own = m.Codec(codec)
            async with connect(url, subprotocols=[codec]) as raw:  # type: ignore[list-item]
                await raw.recv()
                for i, (fields, param) in enumerate(BAD):
                    request = {"type": "generate", "gen": f"g{i}", **fields}
                    if codec == m.JSON:
                        await raw.send(json.dumps(request))
                    else:
                        await raw.send(m.msgspec.msgpack.encode(request))
                    answer = own.server_message(await raw.recv())
                    assert isinstance(answer, m.Error), (fields, answer)
                    assert answer.gen == f"g{i}" and answer.param, (fields, answer)
                    assert answer.param.partition("[999")[0] == param, (fields, answer)
                    assert "0x" not in answer.message and "Traceback" not in answer.message
            text, _ = await stream
            assert text == "steady " * 60

    uvloop.run(go())


def test_frames_nobody_understands() -> None:
    async def go() -> None:
        frames = [
            "", "null", "[]", "{", '{"type":"nothing"}', '{"gen":"a"}', "[" * 100_000,
            '{"type":"generate","gen":"a","prompt":"a","sampling":{"temperature":NaN}}',
            '{"type":"generate","gen":"a","tools":[' + '{"a":' * 3000 + "1" + "}" * 3000 + "]}",
            '{"type":"generate","gen":"' + "x" * 65 + '","prompt":"a"}',
            '{"type":"generate","gen":"a","max_tokens":' + "9" * 5000 + "}",
            '{"type":"generate","gen":"a","prompt":"\\ud800"}',
        ]  # fmt: skip
        async with served() as (_, url):
            async with Client(url, m.JSON) as client:
                for count, frame in enumerate(frames, 1):
                    await client.send_raw(frame)
                    await client.ping()
                    assert len(client.errors) == count, frame[:80]
                assert {error.code for error in client.errors} == {"invalid_request"}
                assert (await collect(client, prompt="fine"))[0] == "fine"
                await client.send_raw(b"\x80")  # the other kind of frame
                with pytest.raises(ConnectionLost):
                    await collect(client, prompt="late")
                assert client._lost == 1003
            async with Client(url, m.MSGPACK) as client:
                for frame in (b"", b"\xdf\xff\xff\xff\xff", b"\xc1", b"\x91" * 50_000):
                    await client.send_raw(frame)
                await client.ping()
                assert len(client.errors) == 4

    uvloop.run(go())


def test_odd_clients_are_closed_on_without_a_word_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go() -> None:
        async with served() as (_, url):
            raw = await connect(url, subprotocols=[m.JSON])  # type: ignore[list-item]
            await raw.recv()
            raw.transport.write(Frame(Opcode.TEXT, b"\xff\xfe").serialize(mask=True))
            with pytest.raises(websockets.exceptions.ConnectionClosed):
                await raw.recv()
            assert raw.close_code == 1007
            async with Client(url) as client:
                with pytest.raises(ConnectionLost) as caught:
                    await collect(client, prompt="x" * (9 << 20))
                assert caught.value.code == 1009
            async with Client(url) as client:
                with pytest.raises(ServerError) as refused:
                    await collect(client, token_ids=[1] * 300_000)
                assert refused.value.code == "context_length_exceeded"
                assert refused.value.param == "token_ids"

    uvloop.run(go())
    assert [r.getMessage() for r in caplog.records if r.name.startswith(("spec", "uvi"))] == []


def test_pages_from_elsewhere_may_not_connect() -> None:
    async def go() -> None:
        async with served() as (server, url):
            for origin in ("http://evil.example", "null", f"http://localhost:{server.port + 1}"):
                with pytest.raises(ServerError) as caught:
                    async with Client(url, origin=origin):
                        pass
                assert caught.value.code == "forbidden"
            async with Client(url, origin=f"http://127.0.0.1:{server.port}") as client:
                assert (await collect(client, prompt="hi"))[0] == "hi"
            with pytest.raises(websockets.exceptions.InvalidStatus):
                async with connect(url, subprotocols=["something.else"]):  # type: ignore[list-item]
                    pass

    uvloop.run(go())


def test_whose_pages_may_connect() -> None:
    here = "127.0.0.1:8000"
    assert origin_allowed(None, here, ())
    assert origin_allowed("http://127.0.0.1:8000", here, ())
    assert origin_allowed("http://localhost:8000", "localhost:8000", ())
    assert origin_allowed("http://[::1]:8000", "[::1]:8000", ())
    assert not origin_allowed("http://127.0.0.1:8001", here, ())
    assert not origin_allowed("null", here, ())
    assert not origin_allowed("http://localhost", "", ())
    # A foreign name that was made to point here.
    assert not origin_allowed("http://evil.example:8000", "evil.example:8000", ())
    allowed = ("https://chat.example",)
    assert origin_allowed("https://chat.example", "chat.example", allowed)
    assert not origin_allowed("https://chat.example.evil", here, allowed)
    assert origin_allowed("http://anything", here, ("*",))


def test_a_slow_reader_is_cut_off_and_disturbs_nobody() -> None:
    async def go() -> None:
        engine = Echo(40, 0.0002, context=1 << 20)
        async with served(engine) as (server, url), Client(url) as quick, connect(
            url, subprotocols=[m.JSON], max_queue=1, close_timeout=0.1  # type: ignore[list-item]
        ) as slow:  # fmt: skip
            request = m.Generate("slow", prompt="x" * 99, ignore_eos=True, logprobs=20)
            await slow.send(m.Codec(m.JSON).encode(request).decode())
            text, _ = await collect(quick, prompt="steady " * 60)
            assert text == "steady " * 60
            await until(lambda: engine.idle() and len(server.app.sessions) == 1)

    uvloop.run(go())


def test_who_does_not_read_is_not_read_from_and_cannot_keep_the_server() -> None:
    async def go() -> None:
        async with served() as (server, url):
            deaf = await connect(url, subprotocols=[m.JSON], max_queue=1)  # type: ignore[list-item]
            frame, sent = m.Codec(m.JSON).encode(m.Ping(1.0)).decode(), 0

            async def flood() -> None:
                nonlocal sent
                while True:
                    await deaf.send(frame)
                    sent += 1

            task, before, still = asyncio.create_task(flood()), -1, 0
            try:
                for _ in range(240):
                    still = still + 1 if sent == before else 0
                    if still == 4:  # stuck: nothing more is read from it
                        break
                    before = sent
                    await asyncio.sleep(0.25)
                    (session,) = server.app.sessions
                    assert session.session is not None
                    assert len(session.session._control) <= 65
                assert still == 4 and sent > 1000
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        # Still open and deaf: it did not keep the server from ending.
        deaf.transport.abort()

    uvloop.run(asyncio.wait_for(go(), 120))
