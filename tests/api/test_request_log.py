"""The log's line per request: what it holds, and that it holds no text."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from spec_serve.api.logs import JsonLines
from spec_serve.client import Client
from tests.api.serving import served


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    caplog.set_level(logging.INFO, "spec_serve.requests")

    async def go() -> None:
        async with served() as (_, url), Client(url) as client:
            async for _event in client.generate(prompt="secret words", sampling={"n": 2}):
                pass
            async for _event in client.generate(prompt="other words", max_tokens=4):
                pass

    asyncio.run(go())
    return [record for record in caplog.records if record.name == "spec_serve.requests"]


def test_one_line_a_request_with_its_id_and_sizes(lines: list[logging.LogRecord]) -> None:
    first, second = (json.loads(JsonLines().format(line)) for line in lines)
    assert first["request_id"] != second["request_id"] and first["request_id"] in first["message"]
    assert (first["choices"], first["reason"]) == (2, "stop")
    assert first["prompt_tokens"] == len("secret words")
    assert first["completion_tokens"] == 2 * (len("secret words") + 1)
    assert (second["completion_tokens"], second["reason"]) == (4, "length")
    assert second["ttft_ms"] == 1.0 and second["code"] == ""


def test_no_text_is_logged(lines: list[logging.LogRecord]) -> None:
    assert "words" not in "".join(JsonLines().format(line) for line in lines)
