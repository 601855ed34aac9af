"""What is asked for in a load test: prompts of data sets in JSON lines, or built-in ones.

Knows four public shapes of a line: {"messages": [...]}, {"prompt": "..."},
Spec-Bench's {"category", "turns"} and HumanEval's {"task_id", "prompt"}; asks nobody.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_serve.bench.prompts import BUILT_IN


@dataclass(frozen=True, slots=True)
class Question:
    """One request: `messages` of a conversation, or a raw `prompt`. category: for the report.

    max_tokens: where the data set says it.
    """

    category: str
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str = ""
    max_tokens: int | None = None


def load(paths: Sequence[str], raw: bool = False) -> list[Question]:
    """The questions of these files in order, or the built-in ones. raw: as prompts, no messages.

    Raises ValueError naming the file and line that can't be used, OSError.
    """
    made: list[Question] = []
    if not paths:
        for prompt in BUILT_IN:
            turn = {"role": "user", "content": prompt.turns[0]}
            made.append(Question(prompt.category, (turn,)))
    for path in paths:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                try:
                    made.append(_question(json.loads(line), Path(path).stem))
                except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                    told = f"{path}, line {number}: not a prompt ({error})"
                    raise ValueError(told) from error
    if not made:
        raise ValueError(f"{', '.join(paths)}: no prompts in there")
    return [_raw(question) for question in made] if raw else made


def _question(entry: Any, name: str) -> Question:
    if not isinstance(entry, dict):
        raise ValueError("a line must hold an object")
    category = str(entry.get("category", name))
    most = entry.get("max_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ValueError("max_tokens must be a positive number")
    if "messages" in entry:
        messages = entry["messages"]
        if not messages or not all(isinstance(turn["content"], str) for turn in messages):
            raise ValueError("messages must be a list of {role, content}")
        turns = tuple({"role": str(t["role"]), "content": t["content"]} for t in messages)
        return Question(category, turns, max_tokens=most)
    if "turns" in entry:
        first = entry["turns"][0]
        if not isinstance(first, str):
            raise ValueError("turns must be texts")
        return Question(category, ({"role": "user", "content": first},), max_tokens=most)
    prompt = entry["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("prompt must be a text")
    if "task_id" in entry and "category" not in entry:
        category = "humaneval"
    return Question(category, prompt=prompt, max_tokens=most)


def _raw(question: Question) -> Question:
    text = "\n\n".join(str(turn["content"]) for turn in question.messages) or question.prompt
    return Question(question.category, (), text, question.max_tokens)
