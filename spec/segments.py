"""Several generations in one request: behind each one text that is given, then the next.

A choice that ends is followed by a row for the next one: its prompt is what the choice keeps and
the text behind that, whose nodes are given and need no logits. So its tokens are those of a request
of its own with that prompt. Where what is kept can't be told, or has no room, nothing follows, and
the client goes on by itself. Knows rows; no cache, no devices, no text.
"""

from __future__ import annotations

from dataclasses import replace

from spec_serve.spec.admission import EngineInfo, capacity
from spec_serve.spec.report import usage
from spec_serve.spec.request import Reason, Request
from spec_serve.spec.row import Row, make_rows


def following(row: Row, reason: Reason, matched: int | str | None, info: EngineInfo) -> Row | None:
    """The row for what follows a choice that has ended; None if nothing does."""
    owner = row.owner
    if row.segment >= len(owner.segments) or reason not in ("stop", "length"):
        return None
    asked, count = owner.segments[row.segment], _kept(row, reason, matched)
    if count is None:
        return None
    prompt = [*row.tokens[: row.prompt_len + count], *asked.prompt]
    if len(prompt) + max(asked.stopping.min_tokens, 1) > capacity(info):
        return None
    return _row(row, asked, prompt, info)


def _kept(row: Row, reason: Reason, matched: int | str | None) -> int | None:
    """How many of a choice's tokens stay: all but an end token, or those of a stop string; None
    where that begins within a token."""
    if reason == "stop" and isinstance(matched, str):
        return row.watch.before(row.tokens[row.prompt_len :]) if row.watch is not None else None
    return row.emitted - (reason == "stop" and isinstance(matched, int))


def _row(row: Row, asked: Request, prompt: list[int], info: EngineInfo) -> Row:
    owner = row.owner
    request = replace(
        asked, id=owner.id, prompt=prompt, speculation=owner.speculation, salt=owner.salt,
        priority=owner.priority, deadline=owner.deadline,
    )  # fmt: skip
    (made,) = make_rows(request, info, row.arrived, row.order)
    made.owner, made.segment, made.before = owner, row.segment + 1, usage(row)
    made.admitted, made.cached = row.admitted, len(prompt) - len(asked.prompt) - 1
    made.first_token, made.last_token, made.steps = row.first_token, row.last_token, row.steps
    made.trust, made.purse, made.idle = row.trust, row.purse, row.idle
    if row.told <= len(prompt) - len(asked.prompt):  # they know nothing that was dropped
        made.sources, made.told = row.sources, row.told
    return made
