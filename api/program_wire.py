"""What is said about programs that run beside the engine, on the WebSocket and in a gRPC session.

A client sends a graph, or names one the operator registered; the server tells values as they are
there and has the client make the calls of its own functions. Knows no graph.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from spec_serve.api.parts import Constrained, Part

MAX_GRAPH = 1 << 20  # bytes
MAX_RUNS = 32  # at once in one session
MAX_ANSWER = 1 << 20  # characters a call may give back

Run = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.:-]+$")]


class Spoken(Part, tag_field="type"):
    """As messages.Message, which imports this."""


class RunProgram(Spoken, tag="program"):
    """Run a registered program of this name, or this graph; a `cancel` with gen = run ends it.

    graph: as Graph.save writes it. arguments: by name; of a graph, their texts. events: tell text
    as it comes. Answered by `program_call`, `program_delta` and `program_value`, in the end by
    `program_end`, or by `error` with gen = run.
    """

    run: Run
    name: Annotated[str, Meta(max_length=256)] = ""
    graph: Annotated[bytes, Meta(max_length=MAX_GRAPH)] | None = None
    arguments: dict[str, Any] = {}
    events: bool = False


class Called(Spoken, tag="called"):
    """What a call of a client's function gave, as text. error: why there is none."""

    run: Run
    number: Annotated[int, Meta(ge=0, le=2**53)]
    text: Annotated[str, Meta(max_length=MAX_ANSWER)] = ""
    error: Annotated[str, Meta(max_length=4096)] | None = None


class ProgramCall(Spoken, tag="program_call"):
    """The client is to make this call now.

    refs: for each argument the number of the value or call that it is, -1 = of none, absent where
    the graph or the run's own arguments say it.
    """

    run: str
    key: str
    number: int
    refs: list[int | None] = []


class ProgramDelta(Spoken, tag="program_delta"):
    """A piece of a variable's text. path: names of the forks on the way to its state."""

    run: str
    path: str
    var: str
    text: str
    ids: list[int] = []


class TokenLogprob(Struct, array_like=True):
    """As messages.Logprob."""

    id: int
    logprob: float
    token: str
    top: list[tuple[int, float, str]] = []


class ProgramMeta(Part):
    """About a value: fields as of spec_serve.lang's Meta."""

    reason: str = "stop"
    matched: int | str | None = None
    ids: list[int] = []
    prompt_tokens: int = 0
    cached: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    sources: dict[str, tuple[int, int]] | None = None
    logprobs: list[TokenLogprob] = []
    scores: dict[str, float] | None = None
    constraint: Constrained | None = None


class ProgramValue(Spoken, tag="program_value"):
    """A variable has its value. texts: one for each choice. number: counts values and calls."""

    run: str
    key: str
    number: int
    path: str
    var: str
    texts: list[str]
    meta: ProgramMeta


class ProgramEnd(Spoken, tag="program_end"):
    """The program is over. Text, ids and messages of its first state.

    value: what a registered program returned. named: by key, the number of the value or call that a
    key of its results has in the end; -1 = none.
    """

    run: str
    value: Any = None
    text: str = ""
    ids: list[int] = []
    messages: list[dict[str, str]] = []
    named: dict[str, int] = {}


Answers = ProgramCall | ProgramDelta | ProgramValue | ProgramEnd
