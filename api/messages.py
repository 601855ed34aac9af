"""What is said over the wire: WebSocket messages as msgspec structs, in JSON and MessagePack.

`Generate` is also the common form of a request: gRPC and the command line make one too, so that
every bound below holds everywhere. Knows no tokens, no engine, no sockets; imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from spec_serve.api.parts import INT64 as _INT64
from spec_serve.api.parts import MAX_BAD_WORDS as MAX_BAD_WORDS
from spec_serve.api.parts import MAX_IDS as MAX_IDS
from spec_serve.api.parts import MAX_SEGMENTS as MAX_SEGMENTS
from spec_serve.api.parts import MAX_STOP_CHARS as MAX_STOP_CHARS
from spec_serve.api.parts import MAX_STOPS as MAX_STOPS
from spec_serve.api.parts import Constrained as Constrained
from spec_serve.api.parts import Constraint as Constraint
from spec_serve.api.parts import NamedTool as NamedTool
from spec_serve.api.parts import Part as Part
from spec_serve.api.parts import Sampling as Sampling
from spec_serve.api.parts import Segment as Segment
from spec_serve.api.parts import Speculation as Speculation
from spec_serve.api.parts import StopString as StopString
from spec_serve.api.parts import Token as Token
from spec_serve.api.program_wire import Called as Called
from spec_serve.api.program_wire import ProgramCall as ProgramCall
from spec_serve.api.program_wire import ProgramDelta as ProgramDelta
from spec_serve.api.program_wire import ProgramEnd as ProgramEnd
from spec_serve.api.program_wire import ProgramValue as ProgramValue
from spec_serve.api.program_wire import RunProgram as RunProgram

JSON = "specserve.v1.json"
MSGPACK = "specserve.v1.msgpack"
SUBPROTOCOLS = (MSGPACK, JSON)

MAX_NAMED = 120  # characters of a wrong field's name that are told

Id = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.:-]+$")]
Reason = Literal["stop", "length", "cancelled"]
Code = Literal[
    "invalid_request", "context_length_exceeded", "model_not_found", "overloaded", "draining",
    "timeout", "duplicate_id", "engine_error", "unauthorized", "forbidden", "rate_limited",
    "resume_gap",
]  # fmt: skip


class Message(Part, tag_field="type"):
    """A whole message; `type` says which."""


class ChatMessage(Part):
    """One turn. Content parts may only be text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Generate(Message, tag="generate"):
    """Start a generation; exactly one of prompt, token_ids, messages. gen: the client's own id.

    tool_choice: whether, or which, tool must be called; one call only without parallel_tool_calls.
    Such calls, and those of strict tools, are enforced like a constraint.
    """

    gen: Id
    model: str = ""
    prompt: str | None = None
    token_ids: list[Token] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    constraint: Constraint | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: Annotated[int, Meta(ge=1, le=_INT64)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_INT64)] = 0
    stop: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[Token], Meta(max_length=MAX_IDS)] = []
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] = []
    ignore_eos: bool = False
    include_stop: bool = False
    speculation: Speculation = field(default_factory=Speculation)
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # Texts that may follow, scored as one tree with the first token; max_tokens must be 1. Answered
    # by `prompt_logprobs`: those of their tokens, one after the other.
    continuations: Annotated[list[list[Token]], Meta(max_length=MAX_IDS)] = []
    # What is generated behind this, one after the other; the index of an answer's messages is then
    # the segment's (0 = what this request says itself). Where a stop string begins within a token,
    # or the next one has no room, the answer ends early: `last` of `finished` says where.
    segments: Annotated[list[Segment], Meta(max_length=MAX_SEGMENTS)] = []
    skip_special_tokens: bool = True
    ids: bool = False
    steps: Literal["none", "summary", "steps", "tokens"] = "steps"
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    keep: bool = False  # the prompt stays in the cache longer than others: a hint
    # WebSocket: goes on when the socket drops, for `resume`. Otherwise a drop cancels.
    resumable: bool = False


class Cancel(Message, tag="cancel"):
    """End a generation of this socket; its `finished` still comes."""

    gen: Id


class Ping(Message, tag="ping"):
    """Answered by a Pong with the same t."""

    t: float = 0.0


class Resume(Message, tag="resume"):
    """On a new socket, take over generations of one that dropped. gens: gen -> last seq seen.

    -1 = none seen. Answered by `resumed`, then by what was missed, in order. A generation that
    can't be continued gets an `error` resume_gap with its gen.
    """

    resume_token: Annotated[str, Meta(min_length=1, max_length=64)]
    gens: Annotated[dict[Id, Annotated[int, Meta(ge=-1, le=_INT64)]], Meta(max_length=64)]


