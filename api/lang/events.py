"""What a running program tells: pieces of text as they come, values, calls, and what a value cost.

Plain data; the texts of roles are never part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spec_serve.api import messages as m


@dataclass(frozen=True, slots=True)
class Meta:
    """About a value. reason and matched: why it ended; ids: its tokens, those of a stop left out.

    cached: tokens found in the prefix cache. drafted, accepted: guesses, and by source in
    `sources`. logprobs: of its tokens, where asked for. scores: of a select's choices. constraint:
    what became of it: complete, ignored keywords, schema_valid, tokens that were forced.
    """

    reason: str = "stop"
    matched: int | str | None = None
    ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    sources: dict[str, tuple[int, int]] | None = None
    logprobs: tuple[m.Logprob, ...] = ()
    scores: dict[str, float] | None = None
    constraint: m.Constrained | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a variable's text. path: names of the forks on the way to its state, "" = root."""

    path: str
    var: str
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """A variable has its value. many: a list, one for each choice of n.

    key, number: which it is within its run, and the how many-th.
    """

    path: str
    var: str
    value: Any
    meta: Meta
    key: str = ""
    number: int = -1
    many: bool = False


@dataclass(frozen=True, slots=True)
class Called:
    """A call is over; ok: it returned."""

    name: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The program is over; value: what it returned."""

    value: Any


Event = Delta | Done | Called | Ended
