"""Text before a `gen` that may end within a token: the model writes that token's beginning anew.

What stays is what the text is encoded to whatever follows, as far as some probes tell, but for the
last token; the rest is left out of the prompt and is what the model's text must begin with. Ids
come from a server, by the questions every program asks. Knows no states.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from spec_serve.lang.conversation import Conversation, Question
from spec_serve.lang.scoring import common

PROBES = ("a", "s", "1", " ", "\n", ".", "\u00e9", '"', ")")
MOST_LESS = 64  # characters that may be written anew
AT_ONCE = 4
_BOUNDED = r"(\x0A[\x20\x09]{0,20}|[\x20\x09]{1,2})"  # as the server bounds it by default
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")

Ask = Callable[[Question], Awaitable[list[list[int]]]]


def questions(held: Conversation) -> list[Question]:
    """What `healed` asks first."""
    tail = len(held.tail)
    fewer = [held.question(less=less) for less in range(1, min(tail, AT_ONCE) + 1)]
    return [held.question(), *(held.question(probe) for probe in PROBES if tail), *fewer]


async def healed(ask: Ask, held: Conversation) -> tuple[list[list[int]], int, str]:
    """(pieces, how many ids to leave out at their end, the text of these)."""
    tail = held.tail
    asked = [held.question(), *(held.question(probe) for probe in PROBES if tail)]
    found = await asyncio.gather(*map(ask, asked))
    pieces, whole = found[0], found[0][-1]
    # No probes find all that may follow: the last token is always chosen anew.
    stable = min(common([one[-1] for one in found]), len(whole) - 1)
    if not tail or not (stable > 0 or len(pieces) > 1):
        return pieces, 0, ""
    most = min(len(tail), MOST_LESS)
    for first in range(1, most + 1, AT_ONCE):
        fewer = range(first, min(first + AT_ONCE, most + 1))
        shorter = await asyncio.gather(*(ask(held.question(less=less)) for less in fewer))
        for less, one in zip(fewer, shorter, strict=True):
            if one[-1] == whole[:stable]:
                return pieces, len(whole) - stable, tail[-less:]
    return pieces, 0, ""


def begun_with(begun: str, constraint: dict[str, Any] | None) -> dict[str, Any]:
    """A constraint whose texts are this beginning and then what the given one allows."""
    held = dict(constraint or {"kind": "text"})
    kind, source = held["kind"], held.get("source", "")
    if kind == "text":
        held |= {"kind": "regex", "source": f"{_literal(begun)}(?s:.)*"}
    elif kind == "regex":
        held["source"] = f"{_literal(begun)}({source})"
    elif kind == "choices":
        texts = [begun + choice for choice in json.loads(source)]
        held["source"] = json.dumps(texts, ensure_ascii=False)
    else:
        schema = json.loads(source) if source else {"type": "object"}
        inner = json.dumps(_guided(schema, held.pop("whitespace", "bounded")))
        quoted = json.dumps(begun)
        held |= {"kind": "lark", "source": f"start: {quoted} value\nvalue: %json {inner}\n"}
        held.pop("strict", None)
    for bound in ("max_chars", "min_chars"):
        if bound in held:
            held[bound] += len(begun)
    return held


def _guided(schema: dict[str, Any], whitespace: str) -> dict[str, Any]:
    """A schema within a grammar says itself how its white space may be."""
    flexible: dict[str, dict[str, Any]] = {
        "compact": {"whitespace_flexible": False},
        "any": {"whitespace_flexible": True},
    }
    told = flexible.get(whitespace, {"whitespace_pattern": _BOUNDED})
    return {**schema, "x-guidance": told}


def _literal(text: str) -> str:
    """As a regex matches it."""
    named = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return "".join(named.get(c, f"\\{c}" if c in _SPECIAL else c) for c in text)
