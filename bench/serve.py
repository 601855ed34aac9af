"""Load on a running server, over HTTP, WebSocket or gRPC: latencies, goodput, acceptance, errors.

Open loop at --rate (Poisson, bursts or even), or closed loop with --concurrency users. --sweep
looks for the saturating load and reports goodput at twice of it. Prints tables; --json and --html
write reports. Starts no server and guesses no address.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from spec_serve.bench.report import table, write_json
from spec_serve.bench.serve_ask import (
    Asker,
    GrpcAsker,
    HttpAsker,
    Outcome,
    SocketAsker,
    Unreachable,
    Wanted,
    record,
)
from spec_serve.bench.serve_data import Question, load
from spec_serve.bench.serve_html import Part, overview, page, times
from spec_serve.bench.serve_load import Arrival, Load, Running, Watcher, schedule
from spec_serve.bench.serve_stats import Slo, by_category, figures
from spec_serve.client import Tls

TRANSPORTS = {
    "http": "http", "https": "http", "ws": "ws", "wss": "ws", "grpc": "grpc", "grpcs": "grpc",
}  # fmt: skip
KEEPS_UP = 0.9  # share of good answers, from which on a load counts as one the server can carry
MOST_DOUBLINGS = 12
LATE_MS = 50.0


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="spec-serve bench serve", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--url", required=True, help="http://HOST:8000 (OpenAI's API), ws://HOST:8000 or "
        "grpc://HOST:50051; https, wss and grpcs with TLS")  # fmt: skip
    add("--transport", choices=("http", "ws", "grpc"), help="default: as the address says")
    add("--api-key", default="", help="seen by others of this machine; better --api-key-file")
    add("--api-key-file", default="", metavar="FILE")
    add("--ca", default="", metavar="FILE", help="authorities to trust (PEM)")
    section = parser.add_argument_group("load")
    add = section.add_argument
    add("--rate", type=float, default=0.0, metavar="R", help="requests per second (open loop)")
    add("--concurrency", type=int, default=0, metavar="N",
        help="without --rate: users asking one question after the other; with it: at once at most")
    add("--arrival", choices=get_args(Arrival), default="poisson")
    add("--burst", type=int, default=8, metavar="N", help="requests of a burst")
    add("--seconds", type=float, default=20.0, metavar="S", help="of arrivals (default: 20)")
    add("--requests", type=int, default=0, metavar="N", help="at most; 0 = any")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals and the questions' order")
    add("--sweep", nargs="?", const="auto", default="", metavar="RATES",
        help="several loads: 1,2,4 or, without rates, doubling until the server can't keep up; "
        "then twice the saturating load")
    section = parser.add_argument_group("questions")
    add = section.add_argument
    add("--data", nargs="+", default=[], metavar="FILE",
        help="JSON lines with prompt, messages or turns; default: built-in ones")
    add("--raw", action="store_true", help="questions as plain prompts, without a chat template")
    add("--max-tokens", type=int, default=128, metavar="N")
    add("--temperature", type=float, metavar="T", help="default: the server's")
    add("--sampling-seed", type=int, metavar="N", help="of every request; default: none")
    add("--ignore-eos", action="store_true")
    add("--speculation", choices=("auto", "off", "max"), default="auto")
    add("--model", default="", help="default: the one that is served")
    add("--timeout-s", type=float, default=300.0, metavar="S", help="for one answer")
    add("--plain", action="store_true", help="over HTTP, send no fields beyond OpenAI's")
    add("--per-connection", type=int, default=8, metavar="N", help="generations on a WebSocket")
    section = parser.add_argument_group("report")
    add = section.add_argument
    add("--slo-ttft-ms", type=float, default=1000.0, metavar="MS", help="default: 1000")
    add("--slo-itl-ms", type=float, default=100.0, metavar="MS",
        help="between an answer's tokens on average (default: 100)")
    add("--json", default="", metavar="FILE")
    add("--html", default="", metavar="FILE")
    add("--quiet", action="store_true", help="no progress bar")
    given = parser.parse_args(argv)
    _check(parser, given)
    return given


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    scheme = urlsplit(given.url).scheme
    if scheme not in TRANSPORTS:
        parser.error(f"--url: {given.url!r} must begin with one of {', '.join(TRANSPORTS)}://")
    given.transport = given.transport or TRANSPORTS[scheme]
    for name in ("rate", "seconds", "timeout_s", "slo_ttft_ms", "slo_itl_ms"):
        value = getattr(given, name)
        if not math.isfinite(value) or value < 0 or (name != "rate" and not value):
            parser.error(f"--{name.replace('_', '-')}: must be positive")
    for name in ("concurrency", "requests"):
        if getattr(given, name) < 0:
            parser.error(f"--{name}: must not be negative")
    for name in ("burst", "max_tokens", "per_connection"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    if not given.sweep and not given.rate and not given.concurrency:
        parser.error("say how much load: --rate, --concurrency or --sweep")
    if given.sweep not in ("", "auto"):
        try:
            rates = [float(rate) for rate in given.sweep.split(",")]
        except ValueError:
            rates = []
        if not rates or not all(0 < rate < math.inf for rate in rates):
            parser.error(f"--sweep: {given.sweep!r} is no list of rates such as 1,2,4")


def api_key(given: argparse.Namespace) -> str | None:
    """The key, from the flag or the first line of a file."""
    if given.api_key_file:
        return Path(given.api_key_file).read_text(encoding="utf-8").split("\n", 1)[0].strip()
    return given.api_key or None


def asker(given: argparse.Namespace) -> Asker:
    """The transport's side, not connected yet."""
    wanted = wants(given)
    key, tls = api_key(given), Tls(given.ca) if given.ca else None
    if given.transport == "http":
        return HttpAsker(given.url, wanted, key, tls.context() if tls else None)
    if given.transport == "ws":
        return SocketAsker(given.url, wanted, given.per_connection, key, tls)
    return GrpcAsker(given.url, wanted, 1, key, tls)


