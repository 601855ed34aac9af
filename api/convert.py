"""From a request on the wire to one for the engine: text becomes tokens, absences get defaults.

Shared by WebSocket, gRPC and the command line. What a client leaves out comes from the model's
generation_config, else changes nothing (greedy). Text of control tokens in prompts and messages is
ordinary text; who wants control tokens in a raw prompt sends token ids. Knows no sockets.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import structs

from spec_serve.api.auth import LOCAL, Principal
from spec_serve.api.messages import Generate
from spec_serve.api.text import StopStrings, StopWatch, TextStream, TokenTable
from spec_serve.api.tool_constraint import enforced_calls
from spec_serve.api.tool_formats import format_of
from spec_serve.api.turns import check_tools, prefers_text, takes_tools, told_in_text, turns
from spec_serve.spec.request import (
    Constraint,
    Request,
    RequestError,
    Sampling,
    Speculation,
    Stopping,
)

S = TypeVar("S", bound=TextStream)


class TextTokens(TokenTable, Protocol):
    """The part of a tokenizer needed here; target/tokenizer.py has it."""

    vocab_size: int
    eos_ids: frozenset[int]
    unused_ids: frozenset[int]
    chat_template: str | None

    def encode(self, text: str, *, special: bool = ..., bos: bool | None = ...) -> list[int]: ...

    def token_text(self, token_id: int, /) -> str: ...

    def render_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = ...
    ) -> list[int]: ...

    def render_around(
        self, messages: list[dict[str, Any]], begun: str | None, hole: str
    ) -> list[list[int]]: ...

    def encode_around(self, parts: Sequence[str]) -> list[list[int]]: ...


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What requests that say nothing get."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


GREEDY = SamplingDefaults()


def sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Defaults out of a generation_config.json; values that make no sense are left alone.

    `do_sample: false` means greedy whatever the temperature says, as it does in transformers.
    """

    def number(name: str, low: float, high: float, otherwise: float) -> float:
        value = generation.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return otherwise
        return float(value) if low <= value <= high else otherwise

    sampled = generation.get("do_sample")
    temperature = number("temperature", 0.0, 2.0, 1.0 if sampled is True else 0.0)
    return SamplingDefaults(
        temperature=0.0 if sampled is False else temperature,
        top_p=number("top_p", 1e-6, 1.0, 1.0),
        top_k=int(number("top_k", 0, 1_000_000, 0)),
        min_p=number("min_p", 0.0, 1.0, 0.0),
        repetition_penalty=number("repetition_penalty", 1e-6, 10.0, 1.0),
    )


