"""Load: when which question is asked, and asking them at those times whatever the answers do.

Open loop: arrivals follow a schedule made beforehand, so that a slow server meets the same load
as a quick one. Closed loop: so many users, each asking again once answered. Knows no transports.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from spec_serve.bench.serve_ask import Asker, Clock, Outcome, Wanted, asked
from spec_serve.bench.serve_data import Question

Arrival = Literal["poisson", "bursts", "even"]


@dataclass(frozen=True, slots=True)
class Load:
    """rate: requests per second; 0 = closed loop of `concurrency` users. seconds: of arrivals.

    requests: bounds their number too, 0 = no bound. concurrency: in open loop, those at once at
    most, 0 = no bound. burst: requests that come together. leave_share: of requests whose client
    goes away early.
    """

    rate: float = 0.0
    concurrency: int = 0
    seconds: float = 20.0
    requests: int = 0
    arrival: Arrival = "poisson"
    burst: int = 8
    seed: int = 0
    leave_share: float = 0.0


def schedule(load: Load) -> list[float]:
    """Arrival times in seconds, ascending, for an open loop.

    poisson: independent requests, exponential gaps. bursts: `burst` at once at Poisson times, the
    same mean rate. even: constant gaps.
    """
    if load.arrival == "even":
        count = math.ceil(load.rate * load.seconds - 1e-9)
        return [i / load.rate for i in range(min(count, load.requests or count))]
    chance = random.Random(load.seed)
    together = load.burst if load.arrival == "bursts" else 1
    at, times = 0.0, list[float]()
    while not load.requests or len(times) < load.requests:
        at += chance.expovariate(load.rate / together)
        if at >= load.seconds:
            break
        times += [at] * together
    return times[: load.requests or None]


Watcher = Callable[[Outcome, bool], None]


class Running:
    """One load being put on a server; `outcomes` in order of asking."""

    def __init__(
        self, asker: Asker, questions: Sequence[Question], wanted: Wanted, load: Load,
        watch: Watcher = lambda outcome, over: None,
    ) -> None:  # fmt: skip
        self.outcomes: list[Outcome] = []
        self._asker, self._questions, self._wanted, self._load = asker, questions, wanted, load
        self._watch = watch  # told of every beginning and end
        self._chance = random.Random(load.seed + 1)
        self._order = list(range(len(questions)))
        self._chance.shuffle(self._order)
        self._clock = Clock()

    async def run(self) -> list[Outcome]:
        """Ask all, and wait for all answers."""
        self._clock = Clock()
        if self._load.rate > 0:
            await self._open_loop()
        else:
            await self._closed_loop()
        return self.outcomes

    async def _open_loop(self) -> None:
        load = self._load
        room = asyncio.Semaphore(load.concurrency) if load.concurrency else None

        async def one(due: float) -> None:
            await self._one(due)
            if room is not None:
                room.release()

        async with asyncio.TaskGroup() as group:
            for due in schedule(load):
                wait = due - self._clock()
                if wait > 0:
                    await asyncio.sleep(wait)
                if room is not None:
                    await room.acquire()
                group.create_task(one(due))

    async def _closed_loop(self) -> None:
        load = self._load
        left = iter(range(load.requests)) if load.requests else None

        async def user() -> None:
            while self._clock() < load.seconds and (left is None or next(left, None) is not None):
                await self._one(self._clock())

        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, load.concurrency)):
                group.create_task(user())

    async def _one(self, due: float) -> None:
        number = len(self.outcomes)
        question = self._questions[self._order[number % len(self._order)]]
        outcome = Outcome(number, question.category, due)
        self.outcomes.append(outcome)
        leave = 0
        if self._chance.random() < self._load.leave_share:
            leave = self._chance.randint(1, 16)
        self._watch(outcome, False)
        await asked(self._asker, question, outcome, self._clock, self._wanted, leave)
        self._watch(outcome, True)