def wants(given: argparse.Namespace) -> Wanted:
    """What every question asks for."""
    return Wanted(
        given.max_tokens, given.temperature, given.sampling_seed, given.ignore_eos,
        given.speculation, given.model, given.timeout_s, given.plain,
    )  # fmt: skip


def load_of(given: argparse.Namespace, rate: float) -> Load:
    """The load at this rate."""
    return Load(
        rate, given.concurrency, given.seconds, given.requests, given.arrival, given.burst,
        given.seed,
    )  # fmt: skip


def load_name(made: Load) -> str:
    """How reports call a load."""
    if not made.rate:
        return f"{max(1, made.concurrency)} users"
    return f"{made.rate:.4g} requests/s, {made.arrival}"


@contextmanager
def progress(made: Load, shown: bool) -> Iterator[Watcher]:
    """A bar on a terminal; what it returns is told of every beginning and end."""
    if not shown:
        yield lambda outcome, over: None
        return
    total = len(schedule(made)) if made.rate else made.requests or None
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[running]} running, {task.fields[failed]} failed, "
                   "{task.fields[tokens]} tokens"),
        TimeElapsedColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task(load_name(made), total=total, running=0, failed=0, tokens=0)
        counts: dict[str, Any] = {"running": 0, "failed": 0, "tokens": 0}

        def watch(outcome: Outcome, over: bool) -> None:
            counts["running"] += -1 if over else 1
            counts["failed"] += over and bool(outcome.code)
            counts["tokens"] += outcome.tokens if over else 0
            bar.update(task, advance=int(over), **counts)

        yield watch


