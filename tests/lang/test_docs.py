"""The worked examples of docs/programs.md, as they stand there, on a small real model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import spec_serve.lang as ss
from spec_serve.api import messages as m
from spec_serve.api.server import Server
from spec_serve.api.server_settings import ServeSettings
from spec_serve.client import Client
from spec_serve.spec.assemble import EngineOptions
from spec_serve.spec.load import build_engine

DOCS = Path(__file__).resolve().parents[2] / "docs/programs.md"
TICKET = "Queries against the orders table time out since the last migration."
NOTES = "After a migration, rebuild the indexes."


class Page(BaseHTTPRequestHandler):
    """Answers with the notes."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(NOTES.encode())

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def page() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/notes"
        finally:
            server.shutdown()
            thread.join()


def example(number: int) -> dict[str, Any]:
    """What the number-th block of code of the page defines."""
    code = DOCS.read_text(encoding="utf-8").split("```python\n")[number].partition("```")[0]
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(DOCS), "exec"), names)
    return names


@pytest.mark.real_model
def test_the_examples_run() -> None:
    engine, tokenizer = build_engine(
        EngineOptions(target="smollm2-135m-instruct", max_rows=8, kv_tokens=4096)
    )
    settings = ServeSettings(
        port=0, grpc_port=None, model_name="smol", drain_s=5.0, generation_config={}
    )

    async def go() -> None:
        server = Server(engine, tokenizer, settings)
        await server.start()
        try:
            with page() as notes:
                async with Client(server.addresses()[0]) as client:
                    await both(example(1)["triage"], notes, client)
                    await many(example(2), client)
                    await acting(example(3)["agent"], client)
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(go(), 120))


async def both(triage: ss.Program, notes: str, client: Client) -> None:
    interpreted = await triage.arun(TICKET, notes, on=client)
    told = interpreted.value
    assert told["topic"] in ("billing", "network", "database")
    assert told["urgency"] in ("low", "high")
    assert told["step"] and "\n" not in told["step"]
    graph = await triage.acompile(on=client)
    compiled = await graph.arun(TICKET, notes, on=client)
    assert compiled.value == told
    assert await compiled.state.ids() == await interpreted.state.ids()
    assert f"Notes:\n{NOTES}" in (await compiled.state.messages())[-2]["content"]
    # By hand: the same conversation as a chat, choices left out.
    written = await compiled.state.messages()
    turns = [m.Turn(turn["role"], [turn["content"]]) for turn in written[:-1]]  # type: ignore[arg-type]
    (ids,) = await client.tokenize(turns=turns, begun=["First,"])
    by_hand = await client.complete(token_ids=ids, max_tokens=16, stop=["\n"])
    assert by_hand.text == told["step"]


async def many(names: dict[str, Any], client: Client) -> None:
    reviews = ["I love it, it works every day.", "It broke at once. A waste of money.", "Great!"]
    found = await names["labels"](reviews, client)
    assert set(found) <= {" good", " bad"} and found[0] == found[2] == " good"
    classify = names["classify"]
    assert found == [(await classify.arun(review, on=client)).value for review in reviews]


async def acting(agent: ss.Program, client: Client) -> None:
    question = "What is the capital?"
    result = await agent.arun(question, on=client)
    assert result.value
    graph = await agent.acompile(on=client, partial=True)
    again = await graph.arun(question, on=client)
    assert again.value == result.value
    assert await again.state.messages() == await result.state.messages()
    with pytest.raises(ss.TraceError, match="which branch is picked"):
        await agent.acompile(on=client)
    said = [turn["content"] for turn in await again.state.messages()]
    assert "Found: The capital is Rome.\nGo on." in said
    rounds = [turn for turn in said if turn.startswith("I will")]
    assert 1 <= len(rounds) <= 2
    print(again.value)
