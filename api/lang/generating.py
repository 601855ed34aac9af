"""From a recorded `gen` to a request, and from its answer to the tokens the state keeps.

The token that ended the text (an end or stop id) and the tokens of a stop string are not kept: the
template, or the program, writes what comes next. Knows no state.
"""

from __future__ import annotations

from typing import Any

from spec_serve.api import messages as m
from spec_serve.client.answers import Answer
from spec_serve.lang.events import Meta
from spec_serve.lang.healing import begun_with
from spec_serve.lang.parts import Gen


def requested(item: Gen, begun: str = "", cut: int = 0) -> dict[str, Any]:
    """Options of the request. Where a stop string may end it, tokens must be told one by one.

    begun: what its text must begin with, in place of so many tokens.
    """
    options = dict(item.options)
    if options.get("stop") and options.get("logprobs") is None:
        options["logprobs"] = 0
    if begun:
        options["constraint"] = begun_with(begun, options.get("constraint"))
        if "max_tokens" in options:
            options["max_tokens"] += cut
    return options


def kept(answer: Answer) -> tuple[list[int], str, str]:
    """(ids, their text, text behind them) of the first choice.

    A stop string may begin within a token: what stands before it in that token comes as text.
    """
    choice = answer.choices[0]
    ids, matched = list(choice.ids), choice.matched
    if isinstance(matched, int) and choice.reason == "stop" and ids and ids[-1] == matched:
        return ids[:-1], choice.text, ""
    if not isinstance(matched, str):
        return ids, choice.text, ""
    tail = ""
    tokens = [one.token for one in choice.logprobs]
    while ids and matched not in tail:
        ids.pop()
        tail = tokens[len(ids)] + tail
    rest = tail.partition(matched)[0]
    if not rest or not choice.text.endswith(rest):
        return ids, choice.text, ""
    return ids, choice.text[: -len(rest)], rest


def meta_of(answer: Answer, ids: list[int], constraint: m.Constrained | None) -> Meta:
    """What is told of the first choice."""
    choice = answer.choices[0]
    sources: dict[str, tuple[int, int]] = {}
    for step in choice.steps:
        for name, (drafted, accepted) in step.sources.items():
            before = sources.get(name, (0, 0))
            sources[name] = (before[0] + drafted, before[1] + accepted)
    usage, told = choice.usage, choice.speculation
    return Meta(
        reason=choice.reason,
        matched=choice.matched,
        ids=tuple(ids),
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached=usage.cached_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
        drafted=told.drafted if told else 0,
        accepted=told.accepted if told else 0,
        sources=sources,
        logprobs=tuple(choice.logprobs),
        constraint=constraint,
    )
