"""A soak: mixed traffic on a server of its own for minutes; errors, memory growth and books.

Over HTTP, WebSocket and gRPC at once: greedy, sampled, with and without speculation, clients that
leave, connections that drop and come back, requests that must be refused. Every answer to the same
question must be the same. What follows `--` are flags of the server: spec-serve bench soak
--minutes 30 -- --target MODEL --draft MODEL
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from time import monotonic
from typing import Any

import uvloop

from spec_serve.api import messages as m
from spec_serve.bench.report import table, write_json
from spec_serve.bench.serve_ask import (
    Asker,
    Clock,
    GrpcAsker,
    HttpAsker,
    Outcome,
    SocketAsker,
    Wanted,
    asked,
)
from spec_serve.bench.serve_data import Question
from spec_serve.bench.soak_server import Server, server, unbalanced
from spec_serve.client import Client

TEXT = "the of and to in is that it was for on are with as at be this have or by one had"
GREEDY = Wanted(max_tokens=48, temperature=0.0, ignore_eos=True, timeout_s=120.0)
WANTS = {
    "greedy": GREEDY,
    "off": replace(GREEDY, speculation="off"),
    "sampled": replace(GREEDY, temperature=0.8, seed=7),
}
SAME = {"off": "greedy"}  # whose answers are those of another
QUESTIONS, REFUSED_SHARE, LEAVE_SHARE = 24, 0.05, 0.25
WARM_SHARE, WARM_S, GROWTH = 0.3, 150.0, 0.01  # memory is flat after about two minutes


@dataclass(slots=True)
class Log:
    """What happened: answers by kind, what went wrong, memory over time."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rss: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB
    digests: dict[tuple[int, str], int] = field(default_factory=dict)

    def fail(self, said: str) -> None:
        """Something went wrong; only the first hundred are kept."""
        self.counts["WRONG"] += 1
        if len(self.wrong) < 100:
            self.wrong.append(said)

    def compare(self, question: int, kind: str, digest: int) -> None:
        """Answers to the same question must be the same, whatever carried them."""
        key = question, SAME.get(kind, kind)
        if self.digests.setdefault(key, digest) != digest:
            self.fail(f"question {question} ({kind}): another answer than before")


def questions(seed: int) -> list[Question]:
    """Made-up prompts that share beginnings, so that the prefix cache has work."""
    chance, words = random.Random(seed), TEXT.split()
    heads = [" ".join(chance.choices(words, k=12)) for _ in range(4)]
    made = []
    for i in range(QUESTIONS):
        text = f"{chance.choice(heads)} {' '.join(chance.choices(words, k=chance.randint(1, 10)))}"
        turns = ({"role": "user", "content": text},)
        made.append(Question("chat", turns) if i % 2 else Question("raw", prompt=text))
    return made


class Traffic:
    """Users that go on until `end` (of the monotonic clock)."""

    def __init__(self, at: Server, log: Log, end: float, seed: int, exact: bool) -> None:
        self._server, self._log, self._end, self._exact = at, log, end, exact
        self._chance = random.Random(seed)
        self._questions = questions(seed)

    async def run(self, users: int) -> None:
        """All users of all transports."""
        log = self._log
        makers: dict[str, Callable[[Wanted], Asker]] = {
            "http": lambda wanted: HttpAsker(self._server.http, wanted, None, None),
            "ws": lambda wanted: SocketAsker(self._server.ws, wanted, 4, None, None),
            "grpc": lambda wanted: GrpcAsker(self._server.grpc, wanted, 1, None, None),
        }
        async with asyncio.TaskGroup() as group:
            for name, make in makers.items():
                for _ in range(users):
                    group.create_task(self._user(name, make))
            group.create_task(self._breaking())
            while monotonic() < self._end and self._server.runs:
                log.rss.append((monotonic(), self._server.rss_mib()))
                await asyncio.sleep(0.5)

    async def _user(self, name: str, make: Callable[[Wanted], Asker]) -> None:
        chance, log = self._chance, self._log
        askers = {kind: make(wanted) for kind, wanted in WANTS.items()}
        for one in askers.values():
            await one.open()
        while monotonic() < self._end and self._server.runs:
            kind = chance.choice(list(WANTS))
            if chance.random() < REFUSED_SHARE:
                bad = Question("bad", prompt=chance.choice(("", "x" * 500_000)))
                got = await asked(askers[kind], bad, Outcome(0, "bad"), Clock(), WANTS[kind])
                log.counts[f"{name} refused"] += 1
                if got.code not in ("context_length_exceeded", "invalid_request"):
                    log.fail(f"{name}: no or far too long a prompt gave {got.code or 'an answer'}")
                continue
            number = chance.randrange(len(self._questions))
            leave = chance.randint(1, 12) if chance.random() < LEAVE_SHARE else 0
            question, wanted = self._questions[number], WANTS[kind]
            got = await asked(askers[kind], question, Outcome(0, kind), Clock(), wanted, leave)
            if got.code:
                log.fail(f"{name} {kind}: {got.code}: {got.said}")
            elif got.left:
                log.counts[f"{name} left"] += 1
            else:
                log.counts[f"{name} answered"] += 1
                if got.tokens != wanted.max_tokens:
                    log.fail(f"{name} {kind}: {got.tokens} tokens")
                elif self._exact:
                    log.compare(number, kind, got.digest)
        for one in askers.values():
            await one.close()

    async def _breaking(self) -> None:
        """One more user, on a WebSocket that drops in the middle and comes back; or does not."""
        chance, log = self._chance, self._log
        while monotonic() < self._end and self._server.runs:
            back = chance.random() < 0.7
            number = chance.randrange(len(self._questions))
            question, outcome = self._questions[number], Outcome(0, "greedy")
            given = (
                {"messages": list(question.messages)} if question.messages
                else {"prompt": question.prompt}
            )  # fmt: skip
            try:
                client = Client(self._server.ws, resume=back)
                async with client:
                    events = client.generate(
                        max_tokens=GREEDY.max_tokens, ignore_eos=True, ids=True,
                        sampling={"temperature": 0.0}, **given,
                    )  # fmt: skip
                    drop = chance.randint(1, 10)
                    async for event in events:
                        if isinstance(event, m.Delta):
                            outcome.came(0.0, len(event.ids), event.ids)
                            if len(outcome.arrivals) == drop:
                                client.abort()
            except (OSError, RuntimeError) as error:
                if back:
                    log.fail(f"resume: {error}")
                log.counts["dropped"] += not back
                continue
            log.counts["resumed"] += client.resumes > 0
            if self._exact:
                log.compare(number, "greedy", outcome.digest)


