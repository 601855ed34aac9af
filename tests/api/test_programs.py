"""Programs beside the engine: registered ones by HTTP and WebSocket, and bad graphs."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

import spec_serve.lang as ss
from spec_serve.api import program_wire as w
from spec_serve.api.programs import registered
from spec_serve.client import Client, ConnectionLost, ServerError
from spec_serve.lang.parts import Append, Body, Const, Fork, Loop, Plain, Ref
from tests.api.serving import until
from tests.lang import tools
from tests.lang.tiny_server import running

TOOLS = tools.__name__


@ss.program
async def loud(s: ss.State, name: str, count: int = 2) -> Any:
    s += ss.user("Hi ", s.call(tools.shout, name), count)
    s += ss.assistant("So: ", ss.gen("a", max_tokens=5, n=2), ss.gen("b", type=bool, max_tokens=9))
    s += ss.assistant(ss.select("c", ["in", "on"]))
    return {"b": s["b"], "both": s["a"], "c": s["c"], "name": name}


@ss.program
async def failing(s: ss.State, name: str) -> Any:
    s += ss.user("Hi ", s.call(tools.fail, name))
    s += ss.assistant(ss.gen("a", max_tokens=2))
    return s["a"]


@ss.program
async def endless(s: ss.State) -> Any:
    s += ss.user("the")
    s += ss.assistant(ss.gen("a", max_tokens=2000, ignore_eos=True))
    return s["a"]


async def asked(http: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Status and body."""

    def ask() -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{http}/v1/programs", data)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    return await asyncio.to_thread(ask)


def test_registered_programs_over_every_way_in(tmp_path: Path) -> None:
    async def go() -> None:
        async with running() as server, Client(server.addresses()[0]) as client:
            http = server.addresses()[-1].removesuffix("/health")
            graph = await loud.acompile(on=client)
            graph.save(tmp_path / "loud.graph")
            (await failing.acompile(on=client)).save(tmp_path / "failing.graph")
            (await endless.acompile(on=client)).save(tmp_path / "endless.graph")
            server.service.programs = registered(str(tmp_path), TOOLS)
            expected = (await loud.arun("the", on=client)).value
            assert (await graph.arun("the", on=client)).value == expected
            assert await ss.run_registered("loud", on=client, name="the") == expected
            status, body = await asked(http, {"program": "loud", "arguments": {"name": "the"}})
            told = json.loads(body)
            assert status == 200 and told["value"] == expected
            assert [one["name"] for one in told["variables"]] == ["a", "b", "c"]
            assert told["variables"][0]["texts"] == expected["both"]
            assert told["messages"][0] == {"role": "user", "content": "Hi THE!2"}
            await streamed(http, expected)
            await refused(http, client)
            await left(server, client)

    asyncio.run(asyncio.wait_for(go(), 120))


async def streamed(http: str, expected: Any) -> None:
    wanted = {"program": "loud", "arguments": {"name": "the"}, "stream": True}
    status, body = await asked(http, wanted)
    events = body.decode().strip().split("\n\n")
    assert status == 200 and events[-1] == "data: [DONE]"
    read = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert read[-1]["answer"]["value"] == expected
    text = "".join(one["delta"]["text"] for one in read if one.get("delta", {}).get("var") == "b")
    assert json.loads(text) is expected["b"]


async def refused(http: str, client: Client) -> None:
    status, body = await asked(http)
    cards = {card["id"]: card for card in json.loads(body)["data"]}
    assert status == 200 and set(cards) == {"endless", "failing", "loud"}
    assert cards["loud"]["parameters"] == ["name", "count"]
    assert cards["loud"]["defaults"] == {"count": 2}
    cases = [
        ({"program": "none"}, 404, "program"),
        ({"program": "loud"}, 400, "arguments"),
        ({"program": "loud", "arguments": {"name": "x", "more": 1}}, 400, "arguments"),
        ({"program": "failing", "arguments": {"name": "x"}}, 500, None),
        ({"programme": "loud"}, 400, "programme"),
    ]
    for wanted, code, param in cases:
        status, body = await asked(http, wanted)
        assert (status, json.loads(body)["error"]["param"]) == (code, param), body
    with pytest.raises(ServerError, match="no program is registered as 'none'"):
        await ss.run_registered("none", on=client)
    with pytest.raises(ss.ProgramError, match="'name' is missing"):
        await ss.run_registered("loud", on=client)


async def left(server: Any, client: Client) -> None:
    """Who leaves ends what runs: a run, a socket, an HTTP request."""
    run = client.programs.run("endless", events=True)
    async for message in run:
        if isinstance(message, w.ProgramDelta):
            break
    await run.aclose()
    await idle(server)
    async with Client(client.url) as other:
        with pytest.raises(ConnectionLost):
            async for _ in other.programs.run("endless", events=True):
                other.abort()
    await idle(server)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = b'{"program": "endless", "stream": true}'
    writer.write(b"POST /v1/programs HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body))
    writer.write(body)
    await reader.readuntil(b"delta")
    writer.close()
    await idle(server)


async def idle(server: Any) -> None:
    await until(lambda: server.link.idle() and not any(one.busy for one in server.app.sessions))


def test_graphs_that_will_not_do(tmp_path: Path) -> None:
    async def go() -> None:
        async with running() as server, Client(server.addresses()[0]) as client:
            held = (await endless.acompile(on=client)).held
            alone = Append(0, "user", [Const("x")])
            empty = Loop(0, 1000, Body([Loop(0, 1000, Body([]))]))
            cases: list[tuple[list[Any], str]] = [
                ([Append(7, "user", [Const("x")])], "refers to 7"),
                ([Append(0, "user", [Ref("0/none#0")])], "refers to"),
                ([Append(0, "user", [Ref("arg:none")])], "refers to"),
                ([Fork(0, [*range(1, 400)], [str(i) for i in range(1, 400)])], "256 states"),
                ([empty, alone], "more than 100000 operations"),
            ]
            for ops, message in cases:
                made = msgspec.structs.replace(held, ops=ops, names={}, result=Plain(None))
                with pytest.raises(ServerError, match=message):
                    await gathered(client, msgspec.msgpack.encode(made))
            with pytest.raises(ServerError, match="no compiled program"):
                await gathered(client, b"nothing")
            old = msgspec.msgpack.encode(msgspec.structs.replace(held, version=0))
            with pytest.raises(ServerError, match="another version"):
                await gathered(client, old)
            # The socket still serves.
            assert await client.complete("the", max_tokens=1)
            await idle(server)

    asyncio.run(asyncio.wait_for(go(), 120))
    (tmp_path / "bad.graph").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="programs: bad.graph: no compiled program"):
        registered(str(tmp_path), "")
    with pytest.raises(ValueError, match="programs: .*: No such file"):
        registered(str(tmp_path / "none"), "")
    with pytest.raises(ValueError, match="program-functions: No module"):
        registered(str(tmp_path), "no_such_module")


async def gathered(client: Client, graph: bytes) -> list[Any]:
    return [message async for message in client.programs.run(graph=graph)]
