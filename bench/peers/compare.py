"""The comparison itself: every prompt through every engine, by turns, and the times kept.

One engine computes at a time. The order of the engines changes with every prompt and repeat, so
that whatever else the machine does falls on all of them. An engine that fails is left out from
then on, and the reason kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from spec_serve.bench.peers.engines import Chosen
from spec_serve.bench.peers.process import PeerError, PeerProcess

WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as token ids."""

    category: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer. first_s: until the first tokens (first_tokens of them came at once); total_s:
    until the last. same: leading tokens equal to the reference engine's (the first one's) answer to
    the same prompt."""

    engine: str
    prompt: int
    category: str
    repeat: int
    prompt_tokens: int
    tokens: int
    first_tokens: int
    first_s: float
    total_s: float
    same: int


@dataclass(slots=True)
class _Engine:
    name: str
    mode: str
    process: PeerProcess
    failed: bool = False


def _all(chosen: Sequence[Chosen], options: dict[str, Any], timeout_s: float, stack: ExitStack,
         told: dict[str, Any], skipped: dict[str, str]) -> list[_Engine]:  # fmt: skip
    """Every engine loaded and asked once, one after the other."""
    engines: list[_Engine] = []
    for one in chosen:
        label = one.peer.name if not one.peer.apart else f"{one.peer.name}/{one.modes[0]}"
        process = stack.enter_context(
            PeerProcess(label, one.python, one.peer.runner, {**options, "modes": one.modes})
        )
        begun = perf_counter()
        try:
            about = process.load(timeout_s)
        except PeerError as error:
            skipped[label] = str(error)
            process.close()
            continue
        told[label] = {**about, "load_s": round(perf_counter() - begun, 2)}
        engines += [_Engine(f"{one.peer.name}/{mode}", mode, process) for mode in one.modes]
    return engines


def compare(
    chosen: Sequence[Chosen],
    questions: Sequence[Question],
    options: dict[str, Any],
    *,
    max_tokens: int,
    repeats: int,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """{"engines": what each told, "skipped": {engine: why not}, "runs": [Timed as dicts]}.

    options: for the runners (model, draft, threads, context, eos). The first engine that answers a
    prompt in its first repeat gives the reference.
    """
    told: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    runs: list[Timed] = []
    with ExitStack() as stack:
        engines = _all(chosen, options, timeout_s, stack, told, skipped)

        def ask(engine: _Engine, ids: list[int], count: int) -> dict[str, Any] | None:
            try:
                return engine.process.ask(
                    {"ids": ids, "mode": engine.mode, "max_tokens": count}, timeout_s
                )
            except PeerError as error:
                skipped[engine.name], engine.failed = str(error), True
                say(f"{engine.name}: left out: {error}")
                return None

        for engine in engines:
            ask(engine, questions[0].ids, WARM_TOKENS)
        for repeat in range(repeats):
            for number, question in enumerate(questions):
                answers: dict[str, dict[str, Any]] = {}
                for engine in _turned([e for e in engines if not e.failed], number + repeat):
                    if answer := ask(engine, question.ids, max_tokens):
                        answers[engine.name] = answer
                first = next((e.name for e in engines if e.name in answers), None)
                reference: list[int] = answers[first]["ids"] if first is not None else []
                new = [
                    _timed(name, number, question, repeat, answer, reference)
                    for name, answer in answers.items()
                ]
                runs += new
                said = ", ".join(f"{one.engine} {speed(asdict(one)):.1f}" for one in new)
                say(f"{repeat + 1}/{repeats} {question.category}: {said} tok/s")
    return {
        "engines": told,
        "skipped": skipped,
        "order": [engine.name for engine in engines if not engine.failed],
        "runs": [asdict(run) for run in runs if run.engine not in skipped],
    }


def _turned(engines: list[_Engine], by: int) -> list[_Engine]:
    at = by % len(engines) if engines else 0
    return engines[at:] + engines[:at]


def _timed(
    name: str, number: int, question: Question, repeat: int, answer: dict[str, Any],
    reference: list[int],
) -> Timed:  # fmt: skip
    ids = answer["ids"]
    same = 0
    while same < min(len(ids), len(reference)) and ids[same] == reference[same]:
        same += 1
    return Timed(
        name, number, question.category, repeat, len(question.ids), len(ids),
        answer.get("first_tokens", 1), round(answer["first_s"], 5), round(answer["total_s"], 5),
        same,
    )  # fmt: skip


def speed(run: dict[str, Any]) -> float:
    """Tokens after the first ones per second of decoding; 0 if there were none."""
    took, tokens = run["total_s"] - run["first_s"], run["tokens"] - run["first_tokens"]
    return float(tokens / took) if tokens > 0 and took > 0 else 0.0