class Ack(Message, tag="ack"):
    """Messages of a generation up to seq have arrived and need not be kept for a resume."""

    gen: Id
    seq: Annotated[int, Meta(ge=0, le=_INT64)]


class Auth(Message, tag="auth"):
    """The API key, as the first message, for who can't send it with the handshake."""

    api_key: Annotated[str, Meta(min_length=1, max_length=512)]


class Turn(Part):
    """One turn of a program. None stands for tokens that the client holds as ids."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    parts: Annotated[list[str | None], Meta(max_length=4096)]


class Tokenize(Message, tag="tokenize"):
    """Ids of what stands around generated tokens; exactly one of text and turns.

    text: ordinary text. turns: a conversation, written by the model's template; begun: what the
    assistant's open turn begins with, absent where none is open. Each None in them is a place of
    tokens. Answered by `tokens`, or `error` with gen = ask.
    """

    ask: Id
    text: Annotated[list[str | None], Meta(max_length=4096)] | None = None
    turns: Annotated[list[Turn], Meta(max_length=4096)] | None = None
    begun: Annotated[list[str | None], Meta(max_length=4096)] | None = None


Client = Generate | Cancel | Ping | Resume | Ack | Auth | Tokenize | RunProgram | Called


class Hello(Message, tag="hello"):
    """The first message of a server."""

    session: str
    version: str
    max_generations: int
    models: list[str]
    resume_token: str = ""
    resume_window_s: float = 0.0
    programs: bool = False  # whether it runs programs


class Resumed(Message, tag="resumed"):
    """The answer to a `resume`; gens: those taken over. Their missed messages follow."""

    gens: list[str]


class Started(Message, tag="started"):
    """The generation was admitted. seq counts the messages of a generation from 0, gapless."""

    gen: str
    seq: int
    id: str
    model: str
    prompt_tokens: int
    cached_tokens: int = 0
    queue_ms: float = 0.0


class Step(Struct, array_like=True, gc=False):
    """A verify step. sources: per name (drafted, accepted). Times in microseconds.

    drafted_ids, drafted_parents, drafted_text, drafted_sources: the tree of guesses, only with
    steps "tokens"; a parent is the place of another guess, or -1.
    """

    step: int
    drafted: int
    accepted: int
    sources: dict[str, tuple[int, int]]
    draft_us: int = 0
    verify_us: int = 0
    host_us: int = 0
    drafted_ids: list[int] = []
    drafted_parents: list[int] = []
    drafted_text: list[str] = []
    drafted_sources: list[str] = []


class Logprob(Struct, array_like=True):
    """A token's log-probability under the raw logits, and the likeliest ones, best first.

    Finite always: what is impossible has -9999.
    """

    id: int
    logprob: float
    token: str
    top: list[tuple[int, float, str]] = []


class Delta(Message, tag="delta", gc=False):
    """What one verify step added to one choice; several steps if the reader was slow."""

    gen: str
    seq: int
    index: int = 0
    text: str = ""
    ids: list[int] = []
    logprobs: list[Logprob] = []
    steps: list[Step] = []


class PromptLogprobs(Message, tag="prompt_logprobs"):
    """Log-probabilities of the prompt's tokens from the second on."""

    gen: str
    seq: int
    logprobs: list[Logprob]


class Usage(Part):
    """Tokens of one choice; completion_tokens = tokens delivered, those of a stop included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Summary(Part):
    """Speculation over all steps of a choice. histogram[j]: steps that accepted exactly j."""

    steps: int
    drafted: int
    accepted: int
    mean_accepted_length: float
    acceptance_rate: float
    histogram: list[int]


class Timings(Part):
    """Milliseconds; ttft from arrival, decode from first to last token."""

    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float


class Finished(Message, kw_only=True, tag="finished"):
    """The end of one choice; last = of the generation. matched: the token or string that ended."""

    gen: str
    seq: int
    index: int = 0
    reason: Reason
    matched: int | str | None = None
    usage: Usage
    timings: Timings
    speculation: Summary | None = None
    constraint: Constrained | None = None
    last: bool = True


class Error(Message, tag="error"):
    """With gen: that generation is over. Without: the message could not be understood."""

    code: Code
    message: str
    gen: str | None = None
    seq: int | None = None
    param: str | None = None
    retryable: bool = False
    retry_after_ms: int = 0


class Draining(Message, tag="draining"):
    """The server is going away; what runs has this many seconds."""

    deadline_s: float


class Pong(Message, tag="pong"):
    """The answer to a Ping; server_t: seconds since the epoch."""

    t: float
    server_t: float


class Tokens(Message, tag="tokens"):
    """The answer to a `tokenize`: ids before, between and behind the places of tokens."""

    ask: str
    pieces: list[list[int]]


Server = (
    Hello | Resumed | Started | Delta | PromptLogprobs | Finished | Error | Draining | Pong | Tokens
    | ProgramCall | ProgramDelta | ProgramValue | ProgramEnd
)  # fmt: skip


class BadMessage(ValueError):
    """A message that breaks the schema; `field` is its path, "" where there is none."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class _Named(Struct):
    gen: Id


