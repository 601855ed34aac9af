"""POST /v1/chat/completions: a step's message becomes a chunk, or a piece of the whole answer.

The request is read by api/openai_convert.py, tool calls are found in the text by api/tool_calls.py.
Knows the shape of chat answers; the run and its failures are in api/openai_run.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET, UnsetType

from spec_serve.api import messages as m
from spec_serve.api import openai_logprobs as scores
from spec_serve.api import openai_wire as w
from spec_serve.api.calls import Call, Route
from spec_serve.api.generation import Numbered
from spec_serve.api.openai_convert import Asked, chat
from spec_serve.api.openai_forms import told
from spec_serve.api.openai_run import Run
from spec_serve.api.openai_stream import head, matched, reason, send
from spec_serve.api.openai_usage import Clock, Totals
from spec_serve.api.service import Service
from spec_serve.api.tool_calls import Piece, TextPiece, ToolParser
from spec_serve.api.tool_constraint import reader

PATH = "/v1/chat/completions"


def routes(service: Service) -> list[Route]:
    """The one route."""

    async def handle(call: Call) -> None:
        asked = chat(await call.json(w.ChatRequest))
        async with Run(service, call, "chatcmpl", asked.error) as run:
            await run.start(asked.wires)
            answer = _Answer(service, run, asked)
            if asked.stream:
                await send(call, run, answer.chunks, answer.last)
                return
            async for messages in run.messages():
                for message in messages:
                    answer.keep(message)
            await call.say(answer.whole())

    return [Route("POST", PATH, handle)]


class _Choice:
    """One of n: what was said, and the calls found in it. parser: None where none may be made."""

    __slots__ = (
        "clock", "finished", "ids", "logprobs", "parallel", "parser", "parts", "said_role",
    )  # fmt: skip

    def __init__(self, parser: ToolParser | None, parallel: bool) -> None:
        self.parser, self.parallel = parser, parallel
        self.said_role = False
        self.finished: m.Finished | None = None
        self.parts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[m.Logprob] = []
        self.clock = Clock()

    def read(self, text: str) -> tuple[str, list[w.ToolCall]]:
        """What can be told of the new text."""
        return self._told(self.parser.push(text)) if self.parser is not None else (text, [])

    def rest(self) -> tuple[str, list[w.ToolCall]]:
        """What was held back."""
        return self._told(self.parser.finish()) if self.parser is not None else ("", [])

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return self.parser is not None and self.parser.called > 0

    def _told(self, pieces: list[Piece]) -> tuple[str, list[w.ToolCall]]:
        texts: list[str] = []
        calls: list[w.ToolCall] = []
        for piece in pieces:
            if isinstance(piece, TextPiece):
                texts.append(piece.text)
            elif piece.name is not None and (self.parallel or not piece.index):
                function = w.CallFunction(piece.arguments, piece.name)
                calls.append(w.ToolCall(function, piece.index, piece.id, "function"))
            elif piece.name is None and (self.parallel or not piece.index):
                if calls and calls[-1].index == piece.index:
                    calls[-1].function.arguments += piece.arguments
                else:
                    calls.append(w.ToolCall(w.CallFunction(piece.arguments), piece.index))
        return "".join(texts), calls


class _Answer:
    """All choices of a request."""

    def __init__(self, service: Service, run: Run, asked: Asked) -> None:
        self._asked = asked
        self._head = head(service, run, asked)
        self._bytes = service.tokenizer.token_bytes
        self._prompt = run.prepared[0].request.prompt
        (self._wire,) = asked.wires
        template = service.tokenizer.chat_template
        self._choices = [
            _Choice(reader(self._wire, template), asked.parallel) for _ in range(asked.n)
        ]
        self._totals = Totals()
        self._left = asked.n
        self._first = True
        self._scored: list[m.Logprob] = []

    # ---- streamed

    def chunks(self, message: Numbered) -> Iterator[w.ChatChunk]:
        """The chunks a message becomes."""
        if type(message) is m.Delta:
            choice = self._choices[message.index]
            text, calls = choice.read(message.text)
            yield from self._chunk(message, choice, text, calls)
        elif type(message) is m.Finished:
            choice = self._choices[message.index]
            text, calls = choice.rest()
            if text or calls:
                yield self._piece(message.index, choice, text, calls)
            yield self._ending(message, choice)
        elif type(message) is m.Started:
            for choice in self._choices:
                choice.clock.start(message)

    def _chunk(
        self, delta: m.Delta, choice: _Choice, text: str, calls: list[w.ToolCall]
    ) -> Iterator[w.ChatChunk]:
        asked = self._asked
        if not (text or calls or delta.logprobs or delta.ids):
            return
        chunk = self._piece(delta.index, choice, text, calls)
        if asked.logprobs:
            chunk.choices[0].logprobs = scores.chat(delta.logprobs, self._bytes)
        if asked.token_ids:
            chunk.choices[0].token_ids = delta.ids
        if asked.timings:
            chunk.timings = choice.clock.step(len(delta.ids))
        yield chunk

    def _piece(
        self, index: int, choice: _Choice, text: str, calls: list[w.ToolCall]
    ) -> w.ChatChunk:
        delta = w.ChatDelta()
        if not choice.said_role:
            choice.said_role = True
            delta.role = "assistant"
            delta.content = None if calls and not text else text
        elif text:
            delta.content = text
        if calls:
            delta.tool_calls = calls
        return self._made(w.ChunkChoice(index, delta, None))

    def _made(self, choice: w.ChunkChoice) -> w.ChatChunk:
        made = w.ChatChunk(object="chat.completion.chunk", choices=[choice], **self._head)
        if self._asked.usage_chunk:
            made.usage = None
        if self._asked.token_ids and self._first:
            made.prompt_token_ids = self._prompt
        self._first = False
        return made

    def _ending(self, finished: m.Finished, choice: _Choice) -> w.ChatChunk:
        self._totals.add(finished)
        self._left -= 1
        delta = w.ChatDelta()
        if not choice.said_role:
            choice.said_role = True
            delta.role, delta.content = "assistant", ""
        made = self._made(
            w.ChunkChoice(
                finished.index,
                delta,
                reason(finished, choice.called),
                stop_reason=matched(finished, self._wire),
                constraint=told(finished),
            )
        )
        if not self._left and not self._asked.usage_chunk:
            made.timings = self._totals.timings()
        return made

    def last(self) -> w.ChatChunk | None:
        """The chunk with usage, for who asked."""
        if not self._asked.usage_chunk:
            return None
        return w.ChatChunk(
            object="chat.completion.chunk",
            choices=[],
            usage=self._totals.usage(),
            timings=self._totals.timings(),
            metrics=self._totals.metrics(),
            **self._head,
        )

    # ---- whole

    def keep(self, message: Numbered) -> None:
        """Remember what a message says."""
        if type(message) is m.Delta:
            choice = self._choices[message.index]
            choice.parts.append(message.text)
            choice.ids += message.ids
            choice.logprobs += message.logprobs
        elif type(message) is m.Finished:
            self._choices[message.index].finished = message
            self._totals.add(message)
        elif type(message) is m.PromptLogprobs:
            self._scored = message.logprobs

    def whole(self) -> w.ChatCompletion:
        """The answer, once all choices are over."""
        made = w.ChatCompletion(
            object="chat.completion",
            choices=[self._choice(i, choice) for i, choice in enumerate(self._choices)],
            usage=self._totals.usage(),
            timings=self._totals.timings(),
            metrics=self._totals.metrics(),
            **self._head,
        )
        if self._asked.token_ids:
            made.prompt_token_ids = self._prompt
        if self._asked.prompt_logprobs:
            made.prompt_logprobs = scores.prompt(self._scored, self._bytes)
        return made

    def _choice(self, index: int, choice: _Choice) -> w.ChatChoice:
        finished = choice.finished
        assert finished is not None
        text, calls = choice.read("".join(choice.parts))
        rest, more = choice.rest()
        text, calls = text + rest, _whole_calls(calls + more)
        message = w.Message(None if calls and not text else text, "assistant", None)
        if calls:
            message.tool_calls = calls
        logprobs = scores.chat(choice.logprobs, self._bytes) if self._asked.logprobs else None
        ids: list[int] | UnsetType = choice.ids if self._asked.token_ids else UNSET
        return w.ChatChoice(
            index,
            message,
            reason(finished, choice.called),
            logprobs,
            matched(finished, self._wire),
            ids,
            told(finished),
        )


def _whole_calls(pieces: list[w.ToolCall]) -> list[w.ToolCall]:
    """Pieces of calls joined; whole answers number none."""
    made: dict[Any, w.ToolCall] = {}
    for piece in pieces:
        held = made.get(piece.index)
        if held is None:
            made[piece.index] = held = w.ToolCall(
                w.CallFunction("", piece.function.name), UNSET, piece.id, piece.type
            )
        held.function.arguments += piece.function.arguments
    return list(made.values())
