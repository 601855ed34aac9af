"""Programs of a real server process: the same over WebSockets in both encodings and over gRPC."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import spec_serve.lang as ss
from spec_serve.api import messages as m
from spec_serve.client import Client, GrpcClient
from tests.lang.test_compile import told, wide
from tests.servers import start
from tests.tiny import write_tiny_model_dir


def test_every_transport_and_an_engine_process(tmp_path: Path) -> None:
    model = write_tiny_model_dir(tmp_path / "tiny")
    flags = ("--max-context", "400", "--engine-process")
    bound = wide.bind(key="k")

    async def once(client: Client) -> Any:
        assert client.hello is not None and client.hello.programs
        graph = await bound.acompile(on=client)
        compiled = await told(await graph.arun("the", on=client))
        assert compiled == await told(await bound.arun("the", on=client))
        more = {"token_ids": [7, 8], "max_tokens": 4, "sampling": {"temperature": 1, "seed": 3}}
        asked = {"max_tokens": 3, "ids": True, "segments": [more, {**more, "stop": ["q"]}]}
        answer = await client.complete(token_ids=[5, 6], **asked)
        assert [choice.usage is not None for choice in answer.choices] == [True] * 3
        return (*compiled, [choice.ids for choice in answer.choices])

    async def scored(address: str) -> list[float]:
        async with GrpcClient(address) as client:
            asked = {"max_tokens": 1, "continuations": [[1, 2], [1, 3]]}
            answer = await client.complete(token_ids=[5, 6], **asked)
        return [one.logprob for one in answer.prompt_logprobs]

    async def go(ws: str, grpc: str) -> None:
        found = []
        for client in (Client(ws), Client(ws, m.JSON), Client(f"grpc://{grpc}")):
            async with client:
                found.append(await once(client))
        assert found[0] == found[1] == found[2]
        assert isinstance(found[0][0], dict)
        scores = await scored(grpc)
        assert len(scores) == 4 and scores[0] == scores[2] and max(scores) < 0
        result = await bound.arun("the", on=f"grpc://{grpc}")
        assert isinstance(result, ss.Result) and result.value == found[0][0]

    with start(model, tmp_path / "log", *flags) as server:
        asyncio.run(asyncio.wait_for(go(server.ws, server.grpc), 120))
