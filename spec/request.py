"""What is asked of the engine and what it tells back; no tensors, no transports.

A `Request` is immutable once submitted. Everything the engine says about it is an `Event`, handed
to the publisher once per step for all requests together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from spec_serve.spec.compiler import Compiled

Mode = Literal["auto", "off", "max"]
ConstraintKind = Literal["text", "regex", "json_schema", "json_object", "choices", "lark", "name"]
Whitespace = Literal["bounded", "compact", "any"]
Reason = Literal["stop", "length", "cancelled", "error"]


class RequestError(ValueError):
    """A request that can't be served as asked; `field` names what is wrong.

    code: one of api/messages.py's Code; the engine's own are invalid_request,
    context_length_exceeded, overloaded, draining, timeout, duplicate_id and engine_error.
    """

    def __init__(self, field: str, message: str, code: str = "invalid_request") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.code = code
        self.retry_after_ms = 0  # 0: what is usual for the code


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's logits become a distribution. Defaults change nothing (greedy at T = 0).

    Order: repetition, frequency and presence penalty, logit_bias, bad words and min_tokens masks,
    temperature, top_k, top_p, min_p. seed None = a random one at admission. top_k 0 and top_p 1
    are off. bad_words: token sequences that must not be completed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()


class Watch(Protocol):
    """Looks for stop strings in the text of one choice; called in the engine's thread."""

    def feed(self, tokens: Sequence[int], active_from: int) -> tuple[int, str] | None:
        """Append tokens; the first stop string completed by one of them ends the choice.

        A stop completed by tokens[i] with i < active_from does not count (min_tokens). Returns
        (how many of `tokens` to keep, the one that completes the stop included; the string) or
        None."""
        ...

    def before(self, tokens: Sequence[int]) -> int | None:
        """How many of the choice's tokens stand before the stop string that ended it; None where
        that begins within a token."""
        ...


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a choice ends. max_tokens None = whatever the context leaves.

    eos: the model's end ids; ignored with ignore_eos. token_ids: further ends. Both count as
    emitted tokens and end with reason "stop"; neither can be chosen before min_tokens tokens exist.
    watch: makes the stop-string watcher of one choice; None = no stop strings.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    eos: frozenset[int] = frozenset()
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    watch: Callable[[], Watch] | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """The request's say in speculation.

    mode auto: what the cost model finds best; off: one node per step; max: always as large a tree
    as allowed. max_nodes: guesses per step at most, None = the engine's own limit. sources: names
    of drafters allowed, None = all. prediction: token ids the client expects (Predicted Outputs).
    """

    mode: Mode = "auto"
    max_nodes: int | None = None
    sources: frozenset[str] | None = None
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of every choice has to look like; enforced at each node of the tree.

    kind, source: "regex" a regular expression; "json_schema" a schema as JSON text; "json_object"
    any object (source ""); "choices" a JSON list of strings; "lark" a grammar in llguidance's Lark;
    "name" a grammar shipped here (spec/shipped.py); "text" anything (source ""), for the bounds
    below alone. whitespace: between JSON's tokens, at most a newline and 20 blanks, none, or any
    amount. strict: refuse a schema with keywords that can't be enforced; False = they are ignored
    and listed in the answer. forcing: where only one text can follow, only the tokens the tokenizer
    would write it with can; False = any that spell it, as without a constraint.

    max_chars, min_chars: characters of the text (0 and None = no bound); max_words: runs without
    white space; max_sentences: runs that end with . ! or ? before white space. banned: strings that
    must not occur anywhere in it. after: everything is free until this text (or control token) has
    been emitted; the constraint and its bounds hold for what follows.

    A choice ends by itself where nothing more can follow (reason "stop", matched None). Before
    that, end ids can be chosen only where the text is complete. Stop strings and stop ids end it
    anywhere. min_tokens and bad words yield where the constraint leaves nothing else; ignore_eos
    contradicts a constraint and is refused. Where no token is left the choice ends with an error.
    """

    kind: ConstraintKind
    source: str = ""
    whitespace: Whitespace = "bounded"
    strict: bool = True
    max_chars: int | None = None
    min_chars: int = 0
    max_words: int | None = None
    max_sentences: int | None = None
    banned: tuple[str, ...] = ()
    after: str = ""
    forcing: bool = True


@dataclass(frozen=True, slots=True)
class Constrained:
    """What became of a constraint on one choice.

    complete: the text fits all that was enforced; False when it was cut short (token limit, stop
    string). ignored: keywords of the schema that were not enforced. schema_valid: whether the text
    is valid under the whole schema; None = not a schema, not complete, or it can't be told.
    forced: tokens the constraint left no choice about.
    """

    complete: bool
    ignored: tuple[str, ...] = ()
    schema_valid: bool | None = None
    forced: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and the n choices wanted for it.

    logprobs: None = none, k >= 0 = chosen token plus k alternatives: log-softmax of the target's
    raw logits, before penalties, bias, masks, temperature and filters. salt: namespace of the
    prefix cache. priority: higher first. deadline: time.monotonic() seconds. sink: called with each
    event of this request, in the thread of the link that delivers it. trace: the W3C traceparent of
    who asks. constraint: what the text has to look like; compiled: the same, by spec/compiler.py
    (None = the engine does it when the request is submitted). segments: further generations, one
    behind the other; the prompt of each is the text given between, behind what the one before it
    keeps: all but its end token or stop string. They have the speculation, salt, priority and
    deadline of this one, and n 1.
    """

    id: str
    prompt: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    speculation: Speculation = field(default_factory=Speculation)
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    salt: str = ""
    priority: int = 0
    deadline: float | None = None
    sink: Callable[[Event], None] | None = None
    trace: str | None = None
    # Texts that may follow the prompt, to be scored as one tree with the first token (max_tokens
    # 1); told as PromptScored: their tokens' log-probabilities one after the other.
    continuations: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    compiled: Compiled | None = None
    segments: tuple[Request, ...] = ()
    keep: bool = False  # its prompt stays in the cache longer than others: a hint

    @property
    def given(self) -> int:
        """Tokens that are not chosen: of the prompt, and of the texts between."""
        return len(self.prompt) + sum(len(one.prompt) for one in self.segments)


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of one token and of the `top` most probable ones, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class StepRecord:
    """What one verify step did for one row.

    drafted/accepted: guesses in the tree / on the accepted path. sources: per source name, how many
    (drafted, accepted) of them. The times are of the whole step, in microseconds. tree_sources:
    per guess of the tree, the name of the source that proposed it first.
    """

    step: int
    drafted: int
    accepted: int
    sources: dict[str, tuple[int, int]]
    draft_us: int
    verify_us: int
    host_us: int
    rows: int
    tree_tokens: list[int]
    tree_parents: list[int]
    tree_sources: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Usage:
    """Tokens of one choice; completion counts exactly the tokens delivered."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(slots=True)
class RequestTimings:
    """Milliseconds: waiting; admission to first token; arrival to first token; first to last."""

    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float


@dataclass(slots=True)
class Started:
    """Choice `index` was admitted and begins with `cached_tokens` of its prompt in the cache."""

    request: Request
    index: int
    cached_tokens: int
    queue_ms: float


@dataclass(slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens 1.. (token 0 has none), or of continuations."""

    request: Request
    index: int
    logprobs: list[TokenLogprob]


@dataclass(slots=True)
class Delta:
    """The tokens one step emitted for one choice, the ending one included."""

    request: Request
    index: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    step: StepRecord


@dataclass(slots=True)
class Finished:
    """The last event of a choice. matched: the token id or stop string that ended it.

    error is set when reason is "error" (a RequestError with code timeout, overloaded, ...).
    constraint is set for choices that had one and had begun. usage: of all the request's segments
    together; own: of the last one alone, where there were several."""

    request: Request
    index: int
    reason: Reason
    matched: int | str | None
    usage: Usage
    timings: RequestTimings
    error: RequestError | None = None
    constraint: Constrained | None = None
    own: Usage | None = None


@dataclass(slots=True)
class SegmentFinished:
    """A segment is over, and the next one follows; fields as of Finished, usage of it alone."""

    request: Request
    index: int
    reason: Reason
    matched: int | str | None
    usage: Usage
    timings: RequestTimings
    constraint: Constrained | None = None


Event = Started | PromptScored | Delta | SegmentFinished | Finished
