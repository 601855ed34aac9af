"""The programs' bench: all three ways run, and give the same answers."""

from __future__ import annotations

import asyncio
from typing import Any

from spec_serve.bench.programs import Pages, measured, plain, program
from spec_serve.client import Client
from tests.lang.tiny_server import tiny_server


def test_three_ways_of_one_program() -> None:
    async def go() -> Any:
        async with tiny_server() as url:
            found = await measured(url, 0.001, 3)
            async with Client(url) as client:
                pages = Pages(0.0)
                result = await program(pages.fetch).arun("a ticket", on=client)
                http = client.url.replace("ws", "http", 1).removesuffix("/v1/stream")
                by_hand = await plain(http, pages.fetch, "a ticket")
        assert by_hand[0] == result.value[0] and len(by_hand) == len(result.value) == 4
        return found

    found = asyncio.run(asyncio.wait_for(go(), 60))
    assert found["pages_s"] == 0.002
    assert min(found[f"{name}_s"] for name in ("compiled", "interpreted", "plain")) > 0
    ratio = found["compiled_s"] / found["interpreted_s"]
    assert abs(found["compiled_to_interpreted"] - ratio) < 0.1
