"""One program several ways: by the server, compiled here, interpreted, and as OpenAI's HTTP calls.

The program extracts from a ticket: three choices, four fields of one answer, look-ups that take
`--page-s` each, and four answers, of which two need them. All ways lead the same conversation with
the same server, by turns, each time on another ticket; and once more with look-ups that take no
time, so that the gain comes apart. "apart" is compiled here, each generation a request of its own.
Run it as `spec-serve bench programs --url ws://host:port`. Starts no server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import spec_serve.lang as ss
from spec_serve.client import Client, GenerationEvent
from spec_serve.lang.backend import ClientBackend
from spec_serve.lang.conversation import Question

SYSTEM = "You sort the tickets of a help desk. You answer in a few words. " * 8
FORM = {
    "topic": ["billing", "network", "database"],
    "urgency": ["low", "high"],
    "team": ["office", "operations", "development"],
}
FIELDS = ("Customer", "Table", "Since", "Cause")
OF_THE_TICKET = ("Sum it up.", "What does the customer lose?")
OF_THE_PAGES = ("Name one step.", "Who is to be asked?")
PAGES = ("notes", "people", "contract")
TICKET = "Query {:05d} on table {} is slow since the migration."
LIMIT, FIELD_LIMIT = 16, 6
WAYS = ("beside", "compiled", "apart", "interpreted", "plain")


class Pages:
    """Look-ups that take their time; the first `count` of PAGES."""

    def __init__(self, page_s: float, count: int) -> None:
        self.page_s, self.names = page_s, PAGES[:count]

    async def fetch(self, name: str) -> str:
        """Its text."""
        await asyncio.sleep(self.page_s)
        return f"{name}: rebuild the indexes after a migration."


class Here:
    """A backend whose server runs no programs: each operation is asked for by itself.

    fuses: but for generations with known text between, which are one request.
    """

    def __init__(self, inner: ClientBackend, fuses: bool) -> None:
        self._inner, self.fuses = inner, fuses

    async def pieces(self, question: Question) -> list[list[int]]:
        """As the inner one."""
        return await self._inner.pieces(question)

    def generate(
        self, token_ids: list[int], options: dict[str, Any]
    ) -> AsyncGenerator[GenerationEvent, None]:
        """As the inner one."""
        return self._inner.generate(token_ids, options)

    async def score(
        self, token_ids: list[int], continuations: list[list[int]]
    ) -> list[list[float]]:
        """As the inner one."""
        return await self._inner.score(token_ids, continuations)


def program(pages: Pages) -> ss.Program:
    """As somebody writes it who takes everything in order."""

    @ss.program
    async def extract(s: ss.State, ticket: str) -> Any:
        s += ss.system(SYSTEM)
        begun: tuple[Any, ...] = ("Ticket: ", ticket, "\n")
        for name, choices in FORM.items():
            s += ss.user(*begun, f"What is its {name}?")
            s += ss.assistant(ss.select(name, choices))
            await s[name]
            begun = ()
        s += ss.user("Fill in the form.")
        s += ss.assistant(*filled())
        first = await answers(s, OF_THE_TICKET)
        seen: list[Any] = []
        for name in pages.names:
            seen += [await s.call(pages.fetch, name), "\n"]
        then = await answers(s, OF_THE_PAGES, *seen)
        return [*(s[name] for name in (*FORM, *FIELDS)), *first, *then]

    return extract


def filled() -> list[Any]:
    """Parts of a turn: names of fields, and what the model writes behind them."""
    parts: list[Any] = []
    for name in FIELDS:
        parts += [f"{name}:", ss.gen(name, max_tokens=FIELD_LIMIT, ignore_eos=True), "\n"]
    return parts


async def answers(s: ss.State, questions: Sequence[str], *before: Any) -> list[ss.Value]:
    """To each question one, in branches, all of the same length."""
    with s.fork(len(questions)) as branches:
        for branch, question in zip(branches, questions, strict=True):
            branch += ss.user(*before, question)
            branch += ss.assistant(ss.gen("x", max_tokens=LIMIT, ignore_eos=True))
    await branches.join()
    return [branch["x"] for branch in branches]


async def plain(http: str, pages: Pages, ticket: str) -> list[str]:
    """The same conversation by chat completions, one after the other."""
    turns = [{"role": "system", "content": SYSTEM}]

    def ask(messages: list[dict[str, str]], choices: list[str] | None, most: int) -> str:
        body: dict[str, Any] = {"model": "", "messages": messages, "max_tokens": most}
        if choices is None:
            body["ignore_eos"] = True
        else:
            body["structured_outputs"] = {"choice": choices}
        request = urllib.request.Request(
            f"{http}/v1/chat/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])

    async def chat(text: str, choices: list[str] | None = None, keep: int = 0) -> str:
        messages = [*turns, {"role": "user", "content": text}]
        said = await asyncio.to_thread(ask, messages, choices, keep or LIMIT)
        if choices is not None or keep:
            turns[:] = [*messages, {"role": "assistant", "content": said}]
        return said

    found: list[str] = []
    for name, choices in FORM.items():
        begun = "" if found else f"Ticket: {ticket}\n"
        found.append(await chat(f"{begun}What is its {name}?", choices))
    found += [await chat(f"{name}?", keep=FIELD_LIMIT) for name in FIELDS]
    found += [await chat(question) for question in OF_THE_TICKET]
    seen = "".join([f"{await pages.fetch(name)}\n" for name in pages.names])
    return [*found, *[await chat(seen + question) for question in OF_THE_PAGES]]


Times = dict[str, list[float]]


async def rounds_of(client: Client, pages: Pages, rounds: int, first: int) -> tuple[Times, float]:
    """Seconds of each way, and of compiling. Raises AssertionError if answers differ."""
    extract = program(pages)
    times: Times = {name: [] for name in WAYS}
    http = client.url.replace("ws", "http", 1).removesuffix("/v1/stream")
    here, apart = (Here(ClientBackend(client), fuses) for fuses in (True, False))
    began = time.perf_counter()
    graph = await extract.acompile(on=client)
    compile_s = time.perf_counter() - began
    ways: dict[str, Callable[[str], Awaitable[Any]]] = {
        "beside": lambda ticket: graph.arun(ticket, on=client),
        "compiled": lambda ticket: graph.arun(ticket, on=here),
        "apart": lambda ticket: graph.arun(ticket, on=apart),
        "interpreted": lambda ticket: extract.arun(ticket, on=client),
        "plain": lambda ticket: plain(http, pages, ticket),
    }
    number = first
    for place in range(rounds):
        for name in WAYS[place % len(WAYS) :] + WAYS[: place % len(WAYS)]:
            number += 1  # no way finds another one's ticket in the cache
            began = time.perf_counter()
            await ways[name](TICKET.format(number, number * 7 % 10))
            times[name].append(time.perf_counter() - began)
    same = [await ways[name](TICKET.format(first, 0)) for name in WAYS if name != "plain"]
    if any(found.value != same[0].value for found in same):
        raise AssertionError(f"answers differ: {[found.value for found in same]}")
    return times, compile_s


async def measured(url: str, page_s: float, count: int, rounds: int) -> dict[str, Any]:
    """Medians of each way, their ratios, and the parts of the gain, in seconds."""
    async with Client(url) as client:
        times, compile_s = await rounds_of(client, Pages(page_s, count), rounds, 0)
        at_once, _ = await rounds_of(client, Pages(0.0, count), rounds, 50_000)
    whole = {name: statistics.median(found) for name, found in times.items()}
    model = {name: statistics.median(found) for name, found in at_once.items()}
    hidden = (whole["interpreted"] - model["interpreted"]) - (whole["beside"] - model["beside"])
    parts = {
        "look-ups overlapped": hidden,
        "operations known at once, prompts encoded ahead": model["interpreted"] - model["apart"],
        "generations with text between in one request": model["apart"] - model["compiled"],
        "beside the engine": model["compiled"] - model["beside"],
        "one tree per choice, branches side by side, no HTTP": (
            model["plain"] - model["interpreted"]
        ),
    }
    return {
        "seconds": {name: round(value, 3) for name, value in whole.items()},
        "without_look_ups": {name: round(value, 3) for name, value in model.items()},
        "compile_s": round(compile_s, 3),
        "to_interpreted": round(whole["beside"] / whole["interpreted"], 3),
        "to_plain": round(whole["beside"] / whole["plain"], 3),
        "gain_s": {name: round(value, 3) for name, value in parts.items()},
        "look_ups_s": count * page_s,
        "rounds": rounds,
    }


def main(arguments: list[str] | None = None) -> int:
    """One line of JSON."""
    parser = argparse.ArgumentParser(prog="programs", description=__doc__)
    parser.add_argument("--url", required=True, help="ws://host:port of a running server")
    parser.add_argument("--page-s", type=float, default=0.5, help="seconds a look-up takes")
    parser.add_argument("--look-ups", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args(arguments)
    made = measured(given.url, given.page_s, given.look_ups, given.rounds)
    print(json.dumps(asyncio.run(made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
