"""GET /openapi.json: what HTTP offers, as an OpenAPI 3.1 document made from the routes themselves.

Every route of the server is in it; those of DESCRIBED with the schemas of what is sent and
answered, taken from the structs that decode and encode it. Knows routes and structs, no service.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from spec_serve.api import anthropic_wire, openai_wire, program_routes
from spec_serve.api.calls import JSON_TYPE, Call, Route
from spec_serve.api.version import __version__

PATH = "/openapi.json"
SSE = "text/event-stream"
_NAME = re.compile(r"[^A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class Described:
    """A route in words. body, answer: structs, or None for what has no schema of its own.

    chunk: of the events where the body says stream. kind: media type of an answer without schema.
    """

    summary: str
    body: type | None = None
    answer: type | None = None
    chunk: type | None = None
    kind: str = JSON_TYPE


_OPS = "Numbers about the server"
DESCRIBED: dict[tuple[str, str], Described] = {
    ("POST", "/v1/chat/completions"): Described(
        "The next turn of a conversation",
        openai_wire.ChatRequest,
        openai_wire.ChatCompletion,
        openai_wire.ChatChunk,
    ),
    ("POST", "/v1/completions"): Described(
        "How a text goes on",
        openai_wire.CompletionRequest,
        openai_wire.TextCompletion,
        openai_wire.TextCompletion,
    ),
    ("GET", "/v1/models"): Described("The models served", answer=openai_wire.ModelList),
    ("GET", "/v1/models/*"): Described("One of them", answer=openai_wire.Model),
    ("POST", "/v1/embeddings"): Described("Not served: always 404"),
    ("POST", "/v1/responses"): Described("Not served: always 404"),
    ("POST", "/v1/messages"): Described(
        "The next turn, in Anthropic's words", anthropic_wire.Request, anthropic_wire.Message
    ),
    ("POST", "/v1/messages/count_tokens"): Described(
        "How many tokens a conversation has", anthropic_wire.Counted
    ),
    ("GET", "/v1/programs"): Described(
        "The programs the operator registered", answer=program_routes.ProgramList
    ),
    ("POST", "/v1/programs"): Described(
        "Run one of them",
        program_routes.ProgramRequest,
        program_routes.ProgramAnswer,
        program_routes.ProgramEvent,
    ),
    ("GET", "/"): Described("The chat page", kind="text/html"),
    ("GET", "/health"): Described("Whether the engine lives; 503 if not"),
    ("GET", "/ready"): Described("Whether requests are taken; 503 if not"),
    ("GET", "/version"): Described("The server's version"),
    ("GET", "/metrics"): Described(f"{_OPS}, for Prometheus", kind="text/plain"),
    ("GET", PATH): Described("This document"),
}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The document for these routes."""
    known = [DESCRIBED.get((route.method, route.path)) for route in routes]
    structs = {
        struct
        for described in known
        if described is not None
        for struct in (described.body, described.answer, described.chunk)
        if struct is not None
    }
    structs |= {openai_wire.ErrorAnswer}
    ordered = sorted(structs, key=lambda struct: (struct.__module__, struct.__name__))
    template = "#/components/schemas/{name}"
    made, components = msgspec.json.schema_components(ordered, ref_template=template)
    schemas = dict(zip(ordered, made, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace("*", "{name}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "spec-serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(route: Route, path: str, schemas: dict[type, Any]) -> dict[str, Any]:
    described = DESCRIBED.get((route.method, route.path), Described(_OPS))
    kind = described.kind
    answer = schemas[described.answer] if described.answer is not None else {}
    if described.answer is None and kind == JSON_TYPE:
        answer = {"type": "object"}
    content: dict[str, Any] = {kind: {"schema": answer}}
    if route.path.endswith("*") and described.answer is None:
        content = {"*/*": {}}
    if described.chunk is not None:
        told = {"anyOf": [schemas[described.chunk], schemas[openai_wire.ErrorAnswer]]}
        data = {"type": "string", "contentMediaType": JSON_TYPE, "contentSchema": told}
        event = {"type": "object", "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}}}
        content[SSE] = {"schema": event}
    elif route.method == "POST" and described.answer is not None:
        content[SSE] = {"schema": {"type": "object"}}
    # Anthropic's routes tell failures in a shape of their own.
    failure = {} if route.error is not None else schemas[openai_wire.ErrorAnswer]
    if route.path in ("/health", "/ready"):
        failure = {"type": "object"}
    made: dict[str, Any] = {
        "operationId": _NAME.sub("_", f"{route.method.lower()}{path}").strip("_"),
        "summary": described.summary,
        "responses": {
            "200": {"description": "As asked", "content": content},
            "default": {"description": "Refused", "content": {JSON_TYPE: {"schema": failure}}},
        },
        "security": [] if route.access == "open" else [{"bearer": []}, {"key": []}],
    }
    if route.access == "admin":
        made["description"] = "Needs an admin key."
    if route.path.endswith("*"):
        made["parameters"] = [
            {
                "name": "name", "in": "path", "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
        ]  # fmt: skip
    if described.body is not None:
        made["requestBody"] = {
            "required": True,
            "content": {JSON_TYPE: {"schema": schemas[described.body]}},
        }
    return made


def routes(every: Callable[[], list[Route]]) -> list[Route]:
    """The one route. every: all routes of the server, asked for at the first call."""

    @cache
    def body() -> bytes:
        return msgspec.json.encode(document(every()))

    async def handle(call: Call) -> None:
        await call.answer(200, body())

    return [Route("GET", PATH, handle)]
