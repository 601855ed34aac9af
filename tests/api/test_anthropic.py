"""Anthropic's Messages API around the echoing engine: with Anthropic's own client and off the wire.

The echo says what the model was told, so answers show how requests were read.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import httpx
import pytest

from spec_serve.api import anthropic_wire as w
from spec_serve.api import openai_run
from spec_serve.api.server import Server
from tests.api.echo import ByteTokens, Echo
from tests.api.serving import SETTINGS, until
from tests.late import Late

anthropic: Any = Late("anthropic")

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {
    "name": "weather",
    "description": "How it is outside",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
)


class Told(ByteTokens):
    """Its template knows no tools, so they are told in the text, which the echo says."""

    chat_template: str | None = "{{ messages }}"


@asynccontextmanager
async def serving(engine: Echo | None, **changes: Any) -> AsyncIterator[Server]:
    server = Server(engine or Echo(), Told(), replace(SETTINGS, **changes))
    try:
        await server.start()
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def asked(engine: Echo | None = None) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    async with serving(engine) as server:
        base = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:
            yield server, client


@asynccontextmanager
async def talking(
    engine: Echo | None = None,
) -> AsyncIterator[tuple[Server, Any]]:
    async with serving(engine) as server:
        base = f"http://127.0.0.1:{server.port}"
        async with anthropic.AsyncAnthropic(
            api_key="none", base_url=base, max_retries=0, timeout=60
        ) as client:
            yield server, client


def looped(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A coroutine as a test: a loop of its own for each."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2000, **fields}


def events(body: str) -> list[Any]:
    found = []
    *blocks, rest = body.split("\n\n")
    assert rest == ""
    for block in blocks:
        first, second = block.split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert first == f"event: {data['type']}"
        found.append(data)
    return found


@looped
async def test_a_whole_message() -> None:
    async with talking() as (_, client):
        made = await client.messages.create(
            model="echo",
            max_tokens=100,
            system=[{"type": "text", "text": "Sys", "cache_control": {"type": "ephemeral"}}],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "c"},
                {"role": "user", "content": "dé"},
            ],
        )
    assert [block.model_dump(include={"type", "text"}) for block in made.content] == [
        {"type": "text", "text": "Sysa\nbcdé"}
    ]
    assert (made.stop_reason, made.stop_sequence, made.role) == ("end_turn", None, "assistant")
    assert (made.usage.input_tokens, made.usage.output_tokens) == (10, 11)
    assert made.id.startswith("msg") and made.model == "echo" and made._request_id


@pytest.mark.parametrize(
    ("fields", "reason", "matched", "text"),
    [
        ({"max_tokens": 4}, "max_tokens", None, "one "),
        ({"stop_sequences": ["zz", "tw"]}, "stop_sequence", "tw", "one "),
        ({}, "end_turn", None, "one two"),
    ],
)
@looped
async def test_how_a_message_ends(
    fields: dict[str, Any], reason: str, matched: str | None, text: str
) -> None:
    async with asked() as (_, client):
        whole = (await client.post(PATH, json=user("one two", **fields))).json()
        streamed = await client.post(PATH, json=user("one two", stream=True, **fields))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, matched)
    assert whole["content"] == [{"type": "text", "text": text}]
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["request-id"]
    found = events(streamed.text)
    start, ping = found[0], found[1]
    kinds = [event["type"] for event in found]
    assert ping == {"type": "ping"} and kinds.count("ping") == 1
    assert [kind for kind in kinds if kind not in ("content_block_delta", "ping")] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    message = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["input_tokens"] == 7
    deltas = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(deltas) == text
    last = found[-2]
    assert last["delta"] == {"stop_reason": reason, "stop_sequence": matched}
    assert last["usage"] == whole["usage"]


@looped
async def test_streaming_with_the_client_and_calls_of_tools() -> None:
    async with talking(Echo(run=7)) as (_, client):
        async with client.messages.stream(
            model="echo",
            max_tokens=3000,
            tools=[TOOL],  # type: ignore[list-item]
            messages=[{"role": "user", "content": CALLS}],
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        whole = await client.messages.create(
            model="echo",
            max_tokens=3000,
            tools=[TOOL],  # type: ignore[list-item]
            messages=[{"role": "user", "content": CALLS}],
        )
        single = await client.messages.create(
            model="echo",
            max_tokens=3000,
            tools=[TOOL],  # type: ignore[list-item]
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            messages=[{"role": "user", "content": CALLS}],
        )
    assert "input_json" in kinds and "text" in kinds
    for message in (final, whole):
        assert message.stop_reason == "tool_use"
        text, first, second = message.content
        assert text.type == "text" and text.text.endswith("I look.")
        assert "How it is outside" in text.text, "the echo tells what the model was told"
        assert first.type == "tool_use" and first.name == "weather"
        assert first.input == {"city": "Köln"}
        assert second.type == "tool_use" and second.input == {"city": "Ulm"}
        assert first.id != second.id
    assert [block.type for block in single.content] == ["text", "tool_use"]


@looped
async def test_results_of_tools_come_back_in_order() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}}
    other = {**call, "id": "t2"}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
        {
            "type": "tool_result",
            "tool_use_id": "t2",
            "is_error": True,
            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "net"}],
        },
        {"type": "text", "text": "And now?"},
    ]
    talk = {
        "max_tokens": 3000,
        "messages": [
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, call, other]},
            {"role": "user", "content": results},
        ],
    }
    async with asked() as (_, client):
        made = (await client.post(PATH, json=talk)).json()
    said = '{"name": "weather", "arguments": {"city": "Köln"}}'
    told = f"<tool_call>\n{said}\n</tool_call>"
    assert made["content"][0]["text"] == (
        f"How is it?Hm.\n{told}\n{told}"
        "<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\nError: no\nnet\n</tool_response>"
        "And now?"
    )


@looped
async def test_counting() -> None:
    async with talking() as (_, client):
        found = await client.messages.count_tokens(
            model="echo", system="12", messages=[{"role": "user", "content": "345"}]
        )
        assert found.input_tokens == 5
        more = await client.messages.count_tokens(
            model="echo",
            tools=[TOOL],  # type: ignore[list-item]
            messages=[{"role": "user", "content": "345"}],
        )
        assert more.input_tokens > 100


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("temperature", {"temperature": 3}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -2}),
    ("stop_sequences", {"stop_sequences": [""]}),
    ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("mcp_servers", {"mcp_servers": []}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice", {"tool_choice": {"type": "tool", "name": "other"}, "tools": [TOOL]}),
    ("type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("tools: an echo", {"tools": [{**TOOL, "strict": True}]}),
    ("messages", {"messages": []}),
    ("messages", {"messages": [{"role": "assistant", "content": "I begin"}]}),
    ("role", {"messages": [{"role": "system", "content": "x"}]}),
    ("image", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
    (
        "messages[0].content[0]",
        {"messages": [{"role": "user", "content": [
            {"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
    ),
]  # fmt: skip


@looped
async def test_what_is_refused() -> None:
    async with asked() as (_, client):
        for said, fields in REFUSED:
            for stream in (False, True):
                body = user("x", stream=stream, **fields)
                if body["max_tokens"] is None:
                    del body["max_tokens"]
                answer = await client.post(PATH, json=body)
                assert answer.status_code == 400, (said, answer.text)
                told = answer.json()
                assert told["type"] == "error", told
                assert told["error"]["type"] == "invalid_request_error"
                assert said in told["error"]["message"], told


@looped
async def test_failures_are_told_in_anthropics_words() -> None:
    async with talking() as (server, client):
        messages: Any = [{"role": "user", "content": "x"}]
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="other", max_tokens=1, messages=messages)
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError) as long:
            await client.messages.create(
                model="echo", max_tokens=1, messages=[{"role": "user", "content": "x" * 5000}]
            )
        assert long.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        server.service.draining = True
        with pytest.raises(anthropic.APIStatusError) as full:
            await client.messages.create(model="echo", max_tokens=1, messages=messages)
        assert full.value.status_code == 529
        assert full.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
        assert int(full.value.response.headers["retry-after"]) >= 1
        server.service.draining = False
    async with asked() as (_, http):
        answer = await http.post(PATH, content=b"{")
        assert answer.status_code == 400 and answer.json()["type"] == "error"
        answer = await http.get(PATH)
        assert answer.status_code == 405


@looped
async def test_keys_come_in_x_api_key() -> None:
    key = "sk-" + "a" * 30
    async with serving(None, api_keys=(key,)) as server:
        base = f"http://127.0.0.1:{server.port}"
        for presented, right in ((key, True), (key + "x", False)):
            async with anthropic.AsyncAnthropic(
                api_key=presented, base_url=base, max_retries=0
            ) as client:
                ask = client.messages.create(
                    model="echo", max_tokens=9, messages=[{"role": "user", "content": "x"}]
                )
                if right:
                    assert (await ask).stop_reason == "end_turn"
                    continue
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    await ask
                told: Any = caught.value.body
                assert told["error"]["type"] == "authentication_error"


@looped
async def test_an_engine_that_dies_ends_a_stream_with_an_error() -> None:
    async with asked(Echo(pause=0.01, fail_at=5)) as (_, client):
        answer = await client.post(PATH, json=user("x" * 200, stream=True))
    *_, last = events(answer.text)
    assert last["type"] == "error" and last["error"]["type"] == "api_error"


@looped
async def test_a_client_that_leaves_ends_its_generation() -> None:
    async with talking(Echo(pause=0.01)) as (server, client):
        async with client.messages.stream(
            model="echo", max_tokens=2000, messages=[{"role": "user", "content": "x" * 1500}]
        ) as stream:
            async for event in stream:
                if event.type == "text":
                    break
        await until(server.link.idle)
        assert server.link.stats().aborted == 1
        task = asyncio.create_task(
            client.messages.create(
                model="echo", max_tokens=2000, messages=[{"role": "user", "content": "x" * 1500}]
            )
        )
        await until(lambda: not server.link.idle())
        task.cancel()
        await until(server.link.idle)
        assert server.link.stats().aborted == 2


@looped
async def test_a_long_silence_is_filled_with_pings() -> None:
    silent, look = (mock.patch.object(openai_run, name, 0.02) for name in ("SILENT_S", "LOOK_S"))
    with silent, look:
        async with asked(Echo(pause=0.3)) as (_, client):
            answer = await client.post(PATH, json=user("123456", stream=True))
    kinds = [event["type"] for event in events(answer.text)]
    assert kinds.count("ping") > 3 and kinds[-1] == "message_stop"
    assert kinds[0] == "message_start"


ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**64, 1e999, -0.5, 1.5, "", "x", "\ud800", "<|im_end|>\x00",
    [], [1], {}, {"type": "text"}, {"type": "text", "text": 1}, [{"type": "text", "text": "x"}],
]  # fmt: skip


@looped
async def test_any_value_in_any_field_is_answered_by_the_client_or_served() -> None:
    """A stream beside them stays what it is."""
    fields = [name for name in w.Request.__struct_fields__ if name != "timeout_s"]
    async with asked(Echo(pause=0.002)) as (server, client):
        beside = asyncio.create_task(
            client.post(PATH, json=user("beside " * 80, stream=True, max_tokens=3000))
        )
        counts: dict[int, int] = {}
        for i, name in enumerate(fields):
            for value in ODD[i % 3 :: 3]:  # each value in a third of the fields
                body = json.dumps({**user("x", max_tokens=3), name: value}).encode()
                answer = await client.post(PATH, content=body)
                counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
                assert answer.status_code in (200, 400, 404), (name, value, answer.text)
                if answer.headers["content-type"].startswith("text/event-stream"):
                    assert events(answer.text)[-1]["type"] == "message_stop"
                    continue
                told = answer.json()
                assert told["type"] == ("message" if answer.status_code == 200 else "error")
        for block in ("text", "tool_use", "tool_result", "image", "thinking", "\ud800", 5):
            for key in ("text", "id", "name", "input", "tool_use_id", "content", "is_error"):
                for value in ODD[::9]:
                    part = {"type": block, "text": "x", key: value}
                    body = json.dumps(user([part, part], max_tokens=3)).encode()
                    answer = await client.post(PATH, content=body)
                    assert answer.status_code in (200, 400), (part, answer.text)
        found = events((await beside).text)
        text = [e["delta"]["text"] for e in found if e["type"] == "content_block_delta"]
        assert "".join(text) == "beside " * 80 and found[-1]["type"] == "message_stop"
        await until(server.link.idle)
    assert counts[200] > 5 and counts[400] > 50


@looped
async def test_the_sync_client() -> None:
    async with serving(None) as server:
        base = f"http://127.0.0.1:{server.port}"

        def ask() -> str:
            with (
                anthropic.Anthropic(api_key="k", base_url=base, max_retries=0) as client,
                client.messages.stream(
                    model="echo", max_tokens=50, messages=[{"role": "user", "content": "sync"}]
                ) as stream,
            ):
                return "".join(stream.text_stream)

        assert await asyncio.to_thread(ask) == "sync"
