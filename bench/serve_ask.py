"""One question asked over HTTP, a WebSocket or gRPC, and when what of its answer came.

An `Asker` is a transport's side of a load test; all give the same `Outcome`. Knows neither load nor
reports.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Protocol

from spec_serve.api import messages as m
from spec_serve.bench.http_client import HttpClient
from spec_serve.bench.serve_data import Question
from spec_serve.client import Client, ConnectionLost, ServerError, Tls
from spec_serve.client.rpc import GrpcClient

GONE = "connection_lost"
REFUSED = ("overloaded", "draining", "rate_limited")


class Unreachable(RuntimeError):
    """Nobody answers, or not as a server of this kind would; the message says what was tried."""


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times: seconds since the load began, -1 = never.

    due: when it was to be sent. arrivals: (time, tokens) of every chunk with tokens. code: "" where
    it was answered, else the error's. left: given up by us. steps, drafted, accepted: as told.
    """

    number: int
    category: str
    due: float = 0.0
    sent: float = 0.0
    ended: float = -1.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    code: str = ""
    said: str = ""
    left: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    digest: int = 0

    def came(self, at: float, tokens: int, ids: Sequence[int] = ()) -> None:
        """A chunk of an answer; ids: of its tokens, where they are told."""
        self.arrivals.append((at, tokens))
        self.tokens += tokens
        for token in ids:
            self.digest = zlib.crc32(token.to_bytes(4, "little"), self.digest)

    @property
    def first(self) -> float:
        """When the first token came."""
        return self.arrivals[0][0] if self.arrivals else -1.0

    @property
    def fine(self) -> bool:
        """Answered to its end."""
        return not self.code and not self.left and self.ended >= 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What every question asks for besides its text. plain: over HTTP nothing beyond OpenAI's."""

    max_tokens: int = 128
    temperature: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    speculation: str = "auto"
    model: str = ""
    timeout_s: float = 300.0
    plain: bool = False


class Clock:
    """Seconds since the load began."""

    def __init__(self) -> None:
        self._begun = perf_counter()

    def __call__(self) -> float:
        return perf_counter() - self._begun


