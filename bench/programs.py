"""One program three ways: compiled, interpreted, and as plain calls of OpenAI's HTTP in a row.

The program extracts from a ticket, with two slow pages and two branches. All three ask the same of
the same server, by turns, with other tickets each time; every page takes `--page-s` to come. Run it
as `python -m spec_serve.bench.programs --url ws://host:port`. Starts no server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import spec_serve.lang as ss
from spec_serve.client import Client

SYSTEM = "You sort the tickets of a help desk. You answer in a few words. " * 8
STEPS = ("Sum it up.", "Name one step.", "Who is to be asked?", "How urgent is it?")
LIMIT = 16


class Pages:
    """Pages that take their time."""

    def __init__(self, page_s: float) -> None:
        self.page_s = page_s

    async def fetch(self, name: str) -> str:
        """Its text."""
        await asyncio.sleep(self.page_s)
        return f"{name}: rebuild the indexes after a migration."


def program(fetch: Callable[[str], Awaitable[str]]) -> ss.Program:
    """As somebody writes it who takes everything in order."""

    @ss.program
    async def extract(s: ss.State, ticket: str) -> Any:
        s += ss.system(SYSTEM)
        s += ss.user("Ticket: ", ticket, "\n" + STEPS[0])
        s += ss.assistant(ss.gen("sum", max_tokens=LIMIT, stop="\n"))
        await s["sum"]
        notes = await s.call(fetch, "notes")
        s += ss.user("Notes: ", notes, "\n" + STEPS[1])
        s += ss.assistant(ss.gen("step", max_tokens=LIMIT, stop="\n"))
        await s["step"]
        people = await s.call(fetch, "people")
        with s.fork(2) as branches:
            branches[0] += ss.user("People: ", people, "\n" + STEPS[2])
            branches[1] += ss.user(STEPS[3])
            for branch in branches:
                branch += ss.assistant(ss.gen("x", max_tokens=LIMIT, stop="\n"))
        await branches.join()
        return [s["sum"], s["step"], branches[0]["x"], branches[1]["x"]]

    return extract


async def plain(http: str, fetch: Callable[[str], Awaitable[str]], ticket: str) -> list[str]:
    """The same by chat completions, one after the other."""
    turns = [{"role": "system", "content": SYSTEM}]

    def ask(messages: list[dict[str, str]]) -> str:
        body = {"model": "", "messages": messages, "max_tokens": LIMIT, "stop": ["\n"]}
        request = urllib.request.Request(
            f"{http}/v1/chat/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    async def chat(text: str, keep: bool = True) -> str:
        messages = [*turns, {"role": "user", "content": text}]
        said = await asyncio.to_thread(ask, messages)
        if keep:
            turns[:] = [*messages, {"role": "assistant", "content": said}]
        return said

    found = [await chat(f"Ticket: {ticket}\n{STEPS[0]}")]
    found.append(await chat(f"Notes: {await fetch('notes')}\n{STEPS[1]}"))
    people = await fetch("people")
    found.append(await chat(f"People: {people}\n{STEPS[2]}", keep=False))
    found.append(await chat(STEPS[3], keep=False))
    return found


async def measured(url: str, page_s: float, rounds: int) -> dict[str, Any]:
    """Seconds of each way, medians, and ratios to plain calls. Raises if answers differ."""
    pages = Pages(page_s)
    extract = program(pages.fetch)
    times: dict[str, list[float]] = {"compiled": [], "interpreted": [], "plain": []}
    async with Client(url) as client:
        http = client.url.replace("ws", "http", 1).removesuffix("/v1/stream")
        began = time.perf_counter()
        graph = await extract.acompile(on=client)
        compile_s = time.perf_counter() - began
        for number in range(rounds):
            ticket = f"Query {number} on table {number * 7 % 10} is slow since the migration."
            ways: dict[str, Callable[[], Awaitable[Any]]] = {
                "compiled": lambda t=ticket: graph.arun(t, on=client),  # type: ignore[misc]
                "interpreted": lambda t=ticket: extract.arun(t, on=client),  # type: ignore[misc]
                "plain": lambda t=ticket: plain(http, pages.fetch, t),  # type: ignore[misc]
            }
            # Each goes first in turn: who comes later finds the prompt in the cache.
            names = list(ways)
            order = names[number % 3 :] + names[: number % 3]
            said = {}
            for name in order:
                began = time.perf_counter()
                found = await ways[name]()
                times[name].append(time.perf_counter() - began)
                said[name] = found if name == "plain" else found.value
            if said["compiled"] != said["interpreted"]:
                raise AssertionError(f"answers differ: {said}")
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        **{f"{name}_s": round(value, 3) for name, value in medians.items()},
        "compile_s": round(compile_s, 3),
        "compiled_to_interpreted": round(medians["compiled"] / medians["interpreted"], 3),
        "compiled_to_plain": round(medians["compiled"] / medians["plain"], 3),
        "pages_s": 2 * page_s,
    }


def main(arguments: list[str] | None = None) -> int:
    """One line of JSON."""
    parser = argparse.ArgumentParser(prog="programs", description=__doc__)
    parser.add_argument("--url", required=True, help="ws://host:port of a running server")
    parser.add_argument("--page-s", type=float, default=0.5, help="seconds a page takes")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(arguments)
    print(json.dumps(asyncio.run(measured(given.url, given.page_s, given.rounds))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
