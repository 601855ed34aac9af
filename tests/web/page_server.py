"""A server process for tests of the page: an engine that answers with what it was told to say.

The answer is the last message, so that a test types what a model shall say; some messages stand for
longer ones. Each step guesses a tree of which it accepts a part. Started by tests only, with
settings and engine arguments as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from spec_serve.api.server import run_server
from spec_serve.api.server_settings import ServeSettings
from spec_serve.spec.request import Delta, Event
from tests.api.echo import ByteTokens, Echo
from tests.web.texts import long_text

FAST_FROM = 10_000


class PageTokens(ByteTokens):
    """The prompt is what the answer will be."""

    def render_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        last = str(messages[-1]["content"])
        if last == "refuse this":
            raise ValueError("the template refuses it")
        if last == "history?":
            last = "; ".join(f"{m['role']}: {m['content']}" for m in messages)
        elif last.startswith("long "):
            last = long_text(int(last.removeprefix("long ")))
        return list(last.encode())


class Guessing(Echo):
    """Each step's tree: what was accepted, in two colours, and guesses that were wrong.

    Answers of FAST_FROM tokens and more come in larger steps.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._usual = self._run

    def _step(self, choice: Any, events: list[Event]) -> None:
        before = len(events)
        self._run = 50 if len(choice.request.prompt) >= FAST_FROM else self._usual
        super()._step(choice, events)
        for event in events[before:]:
            if isinstance(event, Delta):
                step, path = event.step, event.tokens[: event.step.accepted]
                half = len(path) // 2
                step.tree_tokens = [*path, ord("x"), ord("y"), ord("z")]
                end = len(path) - 1
                step.tree_parents = [*range(-1, end), end, end + 1, -1]
                step.drafted = len(step.tree_tokens)
                first, second = half, len(path) - half
                step.tree_sources = ["suffix"] * first + ["radix"] * (second + 3)
                step.sources = {"suffix": (first, first), "radix": (second + 3, second)}
                step.draft_us, step.verify_us, step.host_us = 300, 20000, 200


def main() -> int:
    """Serve until a signal; the exit code."""
    settings, engine = (json.loads(text) for text in sys.argv[1:3])

    def ready(addresses: list[str]) -> None:
        sys.stdout.write(json.dumps(addresses) + "\n")
        sys.stdout.flush()

    made = ServeSettings(
        **{"port": 0, "grpc_port": None, "model_name": "echo", "generation_config": {}, **settings}
    )
    return run_server(Guessing(**engine), PageTokens(), made, ready)
