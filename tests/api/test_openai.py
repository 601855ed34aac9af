"""OpenAI's HTTP interface around the echoing engine: shapes, bounds, streams, clients that leave.

Knows no client library (tests/clients does): everything is read off the wire. The numbers in names
are those of the project's list of public bug reports.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from spec_serve.api.server import Server
from tests.api.echo import EOS, Echo
from tests.api.serving import served, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@asynccontextmanager
async def asked(engine: Echo | None = None) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    async with served(engine) as (server, _):
        base = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:
            yield server, client


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def events(body: str) -> list[Any]:
    """The data of all events; [DONE] as it is."""
    lines = body.split("\n\n")
    assert lines[-1] == "" and all(line.startswith("data: ") for line in lines[:-1])
    found = [line.removeprefix("data: ") for line in lines[:-1]]
    return [line if line == "[DONE]" else json.loads(line) for line in found]


def texts(chunks: list[Any]) -> dict[int, str]:
    made: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            made[choice["index"]] = made.get(choice["index"], "") + (piece or "")
    return made


async def _case_21(client: httpx.AsyncClient, path: str, n: int, usage: bool | None) -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "n": n, "ignore_eos": True, "seed": 1}
    body = user("hi", **fields) if path == CHAT else {"prompt": ["hi", "ho"], **fields}
    choices = n if path == CHAT else 2 * n
    prompt = 2 if path == CHAT else 4
    whole = (await client.post(path, json=body)).json()
    streamed = body | {"stream": True}
    if usage is not None:
        streamed["stream_options"] = {"include_usage": usage}
    answer = await client.post(path, json=streamed)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer.text)
    assert done == "[DONE]" and "[DONE]" not in chunks
    counted = {
        "prompt_tokens": prompt, "completion_tokens": 8 * choices,
        "total_tokens": prompt + 8 * choices,
    }  # fmt: skip
    assert {name: whole["usage"][name] for name in counted} == counted
    if usage:
        *chunks, last = chunks
        assert last["choices"] == [] and last["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    said = [chunk["choices"][0] for chunk in chunks]
    reasons = [choice["index"] for choice in said if choice["finish_reason"] is not None]
    assert sorted(reasons) == list(range(choices))
    if path == CHAT:
        roles = [choice["index"] for choice in said if "role" in choice["delta"]]
        assert sorted(roles) == list(range(choices))
        expected = {c["index"]: c["message"]["content"] for c in whole["choices"]}
    else:
        expected = {c["index"]: c["text"] for c in whole["choices"]}
    assert texts(chunks) == expected
    assert len({whole["id"], *(chunk["id"] for chunk in chunks)}) == 2
    assert all(len(text) == 8 for text in expected.values())


def test_case_21_usage_comes_once_and_only_if_asked() -> None:
    async def go() -> None:
        async with asked() as (_, client):
            for path in (CHAT, TEXT):
                for n in (1, 3):
                    for usage in (True, False, None):
                        await _case_21(client, path, n, usage)

    asyncio.run(go())


def post(path: str, *bodies: Any, engine: Echo | None = None) -> list[httpx.Response]:
    """Ask one after the other."""

    async def go() -> list[httpx.Response]:
        async with asked(engine) as (_, client):
            return [await client.post(path, json=body) for body in bodies]

    return asyncio.run(go())


@pytest.mark.parametrize("run", [1, 3, 8])
def test_case_20_characters_stay_whole(run: int) -> None:
    text = "😀漢字é👩‍👧a" * 3
    body = {"prompt": text, "max_tokens": 600}
    cut = body | {"max_tokens": 6}  # inside of the second character
    asked = [{**fields, "stream": stream} for fields in (body, cut) for stream in (False, True)]
    whole, answer, short, shorter = post(TEXT, *asked, engine=Echo(run=run))
    *chunks, _ = events(answer.text)
    assert whole.json()["choices"][0]["text"] == text == texts(chunks)[0]
    assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks)
    *chunks, _ = events(shorter.text)
    assert short.json()["choices"][0]["text"] == texts(chunks)[0] == "😀\ufffd"


def test_a_chunk_holds_what_a_step_gave() -> None:
    (answer,) = post(CHAT, user("abcdefgh", stream=True), engine=Echo(run=3))
    *chunks, _ = events(answer.text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "abc"},
        {"content": "def"},
        {"content": "gh"},
        {},
    ]


def test_case_09_log_probabilities_count_the_tokens() -> None:
    limits = range(1, 9)
    asked = [
        user("abc", max_tokens=m, ignore_eos=True, logprobs=True, top_logprobs=2, stream=stream)
        for m in limits
        for stream in (False, True)
    ]
    answers = post(CHAT, *asked)
    for limit, whole, answer in zip(limits, answers[::2], answers[1::2], strict=True):
        *chunks, _ = events(answer.text)
        (choice,) = whole.json()["choices"]
        entries = choice["logprobs"]["content"]
        streamed = [
            entry
            for chunk in chunks
            for entry in (chunk["choices"][0].get("logprobs") or {"content": []})["content"]
        ]
        assert entries == streamed and len(entries) == limit
        assert whole.json()["usage"]["completion_tokens"] == limit
        assert choice["finish_reason"] == "length"
        assert entries[0]["token"] == "a" and entries[0]["bytes"] == [97]
        # Case 14: minus infinity is no JSON.
        assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-9999.0, -9999.0]


def test_a_token_that_is_no_text_shows_its_bytes() -> None:
    (answer,) = post(CHAT, user("é", logprobs=True))
    first = answer.json()["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == "bytes:\\xc3" and first["bytes"] == [0xC3]


def test_case_29_empty_prompts_harm_nobody() -> None:
    normal = {"prompt": "abc", "max_tokens": 8}
    text: list[Any] = [
        {"prompt": ""}, {"prompt": []}, {"prompt": [""]}, {"prompt": ["a", ""]}, {"prompt": [[]]},
        {"prompt": "a", "max_tokens": -1}, {"prompt": None}, {}, None, {"prompt": [1, "a"]},
        {"prompt": [True]}, {"prompt": [-1]}, {"prompt": [EOS + 1]},
    ]  # fmt: skip
    chat: list[Any] = [
        {"messages": []}, user(None), {}, None, [], user([{"type": "image_url"}]),
        user([{"type": "text"}]),
    ]  # fmt: skip
    answers = post(TEXT, *(body for bad in text for body in (bad, normal)))
    for bad, good in zip(answers[::2], answers[1::2], strict=True):
        assert bad.status_code == 400 and bad.json()["error"]["message"], bad.request.content
        assert good.json()["choices"][0]["text"] == "abc"
    for answer in post(CHAT, *chat):
        assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_an_empty_body_is_told() -> None:
    async def go() -> httpx.Response:
        async with asked() as (_, client):
            return await client.post(CHAT, content=b"")

    answer = asyncio.run(go())
    assert answer.status_code == 400 and "not JSON" in answer.json()["error"]["message"]


def test_max_tokens_zero_gives_the_prompt_alone() -> None:
    body = {"prompt": "abc", "max_tokens": 0}
    bare, echo, stream = post(
        TEXT, body, body | {"echo": True, "logprobs": 1}, body | {"echo": True, "stream": True}
    )
    assert bare.json()["choices"][0]["text"] == ""
    choice = echo.json()["choices"][0]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert echo.json()["usage"]["completion_tokens"] == 0
    assert texts(events(stream.text)[:-1]) == {0: "abc"}


def test_choices_are_numbered_prompt_by_prompt() -> None:
    body = {"prompt": [[97, 98], [99]], "n": 2, "echo": True, "max_tokens": 1, "ignore_eos": True}
    whole, stream = post(TEXT, body, body | {"stream": True})
    found = {choice["index"]: choice["text"] for choice in whole.json()["choices"]}
    assert found == {0: "aba", 1: "aba", 2: "cc", 3: "cc"} == texts(events(stream.text)[:-1])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"foo": 1}, "foo"),
    (CHAT, {"temperature": 2.5}, "temperature"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 10**6}, "n"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 2**63}, "max_tokens"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"stop": ["a", ""]}, "stop[1]"),
    (CHAT, {"stop": ["a"] * 17}, "stop"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"999": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1": 101}}, "logit_bias"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"prediction": {"type": "content", "content": "x"}, "n": 2}, "prediction"),
    (CHAT, {"prediction": {"type": "content", "content": [{}]}}, "prediction.content[0].type"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"modalities": ["audio"]}, "modalities[0]"),
    (CHAT, {"functions": []}, "functions"),
    (CHAT, {"speculation": {"mode": "fast"}}, "speculation.mode"),
    (CHAT, {"cache_salt": "x" * 257}, "cache_salt"),
    (CHAT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"best_of": 2}, "best_of"),
    (TEXT, {"logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": ["a"] * 129}, "prompt"),
    (TEXT, {"messages": []}, "messages"),
    (TEXT, {"prompt": [[97], [400]]}, "prompt"),
]


def test_what_can_not_be_served_is_refused_by_name() -> None:
    async def go() -> None:
        async with asked() as (server, client):
            for path, fields, name in REFUSED:
                body = user("a") if path == CHAT else {"prompt": "a"}
                for stream in (False, True):
                    more = {} if "stream_options" in fields else {"stream": stream}
                    answer = await client.post(path, json=body | more | fields)
                    error = answer.json()["error"]
                    assert (answer.status_code, error["param"]) == (400, name), (fields, error)
                    assert name.partition("[")[0] in error["message"], error
                    assert error["type"] == "invalid_request_error"
            assert server.link.idle()

    asyncio.run(go())


def test_what_says_nothing_about_the_answer_is_taken() -> None:
    ignored = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
        "safety_identifier": "x", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    }  # fmt: skip
    null = dict.fromkeys(
        ("temperature", "n", "stop", "seed", "tools", "max_tokens", "logit_bias", "stream"), None
    )
    history = {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "a", "refusal": None, "annotations": [],
             "audio": None, "function_call": None, "tool_calls": None},
        ]
    }  # fmt: skip
    taken = post(CHAT, user("a", **ignored), user("a", **null), history, user("a", seed=-5))
    assert [answer.status_code for answer in taken] == [200] * 4
    assert taken[2].json()["choices"][0]["message"]["content"] == "xa"


def test_stops_and_their_reasons() -> None:
    bodies = [
        user("abcdef", stop="cd"), user("abcdef", stop=["ef", "cd"]),
        user("abcdef", stop_token_ids=[]), user("abcdef", max_tokens=2),
        user("abcdef", stop="cd", include_stop_str_in_output=True),
    ]  # fmt: skip
    choices = [answer.json()["choices"][0] for answer in post(CHAT, *bodies)]
    told = [(c["message"]["content"], c["finish_reason"], c.get("stop_reason")) for c in choices]
    assert told == [
        ("ab", "stop", "cd"), ("ab", "stop", "cd"), ("abcdef", "stop", None),
        ("ab", "length", None), ("abcd", "stop", "cd"),
    ]  # fmt: skip


def test_speculation_is_told_in_three_dialects() -> None:
    body = user("abcdef", return_token_ids=True)
    whole, answer = post(
        CHAT, body, body | {"stream": True, "timings_per_token": True}, engine=Echo(run=3)
    )
    made = whole.json()
    assert made["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    timings, vllm = made["timings"], made["metrics"]["speculative_decoding"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (6, 7)
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (7, 4)
    assert vllm["num_draft_tokens"] == 7 and vllm["num_accepted_draft_tokens"] == 4
    assert vllm["acceptance_histogram"] == [1, 0, 2] and vllm["num_spec_steps"] == 3
    assert vllm["mean_acceptance_length"] == pytest.approx(7 / 3)
    assert made["prompt_token_ids"] == list(b"abcdef")
    assert made["choices"][0]["token_ids"] == [*b"abcdef", EOS]
    *chunks, _ = events(answer.text)
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == [3, 6, 7, 7]
    assert chunks[-1]["timings"]["draft_n_accepted"] == 4
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == [*b"abcdef", EOS] and chunks[0]["prompt_token_ids"] == list(b"abcdef")


def test_models_and_what_is_not_there() -> None:
    async def go() -> None:
        async with asked() as (_, client):
            listed = (await client.get("/v1/models")).json()
            (model,) = listed["data"]
            assert listed["object"] == "list" and model["object"] == "model"
            assert (await client.get("/v1/models/echo")).json() == model
            for answer in (
                await client.get("/v1/models/other"),
                await client.post(CHAT, json=user("a", model="other")),
            ):
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (404, "model_not_found")
            for path in ("/v1/embeddings", "/v1/responses"):
                answer = await client.post(path, json={"input": "a"})
                assert answer.status_code == 404 and "has not" in answer.json()["error"]["message"]
            assert (await client.get(CHAT)).status_code == 405

    asyncio.run(go())


def test_an_engine_that_dies_ends_a_stream_with_an_error() -> None:
    body = user("abcdef" * 5, stream=True)
    (answer,) = post(CHAT, body, engine=Echo(run=3, fail_at=4))
    *chunks, last = events(answer.text)
    assert "".join(texts(chunks).values()) == "abcdefabc"
    assert last["error"]["code"] == "engine_error" and last["error"]["type"] == "server_error"


def test_a_failure_before_the_first_byte_has_a_status() -> None:
    late, dead = post(
        CHAT, user("a" * 20, stream=True, timeout_s=1e-9), user("a"), engine=Echo(fail_at=10**9)
    )
    assert late.status_code == 408 and late.json()["error"]["code"] == "timeout"
    assert dead.status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields", [{}, {"n": 2}])
def test_case_28_who_leaves_costs_nothing_more(stream: bool, fields: dict[str, Any]) -> None:
    async def go() -> None:
        engine = Echo(run=1, pause=0.005)
        async with served(engine) as (server, _):
            body = json.dumps(user("ab", ignore_eos=True, stream=stream, **fields)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            for wait in (0.0, 0.02, 0.06):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(head.encode() + body)
                await until(lambda: not server.link.idle())
                await asyncio.sleep(wait)
                if stream:
                    await reader.readuntil(b"data: ")
                writer.close()
                await until(server.link.idle)
                await until(lambda: not server.app.calls)
            assert engine.stats().aborted == 3 * fields.get("n", 1)

    asyncio.run(go())


def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_serve.api.generation.MAX_BYTES", 20_000)

    async def go() -> None:
        async with served(Echo(run=64, context=10**7)) as (server, _):
            body = json.dumps(user("ab" * 40, ignore_eos=True, stream=True)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            deaf = socket.create_connection(("127.0.0.1", server.port))
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with deaf:
                deaf.sendall(head.encode() + body)
                await until(lambda: not server.link.idle())
                await until(server.link.idle)
                await until(lambda: not server.app.calls)

    asyncio.run(go())


def test_draining_ends_a_stream_with_an_error() -> None:
    async def go() -> None:
        async with asked(Echo(run=1, pause=0.01)) as (server, client):
            body = user("ab", ignore_eos=True, stream=True)
            async with client.stream("POST", CHAT, json=body) as answer:
                pieces = answer.aiter_text()
                seen = await anext(pieces)
                server.service.draining = True
                server.link.cancel_all()
                seen += "".join([piece async for piece in pieces])
            last = events(seen)[-1]
            assert last["error"]["code"] == "draining"
            refused = await client.post(CHAT, json=user("a"))
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0

    asyncio.run(go())


def test_a_silent_stream_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_serve.api.openai_run.SILENT_S", 0.05)
    monkeypatch.setattr("spec_serve.api.openai_run.LOOK_S", 0.02)
    (answer,) = post(CHAT, user("abcdef", stream=True), engine=Echo(run=3, pause=0.2))
    assert answer.text.count(": still here\n\n") >= 2
    told = answer.text.replace(": still here\n\n", "")
    assert texts(events(told)[:-1]) == {0: "abcdef"} and events(told)[-1] == "[DONE]"


def test_a_generation_cancelled_from_elsewhere_is_told() -> None:
    async def go() -> None:
        async with asked(Echo(run=1, pause=0.01)) as (server, client):
            body = user("ab", ignore_eos=True, stream=True)
            async with client.stream("POST", CHAT, json=body) as answer:
                pieces = answer.aiter_text()
                seen = await anext(pieces)
                server.link.cancel(events(seen)[0]["id"])  # as gRPC's Abort does
                seen += "".join([piece async for piece in pieces])
            assert events(seen)[-1]["error"]["code"] == "cancelled"

    asyncio.run(go())