class Codec:
    """One of the two encodings, for both sides. `text`: whether frames are text frames."""

    def __init__(self, name: str) -> None:
        if name not in SUBPROTOCOLS:
            raise ValueError(f"codec: must be one of {', '.join(SUBPROTOCOLS)}, not {name!r}")
        self.name = name
        self.text = name == JSON
        encoder = msgspec.json.Encoder() if self.text else msgspec.msgpack.Encoder()
        self.encode: Callable[[Any], bytes] = encoder.encode
        # (message, buffer, offset): the buffer then ends with the message.
        self.encode_into: Callable[[Any, bytearray, int], None] = encoder.encode_into
        if self.text:
            self._client: Any = msgspec.json.Decoder(Client)
            self._server: Any = msgspec.json.Decoder(Server)
            self._named: Any = msgspec.json.Decoder(_Named)
        else:
            self._client = msgspec.msgpack.Decoder(Client)
            self._server = msgspec.msgpack.Decoder(Server)
            self._named = msgspec.msgpack.Decoder(_Named)

    def client_message(self, frame: bytes | str) -> Client:
        """What a client said. Raises BadMessage."""
        message: Client = _decoded(self._client, frame)
        return message

    def server_message(self, frame: bytes | str) -> Server:
        """What a server said. Raises BadMessage."""
        message: Server = _decoded(self._server, frame)
        return message

    def peek_gen(self, frame: bytes | str) -> str | None:
        """The gen of a message that is otherwise wrong, so that its sender can be told."""
        try:
            return str(self._named.decode(frame).gen)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None


def _decoded(decoder: Any, frame: bytes | str) -> Any:
    try:
        return finite(decoder.decode(frame))
    except RecursionError:
        raise BadMessage("", "the message is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise bad_message(error) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadMessage("", f"the message can't be decoded: {error}") from None


def generate(values: dict[str, Any]) -> Generate:
    """A `Generate` from plain values, checked like one from the wire. Raises BadMessage."""
    try:
        made = msgspec.convert(values, Generate)
    except RecursionError:
        raise BadMessage("", "the request is nested too deeply") from None
    except UnicodeEncodeError:
        raise BadMessage("", "a text holds half a surrogate pair") from None
    except msgspec.ValidationError as error:
        raise bad_message(error) from None
    finite(made)
    return made


def bad_message(error: msgspec.ValidationError) -> BadMessage:
    """The field stands in msgspec's message: "Expected `int` <= 8 - at `$.sampling.n`"."""
    said, at, path = str(error).partition(" - at `")
    name = path.rstrip("`").replace("key` in `", "").removeprefix("$").removeprefix(".")
    if not at and "field `" in said:  # missing and unknown fields at the top
        name = said.partition("field `")[2].partition("`")[0]
    elif "field `" in said:
        inner = said.partition("field `")[2].partition("`")[0]
        name = f"{name}.{inner}" if name else inner
    # Both may hold what the client wrote, of any length; nobody wants megabytes of it back.
    name, said = name[:MAX_NAMED], said[: 2 * MAX_NAMED]
    return BadMessage(name.replace("[...]", ""), f"{name}: {said}" if name else said)


def finite(message: Any) -> Any:
    """NaN passes every bound (it compares false): refuse it by name, in MessagePack too."""
    if isinstance(message, Ping) and not math.isfinite(message.t):
        raise BadMessage("t", "t: must be finite")
    if isinstance(message, Generate):
        _finite_part("", message)
        _finite_part("sampling.", message.sampling)
        for number, segment in enumerate(message.segments):
            _finite_part(f"segments[{number}].sampling.", segment.sampling)
    return message


def _finite_part(prefix: str, part: Struct) -> None:
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise BadMessage(prefix + name, f"{prefix}{name}: must be finite")
    bias = part.logit_bias if isinstance(part, Sampling) else None
    for token, value in (bias or {}).items():
        if not math.isfinite(value):
            name = f"{prefix}logit_bias[{token}]"
            raise BadMessage(name, f"{name}: must be finite")
