"""What goes wrong in programs: told once, where it is awaited, and nothing goes on or hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import spec_serve.lang as ss
from spec_serve.api import messages as m
from spec_serve.client import Client, ConnectionLost
from spec_serve.lang.conversation import Conversation
from tests.api.echo import Echo
from tests.api.serving import served, until
from tests.lang.test_program import on_tiny


async def fails() -> str:
    await asyncio.sleep(0)
    raise OSError("no such page")


async def quiet(client: Client) -> None:
    """Until nothing of a program runs any more."""
    await until(lambda: not client._streams)


def test_the_first_branch_is_taken_and_the_others_end() -> None:
    @ss.program
    async def racing(s: ss.State) -> Any:
        s += ss.user("x")
        with s.fork(3, names=["long", "short", "longer"]) as branches:
            for branch, limit in zip(branches, (900, 2, 900), strict=True):
                branch += ss.assistant(ss.gen("a", max_tokens=limit, ignore_eos=True))
        first = await branches.join(first=True)
        with pytest.raises(ss.ProgramError, match="dropped"):
            await branches["long"]["a"]
        return first["a"], await branches["short"]["a"]

    async def go(client: Client) -> None:
        first, short = (await racing.arun(on=client)).value
        assert first == short
        await quiet(client)

    on_tiny(go)


def test_a_branchs_failure_is_raised_at_its_join_and_can_be_survived() -> None:
    @ss.program
    async def surviving(s: ss.State) -> Any:
        s += ss.user("x")
        with s.fork(2) as branches:
            branches[0] += ss.user(s.call(fails))
            branches[0] += ss.assistant(ss.gen("a", max_tokens=2))
            branches[1] += ss.assistant(ss.gen("a", max_tokens=2))
        try:
            await branches.join()
        except* OSError as group:
            told = [str(error) for error in group.exceptions]
        with pytest.raises(OSError, match="no such page"):
            await branches[0]["a"]
        return told, branches[1]["a"]

    async def go(client: Client) -> None:
        told, value = (await surviving.arun(on=client)).value
        assert told == ["no such page"] and isinstance(value, str)

    on_tiny(go)


def test_a_failure_nobody_awaits_ends_the_run() -> None:
    @ss.program
    async def careless(s: ss.State) -> str:
        s += ss.user(s.call(fails))
        s += ss.assistant(ss.gen("a", max_tokens=2))
        return "done"

    @ss.program
    async def unused(s: ss.State) -> str:
        s.call(fails)
        return "done"

    async def go(client: Client) -> None:
        with pytest.raises(OSError, match="no such page"):
            await careless.arun(on=client)
        graph = await careless.acompile(on=client)
        with pytest.raises(OSError, match="no such page"):
            await graph.arun(on=client)
        # A call whose result nobody wants does not matter.
        assert (await unused.arun(on=client)).value == "done"

    on_tiny(go)


def test_a_programs_own_error_ends_what_it_began() -> None:
    @ss.program
    async def breaking(s: ss.State) -> None:
        s += ss.user("x")
        s += ss.assistant(ss.gen("a", max_tokens=900, ignore_eos=True))
        async for _ in s.stream("a"):
            raise ZeroDivisionError("mine")

    async def go(client: Client) -> None:
        with pytest.raises(ZeroDivisionError, match="mine"):
            await breaking.arun(on=client)
        await quiet(client)
        task = asyncio.create_task(breaking.arun(on=client))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, ZeroDivisionError)):
            await task
        await quiet(client)

    on_tiny(go)


def test_a_lost_connection_ends_a_program() -> None:
    @ss.program
    async def long(s: ss.State) -> None:
        s += "x"
        s += ss.gen("a", max_tokens=3000, ignore_eos=True)
        await s["a"]

    async def go() -> None:
        async with served(Echo(pause=0.01)) as (_, url):
            client = Client(url, m.JSON)
            async with client:
                task = asyncio.create_task(long.arun(on=client))
                await asyncio.sleep(0.05)
                client.abort()
                with pytest.raises(ConnectionLost):
                    await task

    asyncio.run(asyncio.wait_for(go(), 120))


def test_pieces_that_change_are_refused() -> None:
    held = Conversation()
    held.open("user")
    held.add("x")
    held.close("user")
    held.open("assistant")
    held.fill([7, 8], "ab", [1, 2])
    held.close("assistant")
    assert held.prompt([[1, 2], [3]]) == [1, 2, 7, 8, 3]
    with pytest.raises(ss.ProgramError, match="writes earlier turns differently"):
        held.prompt([[1, 5], [3]])


def test_many_states_share_what_a_socket_may_carry() -> None:
    @ss.program
    async def wide(s: ss.State) -> Any:
        s += ss.user("x")
        with s.fork(80) as branches:
            for number, branch in enumerate(branches):
                branch += ss.assistant(str(number), ss.gen("a", max_tokens=1))
        await branches.join()
        return len([branch["a"] for branch in branches])

    async def go(client: Client) -> None:
        assert (await wide.arun(on=client)).value == 80
        graph = await wide.acompile(on=client)
        assert (await graph.arun(on=client)).value == 80

    on_tiny(go)
