"""What runs a program's requests: a server, through the WebSocket client.

One socket carries all states of all runs that share a backend; no more generations are asked for at
once than the server allows. Knows nothing of states.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

from spec_serve.api import messages as m
from spec_serve.client import Client
from spec_serve.client.answers import GenerationEvent
from spec_serve.lang.conversation import Question

QUESTIONS = 64  # at once; a server reads so many texts of one socket, and more


class Backend(Protocol):
    """Tokens for programs. All three raise what the client raises.

    One that gains nothing by being asked ahead says so: `prepares = False`. One that takes
    `segments` (messages.Generate) says so, too: `fuses = True`.
    """

    async def pieces(self, question: Question) -> list[list[int]]:
        """Ids around the places of generated tokens."""
        ...

    def generate(
        self, token_ids: list[int], options: dict[str, Any]
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Events of a generation behind these ids."""
        ...

    async def score(
        self, token_ids: list[int], continuations: list[list[int]]
    ) -> list[list[float]]:
        """Log-probabilities of the tokens of each continuation behind these ids."""
        ...


class ClientBackend:
    """A connected client, which stays its owner's."""

    def __init__(self, client: Client) -> None:
        self._client = client
        assert client.hello is not None, "the client is not connected"
        self._room = asyncio.Semaphore(client.hello.max_generations)
        self._reading = asyncio.Semaphore(QUESTIONS)
        # Runs graphs beside the engine, where the server does that.
        self.programs = client.programs if client.hello.programs else None
        self.fuses = client.hello.programs  # those servers do

    async def pieces(self, question: Question) -> list[list[int]]:
        """One round trip."""
        async with self._reading:
            return await self._client.tokenize(
                text=question.text, turns=question.turns, begun=question.begun
            )

    async def generate(
        self, token_ids: list[int], options: dict[str, Any]
    ) -> AsyncGenerator[GenerationEvent, None]:
        """One generation, once there is room for it."""
        async with self._room:
            events = self._client.generate(token_ids=token_ids, **{"ids": True, **options})
            async with aclosing(events):
                async for event in events:
                    yield event

    async def score(
        self, token_ids: list[int], continuations: list[list[int]]
    ) -> list[list[float]]:
        """One request, one pass over a tree of all of them; its token nobody wants."""
        options = {
            "continuations": continuations, "max_tokens": 1, "steps": "none", "ids": False,
            "speculation": {"mode": "off"},
        }  # fmt: skip
        found: list[float] = []
        async with aclosing(self.generate(token_ids, options)) as events:
            async for event in events:
                if isinstance(event, m.PromptLogprobs):
                    found += [one.logprob for one in event.logprobs]
        scores, at = [], 0
        for continuation in continuations:
            scores.append(found[at : at + len(continuation)])
            at += len(continuation)
        return scores


@asynccontextmanager
async def connected(on: str | Client | Backend, **options: Any) -> AsyncIterator[Backend]:
    """A backend for the time of the block. on: an address, a connected client, or a backend.

    options: of `Client`, for an address.
    """
    if isinstance(on, str):
        async with Client(on, **options) as client:
            yield ClientBackend(client)
    elif isinstance(on, Client):
        yield _shared(on)
    else:
        yield on


def _shared(client: Client) -> ClientBackend:
    """One backend per client, so that all its runs together keep to what a socket may carry."""
    made = getattr(client, _ATTRIBUTE, None)
    if not isinstance(made, ClientBackend):
        made = ClientBackend(client)
        with contextlib.suppress(AttributeError):
            setattr(client, _ATTRIBUTE, made)
    return made


_ATTRIBUTE = "_programs"
