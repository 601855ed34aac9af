"""The programs' bench: all ways run, and those of one program give the same answers."""

from __future__ import annotations

import asyncio
from typing import Any

from spec_serve.bench.programs import FIELDS, FORM, WAYS, Pages, measured, plain, program
from spec_serve.client import Client
from tests.lang.tiny_server import tiny_server


def test_all_ways_of_one_program() -> None:
    async def go() -> Any:
        async with tiny_server() as url:
            found = await measured(url, 0.001, 2, 1)
            async with Client(url) as client:
                pages = Pages(0.0, 3)
                result = await program(pages).arun("a ticket", on=client)
                http = client.url.replace("ws", "http", 1).removesuffix("/v1/stream")
                by_hand = await plain(http, pages, "a ticket")
        assert len(by_hand) == len(result.value) == len(FORM) + len(FIELDS) + 4
        for said, choices in zip(by_hand, FORM.values(), strict=False):
            assert said in choices
        return found

    found = asyncio.run(asyncio.wait_for(go(), 60))
    assert found["look_ups_s"] == 0.002
    assert set(found["seconds"]) == set(found["without_look_ups"]) == set(WAYS)
    ratio = found["seconds"]["beside"] / found["seconds"]["interpreted"]
    assert abs(found["to_interpreted"] - ratio) < 0.1
