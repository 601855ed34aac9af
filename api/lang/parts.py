"""What a program writes into a state: text, roles, `gen`, `select`; and how that is recorded.

The recorded form (`Item`, `Op`) is plain data: the interpreter runs it at once, the tracer keeps it
as a graph, a file holds it. Knows no server and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Struct

from spec_serve.lang.values import Shape, shape

Role = Literal["", "system", "user", "assistant"]
Rule = Literal["sum", "mean", "greedy", "sample"]
RULES = ("sum", "mean", "greedy", "sample")
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "n", "logit_bias",
)  # fmt: skip
_PLAIN = (
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "bad_words", "ignore_eos", "logprobs",
    "speculation", "priority", "timeout_s", "cache_salt",
)  # fmt: skip

_LIMITS = (
    "max_chars", "min_chars", "max_words", "max_sentences", "banned", "whitespace", "strict",
    "after",
)  # fmt: skip


class ProgramError(RuntimeError):
    """A program that can't be run as it is written."""


class TraceError(ProgramError):
    """A program that can't be traced as it is written; the message has file and line."""


class Const(Struct, frozen=True, tag="text"):
    """Text that is known."""

    text: str


class Ref(Struct, frozen=True, tag="ref"):
    """The text of a variable ("0/cls#0"), of a call ("call:1") or of an argument ("arg:x")."""

    key: str


class Gen(Struct, frozen=True, tag="gen"):
    """Tokens of the model. parse: how the value is read off the text (lang/values.py).

    heal: the text before it may end within a token (lang/healing.py).
    """

    key: str
    options: dict[str, Any]
    parse: str = "text"
    heal: bool = False


class Select(Struct, frozen=True, tag="select"):
    """The likeliest of some texts."""

    key: str
    choices: list[str]
    rule: Rule = "sum"
    temperature: float = 1.0
    seed: int = 0


class Plain(Struct, frozen=True, tag="value"):
    """An argument of a call that is known."""

    value: Any


Item = Const | Ref | Gen | Select


class Append(Struct, frozen=True, tag="append"):
    """A turn, or raw text with role "". where: file:line of the program."""

    state: int
    role: Role
    items: list[Item]
    where: str = ""


class Fork(Struct, frozen=True, tag="fork"):
    """States that begin with all that the parent holds at this place."""

    parent: int
    children: list[int]
    names: list[str]


class Call(Struct, frozen=True, tag="call"):
    """A function outside; begins once its arguments are there."""

    key: str
    function: str
    args: list[Plain | Ref]
    timeout: float | None = None
    retries: int = 0


class Body(Struct, frozen=True):
    """Operations of a case or a loop. carry: keys that then stand for what another one does."""

    ops: list[Op] = []
    carry: dict[str, str] = {}


class Cond(Struct, frozen=True, tag="cond"):
    """The case that the text of `on` is, else the other one.

    before: what a key of these operations stands for until one of them has given it a value.
    """

    state: int
    on: str
    cases: dict[str, Body]
    other: Body = Body()
    before: dict[str, str] = {}
    where: str = ""


class Loop(Struct, frozen=True, tag="loop"):
    """A body `most` times, or until the text of `end` is one of these. before: as of Cond."""

    state: int
    most: int
    body: Body
    end: str = ""
    until: list[str] = []
    before: dict[str, str] = {}
    where: str = ""


Op = Append | Fork | Call | Cond | Loop


def bodies(op: Op) -> list[Body]:
    """What stands within an operation."""
    if isinstance(op, Cond):
        return [*op.cases.values(), op.other]
    return [op.body] if isinstance(op, Loop) else []


def every(ops: Iterable[Op]) -> Iterator[Op]:
    """All operations, those within others too."""
    for op in ops:
        yield op
        for body in bodies(op):
            yield from every(body.ops)


def asked(ops: Iterable[Op]) -> Iterator[Gen | Select]:
    """What these operations have the model write."""
    for op in every(ops):
        if isinstance(op, Append):
            yield from (item for item in op.items if isinstance(item, Gen | Select))


@dataclass(frozen=True, slots=True)
class GenPart:
    """`gen(...)`, before it has a place in a state."""

    name: str | None
    options: dict[str, Any]
    shape: Shape
    heal: bool = False


@dataclass(frozen=True, slots=True)
class SelectPart:
    """`select(...)`, before it has a place in a state."""

    name: str | None
    choices: list[str]
    rule: Rule
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Turn:
    """`system(...)`, `user(...)` or `assistant(...)`."""

    role: Role
    parts: tuple[Any, ...]


def system(*parts: Any) -> Turn:
    """A turn of instructions."""
    return Turn("system", parts)


def user(*parts: Any) -> Turn:
    """A turn of the user's."""
    return Turn("user", parts)


def assistant(*parts: Any) -> Turn:
    """A turn of the model's: text it is given, `gen` and `select`."""
    return Turn("assistant", parts)


def gen(
    name: str | None = None,
    *,
    type: Any = None,
    regex: str | None = None,
    schema: Any = None,
    choices: Sequence[str] | None = None,
    grammar: str | None = None,
    heal: bool = False,
    **options: Any,
) -> GenPart:
    """Let the model go on. At most one of type, regex, schema, choices and grammar.

    type: int, float, bool, date, datetime, Literal, Enum, dataclass, msgspec.Struct or a pydantic
    model; the value is one of these. schema: JSON Schema or such a type. grammar: Lark, or the name
    of one the server has. heal: the text before it may end within a token, such as in a space; the
    model then writes that token's beginning once more, and is held to it. options: fields of a
    request, of its sampling and of its constraint (max_chars, banned, whitespace, strict, ...).
    Raises TypeError, ValueError.
    """
    unknown = sorted(set(options) - {*_SAMPLING, *_PLAIN, *_LIMITS})
    if unknown:
        raise TypeError(f"gen: there is no option {unknown[0]!r}")
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    found = shape(type=type, regex=regex, schema=schema, choices=choices, grammar=grammar)
    sampling = {field: options.pop(field) for field in _SAMPLING if field in options}
    if sampling:
        options["sampling"] = sampling
    limits = {field: options.pop(field) for field in _LIMITS if field in options}
    if found.constraint is not None or limits:
        options["constraint"] = {**(found.constraint or {"kind": "text"}), **limits}
    if heal and options.get("constraint", {}).get("kind") in ("lark", "name"):
        raise ValueError("gen: heal can't stand beside a grammar; end the text before it otherwise")
    return GenPart(name, msgspec.to_builtins(options), found, heal)


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    *,
    rule: Rule = "sum",
    temperature: float = 1.0,
    seed: int = 0,
) -> SelectPart:
    """The choice the model finds likeliest behind what the state holds; all are scored.

    rule: "sum" of the tokens' log-probabilities; "mean" of them; "greedy" goes down the tree of
    the choices' tokens by the likeliest; "sample" draws from softmax(sum / temperature) by seed.
    A choice that begins another one is never less likely than it by sum. Unlike `gen(choices=)`,
    whole texts are compared. Raises ValueError.
    """
    held = list(choices)
    if not held or not all(isinstance(choice, str) and choice for choice in held):
        raise ValueError("select: choices must be texts, and at least one")
    if len(set(held)) != len(held):
        raise ValueError("select: a choice stands there twice")
    if rule not in RULES:
        raise ValueError(f"select: rule must be one of {', '.join(RULES)}, not {rule!r}")
    if rule == "sample" and not temperature > 0:
        raise ValueError("select: temperature must be above 0")
    return SelectPart(name, held, rule, temperature, seed)
