"""openai-python against the server: sync, async, raw events, tools, predictions, cancelling."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal

import httpx
import pytest

from tests import servers
from tests.api.processes import Running, echo_server
from tests.late import Late

openai: Any = Late("openai")

HELLO: Any = [{"role": "user", "content": "hello 😀 world"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def client(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


def test_models_chat_and_completions(echo_url: str) -> None:
    with client(echo_url) as api:
        (model,) = api.models.list()
        assert api.models.retrieve(model.id).id == model.id == "echo"
        made = api.chat.completions.create(model="echo", messages=HELLO, logprobs=True)
        assert made.choices[0].message.content == "hello 😀 world"
        assert made.choices[0].finish_reason == "stop" and made.usage is not None
        assert made.choices[0].logprobs is not None and made.choices[0].logprobs.content
        assert made.usage.completion_tokens == 17 == len(made.choices[0].logprobs.content)
        text = api.completions.create(model="echo", prompt=["ab", "cd"], echo=True, max_tokens=9)
        assert [choice.text for choice in text.choices] == ["abab", "cdcd"]


@pytest.mark.parametrize("usage", [True, False])
def test_case_21_streams_with_the_official_client(echo_url: str, usage: bool) -> None:
    fields: Any = {"stream_options": {"include_usage": True}} if usage else {}
    with client(echo_url) as api:
        chunks = list(
            api.chat.completions.create(
                model="echo", messages=HELLO, n=3, max_tokens=8, stream=True, **fields
            )
        )
    if usage:
        *chunks, last = chunks
        assert last.choices == [] and last.usage is not None
        assert last.usage.completion_tokens == 24 and last.usage.total_tokens == 40
    assert all(chunk.usage is None for chunk in chunks)
    ends = [c.choices[0].index for c in chunks if c.choices[0].finish_reason is not None]
    roles = [c.choices[0].index for c in chunks if c.choices[0].delta.role is not None]
    assert sorted(ends) == sorted(roles) == [0, 1, 2]


def test_async_streams_side_by_side(echo_url: str) -> None:
    async def one(api: Any, text: str) -> str:
        messages: Any = [{"role": "user", "content": text}]
        made = await api.chat.completions.create(model="echo", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in made])

    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=echo_url, api_key="none", max_retries=0) as api:
            texts = [f"text number {i}" for i in range(12)]
            assert await asyncio.gather(*(one(api, text) for text in texts)) == texts

    asyncio.run(go())


def test_raw_events(echo_url: str) -> None:
    with client(echo_url) as api:
        raw = api.chat.completions.with_raw_response.create(
            model="echo", messages=HELLO, stream=True
        )
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert raw.headers["x-request-id"]
        lines = [line for line in raw.http_response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    texts = [piece["choices"][0]["delta"].get("content", "") for piece in pieces]
    assert "".join(texts) == "hello 😀 world"


def test_errors_are_the_clients_own(echo_url: str) -> None:
    with client(echo_url) as api:
        with pytest.raises(openai.BadRequestError) as bad:
            api.chat.completions.create(model="echo", messages=HELLO, temperature=3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            api.chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.NotFoundError):
            api.embeddings.create(model="echo", input="a")


def test_tools(echo_url: str) -> None:
    messages: Any = [{"role": "user", "content": f"Looking it up.\n{CALL}\n{CALL}"}]
    with client(echo_url) as api:
        made = api.chat.completions.create(model="echo", messages=messages, tools=TOOLS)
        choice = made.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Looking it up."
        calls: Any = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["weather", "weather"]
        assert [json.loads(c.function.arguments) for c in calls] == [{"city": "Łódź"}] * 2
        assert len({call.id for call in calls}) == 2
        with api.chat.completions.stream(model="echo", messages=messages, tools=TOOLS) as stream:
            final = stream.get_final_completion().choices[0]
        streamed: Any = final.message.tool_calls
        assert final.finish_reason == "tool_calls" and final.message.content == "Looking it up."
        assert [c.function.arguments for c in streamed] == [c.function.arguments for c in calls]
        one = api.chat.completions.create(
            model="echo", messages=messages, tools=TOOLS, parallel_tool_calls=False
        )
        assert len(one.choices[0].message.tool_calls or []) == 1
        # The answer goes back with the result, as agents send it.
        turn: Any = [*messages, choice.message, {
            "role": "tool", "tool_call_id": calls[0].id, "content": "rain"
        }]  # fmt: skip
        again = api.chat.completions.create(model="echo", messages=turn, tools=TOOLS)
        assert "rain" in (again.choices[0].message.content or "")
        none = api.chat.completions.create(
            model="echo", messages=messages, tools=TOOLS, tool_choice="none"
        )
        assert none.choices[0].message.content == f"Looking it up.\n{CALL}\n{CALL}"


def test_a_model_of_the_answer_is_kept(tiny_url: str) -> None:
    """What `parse` sends for a class, streamed and not."""
    pydantic = pytest.importorskip("pydantic")
    fields: Any = {"colour": (Literal["red", "green"], ...), "sure": (bool, ...)}
    form = pydantic.create_model("Found", **fields)
    turns: Any = [{"role": "user", "content": "a"}]
    with client(tiny_url) as api:
        made = api.chat.completions.parse(model="tiny", messages=turns, response_format=form)
        found = made.choices[0].message.parsed
        assert found is not None and found.colour in ("red", "green")
        with api.chat.completions.stream(
            model="tiny", messages=turns, response_format=form
        ) as stream:
            final = stream.get_final_completion().choices[0].message
        assert final.parsed == found
        extra = {"structured_outputs": {"choice": ["yes", "no"]}}
        text = api.completions.create(model="tiny", prompt="a", extra_body=extra)
        assert text.choices[0].text in ("yes", "no")


def test_predictions_are_counted_and_change_nothing(tiny_url: str) -> None:
    messages: Any = [{"role": "user", "content": "the rain in the"}]
    with client(tiny_url) as api:
        asked: Any = {"model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0}
        plain = api.chat.completions.create(**asked, extra_body={"speculation": {"mode": "off"}})
        text = plain.choices[0].message.content
        assert text and plain.usage is not None
        prediction: Any = {"type": "content", "content": text}
        told = api.chat.completions.create(
            **asked,
            prediction=prediction,
            extra_body={"speculation": {"mode": "max", "sources": ["prediction"]}},
        )
        assert told.choices[0].message.content == text and told.usage is not None
        details = told.usage.completion_tokens_details
        assert details is not None and details.accepted_prediction_tokens is not None
        assert 0 < details.accepted_prediction_tokens < told.usage.completion_tokens
        extra: Any = told.model_extra
        assert extra["timings"]["draft_n_accepted"] >= details.accepted_prediction_tokens
        off: Any = plain.model_extra
        assert off["timings"]["draft_n"] == 0


def test_a_prompt_is_scored(tiny_url: str) -> None:
    """As evaluation harnesses do it: echo, log-probabilities, no token of its own."""
    with client(tiny_url) as api:
        asked: Any = {"model": "tiny", "prompt": "the rain in the"}
        echo = api.completions.create(**asked, echo=True, logprobs=2, max_tokens=0)
        extra = {"prompt_logprobs": 2, "return_token_ids": True}
        other: Any = api.completions.create(**asked, max_tokens=1, extra_body=extra)
        chat: Any = api.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=1, extra_body=extra
        )
    assert echo.choices[0].text == asked["prompt"] and echo.usage is not None
    assert echo.usage.completion_tokens == 0
    found = echo.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.token_logprobs is not None
    assert "".join(found.tokens) == asked["prompt"]
    first, *scores = found.token_logprobs
    assert first is None and all(-50 < score < 0 for score in scores)
    choice = other.choices[0]
    ids = choice.model_extra["prompt_token_ids"]
    nothing, *told = choice.model_extra["prompt_logprobs"]
    assert nothing is None and len(told) == len(ids) - 1 == len(scores)
    assert [one[str(token)]["logprob"] for one, token in zip(told, ids[1:], strict=True)] == scores
    assert all(sorted(e.get("rank", 0) for e in one.values())[-2:] == [1, 2] for one in told)
    extras = chat.model_extra
    assert len(extras["prompt_logprobs"]) == len(extras["prompt_token_ids"])


def test_case_28_leaving_a_stream_ends_it(tiny: servers.Server, tiny_url: str) -> None:
    before = tiny.wait_idle()
    with client(tiny_url) as api:
        for _ in range(5):
            stream = api.completions.create(
                model="tiny", prompt="a", max_tokens=10_000, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            next(iter(stream))
            stream.close()
    after = tiny.wait_idle()
    assert after.aborted - before.aborted == 5
    with client(tiny_url) as api:
        made = api.completions.create(model="tiny", prompt="a", max_tokens=4)
        assert made.usage is not None and made.usage.completion_tokens <= 4


def test_a_request_id_comes_back(echo: Running) -> None:
    address = echo.health.removesuffix("/health") + "/v1/models"
    answer = httpx.get(address, headers={"x-request-id": "mine-1"}, timeout=60, trust_env=False)
    assert answer.headers["x-request-id"] == "mine-1"


def test_keys_and_a_full_queue_are_the_clients_own_errors() -> None:
    keys = ["a-long-enough-key-1"]
    with echo_server({"pause": 0.02, "rows": 1}, api_keys=keys, max_queue=1, grpc_port=None) as own:
        url = own.health.removesuffix("/health") + "/v1"
        with client(url) as api, pytest.raises(openai.AuthenticationError) as wrong:
            api.models.list()
        assert wrong.value.code == "invalid_api_key"
        with openai.OpenAI(base_url=url, api_key=keys[0], max_retries=0) as api:
            assert [model.id for model in api.models.list()] == ["echo"]
            asked: Any = {"model": "echo", "messages": HELLO, "stream": True}
            asked["extra_body"] = {"ignore_eos": True}
            with ThreadPoolExecutor(3) as pool:  # one runs, one waits, one is refused
                made = [pool.submit(api.chat.completions.create, **asked) for _ in range(3)]
                answers = as_completed(made)
                outcomes = [next(answers), next(answers)]
                (full,) = [error for one in outcomes if (error := one.exception()) is not None]
                (running,) = [one.result() for one in outcomes if one.exception() is None]
                running.close()
                next(answers).result().close()
    assert isinstance(full, openai.InternalServerError)
    assert full.status_code == 503 and full.code == "overloaded"
    assert int(full.response.headers["retry-after"]) > 0
