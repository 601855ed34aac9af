"""GET /v1/models, and clear refusals of what this server has not: embeddings, responses.

Knows names of models and no more of them.
"""

from __future__ import annotations

import time

from spec_serve.api import openai_wire as w
from spec_serve.api.calls import Call, Handler, HttpError, Route
from spec_serve.api.service import Service

MODELS, MODEL = "/v1/models", "/v1/models/*"
ABSENT = {
    "/v1/embeddings": "embeddings; it serves /v1/chat/completions and /v1/completions",
    "/v1/responses": "the Responses API; use /v1/chat/completions",
}


def routes(service: Service) -> list[Route]:
    """The list, one model, and what is not there."""
    started = int(time.time())

    def model(name: str) -> w.Model:
        return w.Model(name, started, "spec-serve", service.link.info.max_context, "model")

    async def listed(call: Call) -> None:
        await call.say(w.ModelList("list", [model(name) for name in service.models]))

    async def one(call: Call) -> None:
        name = call.path.removeprefix(MODEL[:-1])
        if name not in service.models:
            raise HttpError("model_not_found", f"{name[:200]!r} is not served here", "model")
        await call.say(model(name))

    return [
        Route("GET", MODELS, listed),
        Route("GET", MODEL, one),
        *(Route("POST", path, _refusal(what)) for path, what in ABSENT.items()),
    ]


def _refusal(what: str) -> Handler:
    async def refuse(call: Call) -> None:
        raise HttpError("not_found", f"this server has not {what}")

    return refuse
