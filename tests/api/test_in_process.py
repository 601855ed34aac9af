"""The client without a socket: the same answers, programs too; it ends what it began."""

from __future__ import annotations

import asyncio

import pytest

from spec_serve.api.in_process import InProcessClient
from spec_serve.client import Client, ConnectionLost, ServerError
from tests.api.echo import Echo
from tests.api.serving import served, until
from tests.lang.test_compile import told, wide
from tests.lang.tiny_server import running


def test_programs_run_beside_the_engine() -> None:
    async def go() -> None:
        bound = wide.bind(key="k")
        async with running() as server, InProcessClient(server.service) as local:
            graph = await bound.acompile(on=local)
            found = await told(await graph.arun("you", on=local))
            async with Client(server.addresses()[0]) as client:
                assert await told(await bound.arun("you", on=client)) == found

    asyncio.run(asyncio.wait_for(go(), 120))


def test_answers_refusals_and_the_end() -> None:
    async def go() -> None:
        engine = Echo(pause=0.001, context=1 << 16)
        async with served(engine) as (server, _):
            async with InProcessClient(server.service) as client:
                assert client.hello is not None and client.hello.models == ["echo"]
                answers = [client.complete(f"text {i}") for i in range(9)]
                assert [one.text for one in await asyncio.gather(*answers)] == [
                    f"text {i}" for i in range(9)
                ]
                with pytest.raises(ServerError, match="not served here"):
                    await client.complete("x", model="other")
                await client.ping()
                long = client.generate(prompt="on and on", ignore_eos=True)
                await anext(long)
                waiting = asyncio.create_task(client.complete("x" * 9, ignore_eos=True))
                await asyncio.sleep(0.05)
            with pytest.raises(ConnectionLost):
                await waiting
            await long.aclose()
            await until(lambda: engine.stats().running == 0)

    asyncio.run(asyncio.wait_for(go(), 120))
