"""What a target answered to the training prompts: tasks, and the file their answers are kept in.

Answers are lines of JSON, appended as they come, so that a run that was broken off goes on where it
ended. Every 25th prompt is held out by its text alone, whatever else is asked. Who answers is the
caller's business.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD_OUT = 25
"""One prompt in so many is never trained on."""


@dataclass(frozen=True, slots=True)
class Task:
    """One answer that is wanted. held: it is only ever measured on."""

    number: int
    source: str
    prompt: str
    temperature: float
    held: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A task's prompt (template included) and what followed, as token ids."""

    number: int
    source: str
    temperature: float
    held: bool
    prompt: Sequence[int]
    answer: Sequence[int]


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(source, prompt) of each line of JSON. ValueError names the line that is not one."""
    found = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                read: Any = json.loads(line)
                found.append((str(read.get("source", "")), str(read["prompt"])))
            except (ValueError, KeyError, AttributeError) as error:
                raise ValueError(
                    f"{path.name}: line {number}: not an object with a prompt"
                ) from error
    return found


def read_traffic(path: Path) -> list[tuple[list[dict[str, str]], str]]:
    """(messages, answer) of each line of JSON. ValueError names the line that is not one."""
    found = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                read: Any = json.loads(line)
                messages = [
                    {"role": str(one["role"]), "content": str(one["content"])}
                    for one in read["messages"]
                ]
                found.append((messages, str(read["answer"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path.name}: line {number}: not an object with messages and answer"
                ) from error
    return found


def held_out(text: str) -> bool:
    """Whether what belongs to this text is only ever measured on."""
    return zlib.crc32(text.encode()) % HELD_OUT == 0


def make_tasks(
    prompts: Sequence[tuple[str, str]],
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    often: Sequence[str] = ("self-instruct",),
    seed: int = 1,
) -> list[Task]:
    """The answers wanted, in a fixed random order.

    Half of the prompts are answered greedily, the others at one of `temperatures`; those whose
    source begins with a word of `often` at each of them. Held-out ones are answered greedily.
    """
    made: list[tuple[str, str, float, bool]] = []
    for source, prompt in prompts:
        code = zlib.crc32(prompt.encode())
        chance = random.Random(code + seed)
        if held_out(prompt):
            made.append((source, prompt, 0.0, True))
        elif source.startswith(tuple(often)):
            made += [(source, prompt, temperature, False) for temperature in temperatures]
        else:
            chosen = 0.0 if chance.random() < 0.5 else chance.choice(list(temperatures))
            made.append((source, prompt, chosen, False))
    random.Random(seed).shuffle(made)
    return [Task(number, *one) for number, one in enumerate(made)]


def read_answers(path: Path) -> Iterator[Answer]:
    """The answers of a file; a last line that was cut short is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return
            read = json.loads(line)
            yield Answer(
                read["n"], read["source"], read["temperature"], read["held"],
                read["prompt"], read["answer"],
            )  # fmt: skip


def add_answers(path: Path, answers: Iterable[Answer]) -> int:
    """Append answers, each as soon as it comes; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _mend(path)
    added = 0
    with path.open("a", encoding="utf-8") as out:
        for one in answers:
            line = {
                "n": one.number, "source": one.source, "temperature": one.temperature,
                "held": one.held, "prompt": list(one.prompt), "answer": list(one.answer),
            }  # fmt: skip
            out.write(json.dumps(line, separators=(",", ":")) + "\n")
            out.flush()
            added += 1
    return added


def _mend(path: Path) -> None:
    """Cut off a last line that was not written to its end."""
    if not path.exists() or not path.stat().st_size:
        return
    held = path.read_bytes()
    if not held.endswith(b"\n"):
        path.write_bytes(held[: held.rfind(b"\n") + 1])
