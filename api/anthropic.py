"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

Requests become `messages.Generate`, the engine's messages blocks of content; calls of tools are
found in the text by api/tool_calls.py. The run and a client that leaves are api/openai_run.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from spec_serve.api import anthropic_wire as w
from spec_serve.api import messages as m
from spec_serve.api.anthropic_convert import FORM, counted, generate, named, restated
from spec_serve.api.calls import Call, HttpError, Route
from spec_serve.api.generation import Numbered, failure
from spec_serve.api.openai_forms import told
from spec_serve.api.openai_run import Run
from spec_serve.api.service import Service
from spec_serve.api.tool_calls import Piece, TextPiece, ToolParser
from spec_serve.api.tool_constraint import reader
from spec_serve.spec.request import RequestError

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"

_encode = msgspec.json.Encoder().encode


def routes(service: Service) -> list[Route]:
    """Messages, and how long they would be."""

    async def handle(call: Call) -> None:
        request = await call.json(w.Request)
        wire = generate(request)
        formed = FORM if request.output_config is not None else ""
        async with Run(service, call, "msg", lambda error: named(error, formed)) as run:
            await run.start([wire])
            answer = _Answer(service, run, request, wire)
            if request.stream:
                await _send(call, run, answer)
                return
            async for messages in run.messages():
                for message in messages:
                    answer.keep(message)
            await call.say(answer.whole(), headers=_id(call))

    async def count(call: Call) -> None:
        wire = counted(await call.json(w.Counted))
        try:
            made = await service.prepare(wire, principal=call.principal)
        except RequestError as error:
            raise named(failure(error, wire=wire)) from None
        await call.say({"input_tokens": len(made.request.prompt)}, headers=_id(call))

    return [
        Route("POST", PATH, handle, error=restated),
        Route("POST", COUNT_PATH, count, error=restated),
    ]


def _id(call: Call) -> list[tuple[bytes, bytes]]:
    return [(b"request-id", call.id.encode())]


def _event(value: Any) -> bytes:
    kind: str = type(value).__struct_config__.tag
    return b"event: " + kind.encode() + b"\ndata: " + _encode(value) + b"\n\n"


async def _send(call: Call, run: Run, answer: _Answer) -> None:
    try:
        async for messages in run.messages():
            made = b"".join(_event(e) for message in messages for e in answer.events(message))
            if not call.started:
                await call.stream(headers=_id(call))
            elif not messages:  # long silence
                made = _event(w.Ping())
            if made:
                await call.chunk(made)
    except HttpError as error:
        if not call.started:
            raise
        await call.chunk(b"event: error\ndata: " + _encode(restated(error).body()) + b"\n\n")
    await call.end()


class _Answer:
    """One message: blocks of text and calls, in the order the model wrote them."""

    def __init__(self, service: Service, run: Run, request: w.Request, wire: m.Generate) -> None:
        self._id = run.id
        self._model = wire.model or service.model
        self._parser: ToolParser | None = reader(wire, service.tokenizer.chat_template)
        choice = request.tool_choice
        self._single = choice is not None and choice.disable_parallel_tool_use is True
        self._index = -1  # of the open block
        self._open: str = ""  # "text", a call's id, or nothing
        self._pieces: list[Piece] = []
        self._finished: m.Finished | None = None

    # ---- streamed

    def events(self, message: Numbered) -> Iterator[w.Event]:
        """The events a message becomes."""
        if type(message) is m.Delta:
            for piece in self._read(message.text):
                yield from self._block(piece)
        elif type(message) is m.Started:
            cached = message.cached_tokens
            usage = w.Usage(message.prompt_tokens - cached, 0, cached)
            yield w.Start(w.Message(self._id, self._model, [], usage))
            yield w.Ping()
        elif type(message) is m.Finished:
            for piece in self._rest():
                yield from self._block(piece)
            yield from self._close()
            yield w.Delta(self._ending(message), _usage(message))
            yield w.Stop()

    def _read(self, text: str) -> list[Piece]:
        if self._parser is not None:
            return self._kept(self._parser.push(text))
        return [TextPiece(text)] if text else []

    def _rest(self) -> list[Piece]:
        return self._kept(self._parser.finish()) if self._parser is not None else []

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        """Without calls after the first, where only one is wanted."""
        if not self._single:
            return pieces
        return [piece for piece in pieces if isinstance(piece, TextPiece) or not piece.index]

    def _block(self, piece: Piece) -> Iterator[w.Event]:
        if isinstance(piece, TextPiece):
            if self._open != "text":
                yield from self._close()
                yield from self._begin("text", w.TextBlock(""))
            yield w.BlockDelta(self._index, w.TextDelta(piece.text))
            return
        if piece.name is not None:
            yield from self._close()
            yield from self._begin(piece.id, w.ToolUseBlock(piece.id, piece.name, {}))
        if piece.arguments:
            yield w.BlockDelta(self._index, w.InputDelta(piece.arguments))

    def _begin(self, kind: str, block: w.TextBlock | w.ToolUseBlock) -> Iterator[w.Event]:
        self._open = kind
        self._index += 1
        yield w.BlockStart(self._index, block)

    def _close(self) -> Iterator[w.Event]:
        if self._open:
            self._open = ""
            yield w.BlockStop(self._index)

    def _ending(self, finished: m.Finished) -> w.Ending:
        reason, matched = self._reason(finished), None
        if reason == "stop_sequence" and isinstance(finished.matched, str):
            matched = finished.matched
        return w.Ending(reason, matched, told(finished) or UNSET)

    def _reason(self, finished: m.Finished) -> w.StopReason:
        if finished.reason == "length":
            return "max_tokens"
        if self._parser is not None and self._parser.called:
            return "tool_use"
        return "stop_sequence" if isinstance(finished.matched, str) else "end_turn"

    # ---- whole

    def keep(self, message: Numbered) -> None:
        """Remember what a message says."""
        if type(message) is m.Delta:
            self._pieces += self._read(message.text)
        elif type(message) is m.Finished:
            self._pieces += self._rest()
            self._finished = message

    def whole(self) -> w.Message:
        """The message, once it is over."""
        finished = self._finished
        assert finished is not None
        texts: list[tuple[str, str | None, list[str]]] = []  # (id of a call or "", name, parts)
        for piece in self._pieces:
            if isinstance(piece, TextPiece):
                if not texts or texts[-1][0]:
                    texts.append(("", None, []))
                texts[-1][2].append(piece.text)
            else:
                if piece.name is not None:
                    texts.append((piece.id, piece.name, []))
                texts[-1][2].append(piece.arguments)
        ending = self._ending(finished)
        return w.Message(
            self._id,
            self._model,
            [_made(call, name, "".join(parts)) for call, name, parts in texts],
            _usage(finished),
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            constraint=ending.constraint,
        )


def _made(call: str, name: str | None, text: str) -> w.TextBlock | w.ToolUseBlock:
    if name is None:
        return w.TextBlock(text)
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):  # cut short: there is no other way to say so
        found = {}
    return w.ToolUseBlock(call, name, found if isinstance(found, dict) else {})


def _usage(finished: m.Finished) -> w.Usage:
    usage = finished.usage
    cached = usage.cached_tokens
    return w.Usage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
