"""The OpenAPI document holds every route, is well formed, and what it says is what is served.

Schemathesis makes requests out of it, good and bad, for the echoing engine; the number of them is
bounded and the same in every run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings

from spec_serve.api import openapi
from spec_serve.api.calls import Call, Route
from tests.api.processes import Running, echo_server
from tests.late import Late

schemathesis = Late("schemathesis")

FIXED = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/messages", "/metrics")


ASKED = ("/v1/chat/completions", "/v1/completions")
KEPT = ("messages", "prompt", "stream", "n", "user", "seed", "temperature", "logprobs", "echo")


def plainer(body: dict[str, Any]) -> None:
    """Without what the schema allows and the server, or the tiny context, does not."""
    for name in [name for name in body if name not in KEPT]:
        del body[name]
    for turn in body.get("messages", []):
        content = turn.get("content") or "a"
        turn.clear()
        turn.update(role="user", content=content)


async def nothing(call: Call) -> None:
    raise AssertionError


@pytest.fixture(scope="module")
def echo() -> Iterator[Running]:
    with echo_server() as server:
        yield server


@pytest.fixture(scope="module")
def base(echo: Running) -> str:
    return echo.health.removesuffix("/health")


@pytest.fixture(scope="module")
def document(base: str) -> dict[str, Any]:
    made: dict[str, Any] = httpx.get(f"{base}/openapi.json", timeout=60, trust_env=False).json()
    return made


def test_every_route_is_in_it(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    assert set(FIXED) <= set(document["paths"])
    operations = [op for methods in document["paths"].values() for op in methods.values()]
    assert len({op["operationId"] for op in operations}) == len(operations)


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            found.extend(v for k, v in value.items() if k == "$ref")
            for entry in value.values():
                walk(entry)
        elif isinstance(value, list):
            for entry in value:
                walk(entry)

    walk(document)
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert found and set(found) <= schemas


def test_keys_are_asked_for_as_the_door_does() -> None:
    made = openapi.document(
        [Route("GET", "/a", nothing, "open"), Route("POST", "/b/*", nothing, "admin")]
    )
    assert made["paths"]["/a"]["get"]["security"] == []
    guarded = made["paths"]["/b/{name}"]["post"]
    assert guarded["security"] and guarded["parameters"][0]["in"] == "path"


def test_bounds_are_those_of_the_wire(document: dict[str, Any]) -> None:
    asked = document["components"]["schemas"]["ChatRequest"]
    assert asked["additionalProperties"] is False and asked["required"] == ["messages"]
    choices = asked["properties"]["n"]["anyOf"][0]
    assert (choices["minimum"], choices["maximum"]) == (1, 8)


def cases(operation: Any, examples: int, negative: bool) -> list[Any]:
    """Requests for one operation, the same in every run."""
    mode = schemathesis.GenerationMode("negative" if negative else "positive")
    made: list[Any] = []

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        made.append(case)

    collect()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("negative", [False, True])
def test_what_it_says_is_what_is_served(base: str, document: Any, negative: bool) -> None:
    schema = schemathesis.openapi.from_dict(document)
    checks = schemathesis.checks
    judged = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    tried: Counter[tuple[str, int]] = Counter()
    with requests.Session() as session:
        session.trust_env = False
        for result in schema.get_all_operations():
            operation = result.ok()
            if negative and not operation.body:
                continue
            for i, case in enumerate(cases(operation, 20 if operation.body else 2, negative)):
                if not negative and operation.path in ASKED and i % 2:
                    plainer(case.body)
                answer = case.call(base_url=base, session=session)
                case.validate_response(answer, checks=judged)
                tried[operation.path, answer.status_code] += 1
    for path in ASKED:
        assert tried[path, 400] >= 5
        assert negative or tried[path, 200] >= 2, tried
    assert {status for _, status in tried} <= {200, 400, 404}