def read_generation_config(path: Path) -> dict[str, Any]:
    """The generation_config.json of a model directory, {} if there is none that can be read."""
    try:
        found = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready for the engine, and what its answer needs.

    shown: control tokens that show in the text, as calls of tools are written with them.
    segments: what follows it. principal: who asks; arrived: time.monotonic() seconds, before the
    text was read.
    """

    wire: Generate
    request: Request
    tokenizer: TextTokens
    stops: StopStrings | None
    shown: frozenset[int] = frozenset()
    segments: tuple[Prepared, ...] = ()
    principal: Principal = LOCAL
    arrived: float = 0.0

    def text_stream(self) -> TextStream:
        """Fresh: one for each choice."""
        return self.stream(TextStream)

    def stream(self, kind: type[S]) -> S:
        """The same, of another class."""
        wire = self.wire
        return kind(
            self.tokenizer,
            self.stops if self.stops is not None else (),
            skip_special=wire.skip_special_tokens,
            include_stop=wire.include_stop,
            min_tokens=wire.min_tokens,
            shown=self.shown,
        )


def to_request(
    wire: Generate,
    tokenizer: TextTokens,
    *,
    defaults: SamplingDefaults = GREEDY,
    models: Sequence[str] = (),
    request_id: str = "",
    deadline: float | None = None,
) -> Prepared:
    """Tokenize and translate. models: names a request may ask for (empty: any).

    deadline: time.monotonic() seconds; the earlier of it and the request's own counts. Raises
    RequestError naming the field on the wire. May take long for long texts: not for a loop.
    """
    if wire.model and models and wire.model not in models:
        raise RequestError("model", f"{wire.model[:64]!r} is not served here", "model_not_found")
    prompt = _prompt(wire, tokenizer)
    stops = StopStrings(wire.stop) if wire.stop else None
    shown = tool_markers(tokenizer) if wire.tools else frozenset[int]()
    if wire.timeout_s is not None:
        own = time.monotonic() + wire.timeout_s
        deadline = own if deadline is None else min(own, deadline)
    spec = wire.speculation
    request = Request(
        id=request_id or secrets.token_hex(8),
        prompt=prompt,
        sampling=_sampling(wire, tokenizer, defaults),
        stopping=Stopping(
            max_tokens=wire.max_tokens,
            min_tokens=wire.min_tokens,
            eos=frozenset(tokenizer.eos_ids),
            token_ids=frozenset(wire.stop_token_ids),
            ignore_eos=wire.ignore_eos,
            watch=StopWatch(tokenizer, stops, wire.skip_special_tokens, shown) if stops else None,
        ),
        speculation=Speculation(
            mode=spec.mode,
            max_nodes=spec.max_nodes,
            sources=frozenset(spec.sources) if spec.sources is not None else None,
            prediction=tuple(
                _encode("speculation.prediction", tokenizer, spec.prediction, bos=False)
                if spec.prediction
                else ()
            ),
        ),
        n=wire.sampling.n,
        logprobs=wire.logprobs,
        prompt_logprobs=wire.prompt_logprobs,
        continuations=tuple(map(tuple, wire.continuations)),
        salt=wire.cache_salt,
        keep=wire.keep,
        priority=wire.priority,
        deadline=deadline,
        constraint=_constraint(wire, tokenizer),
    )
    segments = _segments(wire, tokenizer, defaults)
    request.segments = tuple(one.request for one in segments)
    return Prepared(wire, request, tokenizer, stops, shown, segments)


def _segments(
    wire: Generate, tokenizer: TextTokens, defaults: SamplingDefaults
) -> tuple[Prepared, ...]:
    """What follows a request, each as if it were one."""
    if wire.segments and wire.tools:
        raise RequestError("segments", "don't go with tools")
    made: list[Prepared] = []
    bare = structs.replace(
        wire, model="", prompt=None, messages=None, segments=[], timeout_s=None, keep=False,
        speculation=wire.speculation.__class__(),
    )  # fmt: skip
    for number, segment in enumerate(wire.segments):
        one = structs.replace(bare, **structs.asdict(segment))
        try:
            made.append(to_request(one, tokenizer, defaults=defaults))
        except RequestError as error:
            said = str(error).removeprefix(f"{error.field}: ")
            raise RequestError(f"segments[{number}].{error.field}", said, error.code) from None
    return tuple(made)


def _constraint(wire: Generate, tokenizer: TextTokens) -> Constraint | None:
    """What the text has to look like: as asked, or so that calls of tools are as asked."""
    calls = enforced_calls(wire, tokenizer)
    asked = wire.constraint
    if asked is None:
        return calls
    if calls is not None:
        raise RequestError("constraint", "does not go with calls of tools that are enforced")
    for name, text in (
        ("source", asked.source),
        ("after", asked.after),
        *((f"banned[{i}]", banned) for i, banned in enumerate(asked.banned)),
    ):
        _no_halves(f"constraint.{name}", text)
    return Constraint(
        kind=asked.kind,
        source=asked.source,
        whitespace=asked.whitespace,
        strict=asked.strict,
        max_chars=asked.max_chars,
        min_chars=asked.min_chars,
        max_words=asked.max_words,
        max_sentences=asked.max_sentences,
        banned=tuple(asked.banned),
        after=asked.after,
        forcing=asked.forcing,
    )


def tool_markers(tokenizer: TextTokens) -> frozenset[int]:
    """The control tokens of the model's way to write calls of tools: a reader needs to see them."""
    found = set()
    for text in format_of(tokenizer.chat_template or "").controls:
        ids = tokenizer.encode(text, special=True, bos=False)
        if len(ids) == 1 and tokenizer.is_special(ids[0]):
            found.add(ids[0])
    return frozenset(found)


def _encode(name: str, tokenizer: TextTokens, text: str, bos: bool | None = None) -> list[int]:
    _no_halves(name, text)  # asked here, as tokenizers each raise something else
    return tokenizer.encode(text, bos=bos)


