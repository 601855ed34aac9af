"""What a generation gives its caller: typed events, a whole answer gathered from them, and errors.

The same for every transport. Knows messages and no sockets; imports no torch and no gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from spec_serve.api import messages as m

GenerationEvent = m.Started | m.Delta | m.PromptLogprobs | m.Finished
Messages = str | list[dict[str, Any]]


class ServerError(RuntimeError):
    """The server refused a request or lost it; see `code` and `param` (the field).

    retryable, retry_after_ms: whether and when to come back.
    """

    def __init__(self, error: m.Error) -> None:
        super().__init__(error.message)
        self.code, self.param, self.retryable = error.code, error.param, error.retryable
        self.retry_after_ms = error.retry_after_ms


class ConnectionLost(ConnectionError):
    """The connection ended while it was needed; `code` is a WebSocket's close code, if any."""

    def __init__(self, code: int | None, said: str = "") -> None:
        super().__init__(said or f"the connection closed (code {code})")
        self.code = code


@dataclass(slots=True)
class Choice:
    """One choice of an answer, complete once `usage` is there."""

    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[m.Logprob] = field(default_factory=list)
    steps: list[m.Step] = field(default_factory=list)
    reason: m.Reason = "stop"
    matched: int | str | None = None
    usage: m.Usage | None = None
    timings: m.Timings | None = None
    speculation: m.Summary | None = None
    constraint: m.Constrained | None = None


@dataclass(slots=True)
class Answer:
    """Everything one generation said. text, ids, ...: of the first choice."""

    started: m.Started | None = None
    prompt_logprobs: list[m.Logprob] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    def add(self, event: GenerationEvent) -> None:
        """Take in the next event."""
        if isinstance(event, m.Started):
            self.started = event
        elif isinstance(event, m.PromptLogprobs):
            self.prompt_logprobs += event.logprobs
        else:
            choice = self._choice(event.index)
            if isinstance(event, m.Delta):
                choice.text += event.text
                choice.ids += event.ids
                choice.logprobs += event.logprobs
                choice.steps += event.steps
            else:
                choice.reason, choice.matched = event.reason, event.matched
                choice.usage, choice.timings = event.usage, event.timings
                choice.speculation = event.speculation
                choice.constraint = event.constraint

    def _choice(self, index: int) -> Choice:
        while len(self.choices) <= index:
            self.choices.append(Choice(len(self.choices)))
        return self.choices[index]

    @property
    def text(self) -> str:
        return self._choice(0).text

    @property
    def ids(self) -> list[int]:
        return self._choice(0).ids

    @property
    def reason(self) -> m.Reason:
        return self._choice(0).reason

    @property
    def usage(self) -> m.Usage | None:
        return self._choice(0).usage

    @property
    def timings(self) -> m.Timings | None:
        return self._choice(0).timings

    @property
    def speculation(self) -> m.Summary | None:
        return self._choice(0).speculation

    @property
    def constraint(self) -> m.Constrained | None:
        return self._choice(0).constraint


def gathered(events: Iterable[GenerationEvent]) -> Answer:
    """The whole answer."""
    answer = Answer()
    for event in events:
        answer.add(event)
    return answer


async def gathered_from(events: AsyncIterator[GenerationEvent]) -> Answer:
    """The whole answer."""
    answer = Answer()
    async for event in events:
        answer.add(event)
    return answer


def request(
    gen: str,
    prompt: str | None,
    messages: Messages | None,
    token_ids: list[int] | None,
    options: dict[str, Any],
) -> m.Generate:
    """The request, bounds checked. messages: a list, or the text of one message of a user.

    Raises BadMessage.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    inputs = {"prompt": prompt, "messages": messages, "token_ids": token_ids}
    given = {name: value for name, value in inputs.items() if value is not None}
    return m.generate({"gen": gen, **given, **options})