class Bench:
    """Loads put on one server, one after the other."""

    def __init__(self, given: argparse.Namespace, questions: list[Question]) -> None:
        self.parts: list[Part] = []
        self.slo = Slo(given.slo_ttft_ms, given.slo_itl_ms)
        self._given, self._questions = given, questions
        self._asker = asker(given)

    async def run(self) -> str:
        """All loads; what a sweep found, as a sentence. Raises Unreachable."""
        try:
            await self._asker.open()
            if not self._given.sweep:
                await self._one(load_of(self._given, self._given.rate))
                return ""
            return await self._sweep()
        finally:
            await self._asker.close()

    async def _one(self, made: Load) -> dict[str, Any]:
        shown = sys.stderr.isatty() and not self._given.quiet
        with progress(made, shown) as watch:
            running = Running(self._asker, self._questions, wants(self._given), made, watch)
            outcomes = await running.run()
        found = {"rate": made.rate or None, **figures(outcomes, self.slo)}
        self.parts.append(Part(load_name(made), found, outcomes))
        return found

    async def _at(self, rate: float) -> tuple[float, float]:
        """Goodput at this rate, and the share of good answers."""
        found = await self._one(load_of(self._given, rate))
        return float(found["goodput_per_s"]), float(found["good_share"])

    async def _sweep(self) -> str:
        """Look for the saturating load, then put twice as much on the server."""
        found: list[float] = []
        if self._given.sweep != "auto":
            for rate in (float(rate) for rate in self._given.sweep.split(",")):
                found.append((await self._at(rate))[0])
        else:
            rate = self._given.rate or 1.0
            for _ in range(MOST_DOUBLINGS):
                goodput, share = await self._at(rate)
                found.append(goodput)
                if share < KEEPS_UP:
                    break
                rate *= 2
            found.append((await self._at(rate / math.sqrt(2)))[0])
        saturating = max(found)
        if not saturating:
            return "no load was carried within the objectives"
        twice, _ = await self._at(2 * saturating)
        part = self.parts[-1]
        refused = part.figures["refused_ms"]
        said = (
            f"saturating load: {saturating:.4g} good answers/s; goodput at twice of it: "
            f"{twice:.4g}/s, {twice / saturating:.2f} of the best"
        )
        if refused["max"]:
            said += f"; refusals within {refused['p99']:.1f} ms (p99)"
        self.parts[-1] = replace(part, name=f"twice saturating: {part.name}")
        return said


def report(bench: Bench, given: argparse.Namespace, found: str) -> None:
    """Print the tables and write the files."""
    hidden = ("api_key", "api_key_file", "json", "html", "quiet")
    held = {k: v for k, v in vars(given).items() if k not in hidden}
    options = {k: v for k, v in held.items() if v not in ("", 0, [], None)}
    parts = bench.parts
    table([overview(part) for part in parts])
    for part in parts if len(parts) == 1 else ():
        print()
        table(times(part.figures))
        if len(lines := by_category(part.outcomes, bench.slo)) > 1:
            print()
            table(lines)
    for part in parts:
        if part.figures["lag_ms"]["p99"] > LATE_MS:
            print(f"{part.name}: this machine was late in sending; its own load shows in the times")
        told = {o.code: o.said for o in part.outcomes if o.code}
        for code, said in told.items():
            print(f"{part.name}: {code}: {said[:200]}")
    if found:
        print(f"\n{found}")
    loads = [
        {"name": part.name, **part.figures, "outcomes": [record(o) for o in part.outcomes]}
        for part in parts
    ]
    write_json(given.json, {"bench": "serve", "options": options, "found": found, "loads": loads})
    if given.html:
        Path(given.html).write_text(page(options, parts, bench.slo, found), encoding="utf-8")


def main(argv: list[str]) -> int:
    """Command line of the bench: 0 done, 1 nobody there or nothing answered, 2 wrong usage."""
    given = arguments(argv)
    try:
        bench = Bench(given, load(given.data, given.raw))
        found = uvloop.run(bench.run())
    except (Unreachable, ValueError, OSError) as error:
        print(f"spec-serve: error: {error}", file=sys.stderr)
        return 1
    report(bench, given, found)
    return 0 if any(part.figures["answered"] for part in bench.parts) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