class Asker(Protocol):
    """A transport's side."""

    async def open(self) -> None:
        """Make sure that somebody is there. Raises Unreachable."""
        ...

    async def ask(self, question: Question, outcome: Outcome, clock: Clock, leave: int) -> None:
        """Ask, and note in `outcome` what comes; leave > 0: go after so many chunks."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


async def asked(
    asker: Asker, question: Question, outcome: Outcome, clock: Clock, wanted: Wanted, leave: int = 0
) -> Outcome:
    """Ask, whatever happens; errors are noted."""
    outcome.sent = clock()
    outcome.due = min(outcome.due, outcome.sent)  # timers have whole milliseconds
    try:
        async with asyncio.timeout(wanted.timeout_s):
            await asker.ask(question, outcome, clock, leave)
    except ServerError as error:
        outcome.code, outcome.said = error.code, str(error)
    except m.BadMessage as error:
        outcome.code, outcome.said = "invalid_request", str(error)
    except TimeoutError:
        outcome.code, outcome.said = "no_answer", f"not over after {wanted.timeout_s:g} s"
    except OSError as error:  # ConnectionLost too
        outcome.code, outcome.said = GONE, str(error) or type(error).__name__
    outcome.ended = clock()
    return outcome


def _fields(question: Question, wanted: Wanted) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": wanted.temperature, "seed": wanted.seed}
    fields: dict[str, Any] = {
        "max_tokens": question.max_tokens or wanted.max_tokens,
        "ignore_eos": wanted.ignore_eos,
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "speculation": {"mode": wanted.speculation},
        "model": wanted.model,
        "ids": True,
        "steps": "summary",
    }
    if question.messages:
        fields["messages"] = list(question.messages)
    else:
        fields["prompt"] = question.prompt
    return fields


async def _note(
    events: AsyncGenerator[Any, None], outcome: Outcome, clock: Clock, leave: int
) -> None:
    async with aclosing(events) as held:
        async for event in held:
            if isinstance(event, m.Delta):
                if event.ids:
                    outcome.came(clock(), len(event.ids), event.ids)
                    if leave and len(outcome.arrivals) >= leave:
                        outcome.left = True
                        return
            elif isinstance(event, m.Started):
                outcome.prompt_tokens = event.prompt_tokens
                outcome.cached_tokens = event.cached_tokens
            elif isinstance(event, m.Finished) and event.speculation is not None:
                outcome.steps += event.speculation.steps
                outcome.drafted += event.speculation.drafted
                outcome.accepted += event.speculation.accepted


class SocketAsker:
    """WebSockets, `per_socket` generations on each at most; more are opened as they are needed."""

    def __init__(
        self, url: str, wanted: Wanted, per_socket: int, api_key: str | None, tls: Tls | None
    ) -> None:
        self._url, self._wanted, self._per_socket = url, wanted, per_socket
        self._api_key, self._tls = api_key, tls
        self._free: dict[Client, int] = {}

    async def open(self) -> None:
        """One connection. Raises Unreachable."""
        try:
            client = await self._connect()
        except (ServerError, OSError, TimeoutError) as error:
            raise Unreachable(f"{self._url}: {_why(error)}") from error
        self._free[client] = self._room(client)

    def _room(self, client: Client) -> int:
        assert client.hello is not None
        return min(self._per_socket, client.hello.max_generations)

    async def _connect(self) -> Client:
        made = Client(self._url, m.MSGPACK, api_key=self._api_key, tls=self._tls)
        return await made.__aenter__()

    async def ask(self, question: Question, outcome: Outcome, clock: Clock, leave: int) -> None:
        """One generation."""
        client = next((held for held, free in self._free.items() if free), None)
        if client is None:
            client = await self._connect()
            self._free[client] = self._room(client)
        self._free[client] -= 1
        try:
            events = client.generate(**_fields(question, self._wanted))
            await _note(events, outcome, clock, leave)
        except ConnectionLost:
            self._free.pop(client, None)
            await client.close()
            raise
        finally:
            if client in self._free:
                self._free[client] += 1

    async def close(self) -> None:
        """Close all."""
        clients, self._free = list(self._free), {}
        await asyncio.gather(*(client.close() for client in clients))


class GrpcAsker:
    """gRPC, all calls over `channels` channels."""

    def __init__(
        self, url: str, wanted: Wanted, channels: int, api_key: str | None, tls: Tls | None
    ) -> None:
        self._url, self._wanted = url, wanted
        self._clients = [GrpcClient(url, api_key=api_key, tls=tls) for _ in range(channels)]

    async def open(self) -> None:
        """Connect. Raises Unreachable."""
        try:
            for client in self._clients:
                await client.__aenter__()
        except (ServerError, OSError) as error:
            raise Unreachable(f"{self._url}: {_why(error)}") from error

    async def ask(self, question: Question, outcome: Outcome, clock: Clock, leave: int) -> None:
        """One call."""
        client = self._clients[outcome.number % len(self._clients)]
        events = client.generate(**_fields(question, self._wanted))
        await _note(events, outcome, clock, leave)

    async def close(self) -> None:
        """Close all."""
        for client in self._clients:
            await client.close()


class HttpAsker:
    """OpenAI's HTTP: /v1/chat/completions for messages, /v1/completions for prompts, streamed.

    tokens of a chunk: its token ids if the server gives them (return_token_ids), else one.
    """

    def __init__(
        self, url: str, wanted: Wanted, api_key: str | None, tls: ssl.SSLContext | None
    ) -> None:
        self._url, self._wanted = url, wanted
        base = url.rstrip("/").removesuffix("/v1")
        self._client = HttpClient(base, api_key=api_key, tls=tls)
        self._model = wanted.model

    async def open(self) -> None:
        """Ask which model is served. Raises Unreachable."""
        where = f"{self._url.rstrip('/').removesuffix('/v1')}/v1/models"
        try:
            async with asyncio.timeout(10), await self._client.ask("GET", "/v1/models") as answer:
                body = await answer.read()
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"{where}: {_why(error)}") from error
        if answer.status != 200:
            code, said = _error(answer.status, body)
            raise Unreachable(f"{where}: {answer.status} {code}: {said[:200]}")
        try:
            names = [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            raise Unreachable(f"{where}: this is no list of models") from None
        if not names:
            raise Unreachable(f"{where}: no model is served")
        if self._model and self._model not in names:
            raise Unreachable(f"model: {self._model!r} is not served there; {', '.join(names)} is")
        self._model = self._model or names[0]

    def _body(self, question: Question) -> tuple[str, bytes]:
        wanted = self._wanted
        body: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": question.max_tokens or wanted.max_tokens,
        }
        for name in ("temperature", "seed"):
            if (value := getattr(wanted, name)) is not None:
                body[name] = value
        if not wanted.plain:
            body["return_token_ids"] = True
            if wanted.ignore_eos:
                body["ignore_eos"] = True
            if wanted.speculation != "auto":
                body["speculation"] = {"mode": wanted.speculation}
        if question.messages:
            body["messages"] = question.messages
            return "/v1/chat/completions", json.dumps(body).encode()
        body["prompt"] = question.prompt
        return "/v1/completions", json.dumps(body).encode()

    async def ask(self, question: Question, outcome: Outcome, clock: Clock, leave: int) -> None:
        """One POST, read as server-sent events."""
        path, body = self._body(question)
        async with await self._client.ask("POST", path, body) as answer:
            if answer.status != 200:
                outcome.code, outcome.said = _error(answer.status, await answer.read())
                return
            done = False
            async with aclosing(answer.lines()) as lines:
                async for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        done = True
                        continue  # the end of the body comes next
                    self._chunk(json.loads(data), outcome, clock)
                    if outcome.code or (leave and len(outcome.arrivals) >= leave):
                        outcome.left = not outcome.code
                        return
            if not done:
                outcome.code, outcome.said = GONE, "the stream ended without [DONE]"

    def _chunk(self, chunk: Any, outcome: Outcome, clock: Clock) -> None:
        if error := chunk.get("error"):
            outcome.code = str(error.get("code") or error.get("type") or "error")
            outcome.said = str(error.get("message", ""))
            return
        for choice in chunk.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content")
            ids = choice.get("token_ids")
            if text or ids:
                outcome.came(clock(), len(ids) if ids else 1, ids or ())
        if usage := chunk.get("usage"):
            outcome.prompt_tokens = usage.get("prompt_tokens", 0)
            outcome.tokens = usage.get("completion_tokens", outcome.tokens)
            details = usage.get("prompt_tokens_details") or {}
            outcome.cached_tokens = details.get("cached_tokens") or 0
        found = (chunk.get("metrics") or {}).get("speculative_decoding")
        if found:
            outcome.steps = found.get("num_spec_steps", 0)
            outcome.drafted = found.get("num_draft_tokens", 0)
            outcome.accepted = found.get("num_accepted_draft_tokens", 0)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()


def _error(status: int, body: bytes) -> tuple[str, str]:
    """Code and message of an error in OpenAI's shape, or of any other."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error.get("type") or f"http_{status}"), error["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"http_{status}", body[:500].decode(errors="replace")


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__


def record(outcome: Outcome) -> dict[str, Any]:
    """For JSON; times in milliseconds."""
    made = asdict(outcome)
    for name in ("due", "sent", "ended"):
        made[name] = round(made[name] * 1e3, 3)
    made["arrivals"] = [(round(at * 1e3, 3), tokens) for at, tokens in outcome.arrivals]
    return made