def growth(rss: list[tuple[float, float]]) -> float | None:
    """Share by which memory grew after warm-up: the last fifth against the first one after it.

    None for fewer than 20 samples behind it.
    """
    length = rss[-1][0] - rss[0][0] if rss else 0.0
    from_s = (rss[0][0] if rss else 0.0) + max(WARM_SHARE * length, min(WARM_S, 0.7 * length))
    warm = [mib for at, mib in rss if at >= from_s]
    if len(warm) < 20:
        return None
    part = len(warm) // 5
    return median(warm[-part:]) / median(warm[:part]) - 1.0


def books(at: Server) -> str:
    """Wait until the server is idle; what is wrong then, "" if nothing is."""
    said = ""
    end = monotonic() + 30
    while monotonic() < end:
        said = unbalanced(at.stats())
        if not said:
            break
    return said


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `server` gets what follows `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    own, flags = argv[:at], argv[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="spec-serve bench soak", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--users", type=int, default=2, help="of each transport (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inexact", action="store_true",
                        help="do not compare answers: half precision, or a GPU")  # fmt: skip
    parser.add_argument("--growth", type=float, default=GROWTH, metavar="SHARE",
                        help="of memory after warm-up, at most (default: 0.01)")  # fmt: skip
    parser.add_argument("--json", default="", metavar="FILE")
    given = parser.parse_args(own)
    if not 0 < given.minutes < 1e5 or given.users < 1:
        parser.error("--minutes and --users must be positive")
    given.server = flags
    return given


def main(argv: list[str]) -> int:
    """Command line of the bench: 0 if nothing was wrong, 1 otherwise, 2 wrong usage."""
    given = arguments(argv)
    log = Log()
    try:
        with server(given.server) as at:
            begun = monotonic()
            traffic = Traffic(
                at, log, begun + 60 * given.minutes, given.seed, not given.inexact
            )
            uvloop.run(traffic.run(given.users))
            if not at.runs:
                log.fail("the server ended")
            else:
                finish(at, log)
    except (RuntimeError, OSError) as error:
        print(f"spec-serve: error: {error}", file=sys.stderr)
        return 1
    return report(given, log, begun)


def finish(at: Server, log: Log) -> None:
    """Look at the books, stop the server, read its log."""
    if said := books(at):
        log.fail(f"books: {said}")
    if code := at.stop():
        log.fail(f"the server ended with exit code {code}")
    if "Traceback" in (said := at.log()):
        log.fail(f"the server's log: ...{said[-1500:]}")


def report(given: argparse.Namespace, log: Log, begun: float) -> int:
    """Print what happened; the exit code."""
    grown = growth(log.rss)
    if grown is not None and grown > given.growth:
        log.fail(f"memory grew by {grown:.1%}")
    table([{"what": name, "count": count} for name, count in sorted(log.counts.items())])
    if log.rss:
        told = "too short to tell growth" if grown is None else f"growth after warm-up {grown:.2%}"
        print(f"memory: {log.rss[0][1]:.0f} MiB at first, {log.rss[-1][1]:.0f} at last, {told}")
    for said in log.wrong:
        print(f"WRONG: {said}")
    rss = [(round(at - begun, 1), round(mib, 1)) for at, mib in log.rss]
    found: dict[str, Any] = {"counts": dict(log.counts), "wrong": log.wrong, "growth": grown}
    write_json(given.json, {"bench": "soak", "minutes": given.minutes, **found, "rss_mib": rss})
    return 1 if log.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
