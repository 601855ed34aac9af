"""Typed values from a constrained model: each is one of its type, interpreted and compiled."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Literal

import pytest

import spec_serve.lang as ss
from spec_serve.client import Client, ServerError
from tests.lang.test_program import on_tiny


@dataclass
class Place:
    """What is extracted."""

    name: Literal["hall", "roof"]
    floor: Literal[1, 2]


@ss.program
async def extract(s: ss.State, text: str) -> Any:
    s += ss.user("Where: ", text)
    s += ss.assistant(ss.gen("place", schema=Place, whitespace="compact", max_tokens=80))
    s += ss.user("Day, number, yes?")
    s += ss.assistant(
        ss.gen("day", type=datetime.date, max_tokens=30),
        " ",
        ss.gen("number", type=int, max_tokens=30),
        " ",
        ss.gen("yes", type=bool, max_tokens=8),
        " ",
        ss.gen("which", choices=["one", "the other"], max_tokens=12),
    )
    return [s["place"], s["day"], s["number"], s["yes"], s["which"]]


def test_values_are_of_their_types() -> None:
    async def go(client: Client) -> None:
        result = await extract.arun("the roof", on=client)
        place, day, number, yes, which = result.value
        assert isinstance(place, Place) and place.name in ("hall", "roof")
        assert isinstance(day, datetime.date) and isinstance(number, int) and yes in (True, False)
        assert which in ("one", "the other")
        told = result.state.meta("place").constraint
        assert told is not None and told.complete and told.schema_valid and told.forced > 5
        graph = await extract.acompile(on=client)
        compiled = await graph.arun("the roof", on=client)
        assert compiled.value == result.value
        assert await compiled.state.ids() == await result.state.ids()

    on_tiny(go)


def test_what_the_server_refuses_is_refused_with_its_line_when_compiled() -> None:
    @ss.program
    async def ahead(s: ss.State) -> None:
        s += ss.user("x")
        s += ss.assistant(ss.gen("a", regex=r"(?=a)a", max_tokens=4))

    async def go(client: Client) -> None:
        with pytest.raises(ss.ProgramError, match=r"^test_typed\.py:\d+: a: .*constraint"):
            await ahead.acompile(on=client)
        with pytest.raises(ServerError, match="constraint"):
            await ahead.arun(on=client)

    on_tiny(go)


def test_text_that_was_cut_short_is_no_value() -> None:
    @ss.program
    async def short(s: ss.State) -> None:
        s += ss.user("x")
        s += ss.assistant(ss.gen("day", type=datetime.date, max_tokens=2))

    async def go(client: Client) -> None:
        with pytest.raises(ss.ValueParseError, match="no date"):
            await short.arun(on=client)

    on_tiny(go)