def _no_halves(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(name, "holds half a surrogate pair, which no encoding has") from None


def _prompt(wire: Generate, tokenizer: TextTokens) -> list[int]:
    given = [
        name for name in ("prompt", "token_ids", "messages") if getattr(wire, name) is not None
    ]
    if len(given) != 1:
        what = "exactly one of prompt, token_ids and messages is needed"
        raise RequestError(given[1] if given else "prompt", f"{what}, got {len(given)}")
    if wire.tools is not None and wire.messages is None:
        raise RequestError("tools", "need messages")
    if wire.prompt is not None:
        return _encode("prompt", tokenizer, wire.prompt)
    if wire.token_ids is not None:
        return wire.token_ids
    assert wire.messages is not None
    if tokenizer.chat_template is None:
        raise RequestError("messages", "this model has no chat template; send prompt instead")
    if wire.tools:
        check_tools(wire.tools)
    return _rendered(wire, tokenizer, tokenizer.chat_template)


def _rendered(wire: Generate, tokenizer: TextTokens, template: str) -> list[int]:
    """Ids of a conversation."""
    messages = wire.messages or []
    tools = [_shown_tool(tool) for tool in wire.tools or ()] or None
    uses = bool(tools) or any(turn.role == "tool" or turn.tool_calls for turn in messages)
    in_text = uses and not takes_tools(template)
    # A template takes arguments in one form and stumbles over the other; most take both.
    forms = [prefers_text(template) or in_text]
    if uses and not in_text:
        forms.append(not forms[0])
    for as_text in forms:
        given = turns(messages, template, as_text)
        if "developer" not in template:  # such templates would leave these turns out
            for turn in given:
                turn["role"] = "system" if turn["role"] == "developer" else turn["role"]
        if in_text:
            given, tools = told_in_text(given, tools or ()), None
        try:
            return tokenizer.render_chat(given, tools=tools)
        except UnicodeEncodeError:
            raise RequestError("messages", "hold half a surrogate pair") from None
        except Exception as error:
            if as_text is not forms[-1]:
                continue
            # Whatever a model's template stumbles over; its own words only where it raised them.
            said = str(error) if isinstance(error, ValueError) else type(error).__name__
            told = f"the chat template can't render these: {said[:200]}"
            raise RequestError("messages", told) from error
    raise AssertionError("one form at least is tried")


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the model sees it: that it is strict is for us."""
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _sampling(wire: Generate, tokenizer: TextTokens, defaults: SamplingDefaults) -> Sampling:
    asked = wire.sampling
    bias: dict[int, float] = {}
    for key, value in (asked.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError("sampling.logit_bias", f"{key[:32]!r} is not a token id")
        if int(key) in bias:
            raise RequestError("sampling.logit_bias", f"token id {int(key)} is named twice")
        bias[int(key)] = value
    words: set[tuple[int, ...]] = set()
    for word in wire.bad_words:
        # A word has other tokens at the start of a text than after a space.
        for text in (word, " " + word.lstrip()):
            words.add(tuple(_encode("bad_words", tokenizer, text, bos=False)))
    words.discard(())

    def chosen(name: str) -> Any:
        value = getattr(asked, name)
        return getattr(defaults, name) if value is None else value

    return Sampling(
        temperature=chosen("temperature"),
        top_k=chosen("top_k"),
        top_p=chosen("top_p"),
        min_p=chosen("min_p"),
        seed=asked.seed,
        repetition_penalty=chosen("repetition_penalty"),
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        logit_bias=bias,
        bad_words=tuple(sorted(words)),
    )


_NESTED = {
    "temperature", "top_k", "top_p", "min_p", "seed", "n", "logit_bias", "repetition_penalty",
    "frequency_penalty", "presence_penalty",
}  # fmt: skip


def wire_field(wire: Generate, field: str) -> str:
    """The engine's name of a field as the client wrote it: temperature -> sampling.temperature."""
    if field == "constraint" and wire.constraint is None:
        return "tools"
    if field == "prompt":
        return next(
            (name for name in ("messages", "token_ids") if getattr(wire, name) is not None), field
        )
    if field.startswith("segments["):
        head, _, rest = field.partition(".")
        return f"{head}.sampling.{rest}" if rest.partition("[")[0] in _NESTED else field
    return f"sampling.{field}" if field.partition("[")[0] in _NESTED else field
