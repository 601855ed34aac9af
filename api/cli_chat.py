"""`spec-serve chat`: talk to a model in the terminal, and see what speculation did for each answer.

Runs the engine in this thread, as `generate` does; the history is sent whole each turn, so that
all but the newest message comes from the prefix cache. Knows no transport.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spec_serve.api.cli_engine import open_engine
from spec_serve.api.cli_flags import Parser, add_settings, fail, read_settings, say
from spec_serve.api.cli_generate import run, show, summary
from spec_serve.api.cli_prompt import add_sampling, make_wire
from spec_serve.api.messages import BadMessage
from spec_serve.api.settings import ENGINE_GROUPS, PROCESS, SettingError

if TYPE_CHECKING:
    from spec_serve.spec.completion import Completion
    from spec_serve.spec.engine import Engine
    from spec_serve.target.tokenizer import Tokenizer

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends; Ctrl-C stops an answer"
Reader = Callable[[], str | None]


def parser() -> Parser:
    """The flags of `chat`."""
    made = Parser("spec-serve chat", "Talk to a model. Greedy unless --temperature is given.", HELP)
    made.add_argument("--system", metavar="TEXT", help="begin with this system message")
    add_sampling(made, None)
    add_settings(made, (*ENGINE_GROUPS, PROCESS))
    return made


def main(argv: Sequence[str]) -> int:
    """Chat until the input ends; returns the exit code."""
    given = parser().parse_args(argv)
    try:
        settings = read_settings(given)
        settings.engine_fields()
        mode = settings["speculation"]
        make_wire({"messages": [{"role": "user", "content": ""}]}, given, mode)
        engine, tokenizer = open_engine(settings)
    except (SettingError, BadMessage) as error:
        return fail(error)
    except (ValueError, OSError) as error:
        return fail(error, 1)
    if tokenizer.chat_template is None:
        return fail("this model has no chat template; use spec-serve generate --prompt", 1)
    if not settings["quiet"]:
        say(HELP)
    return Conversation(engine, tokenizer, given, mode, bool(settings["quiet"])).hold(_reader())


def _reader() -> Reader:
    """Asks for a line on a terminal, with editing and history; else takes one from the input."""
    if not sys.stdin.isatty():
        return lambda: line.removesuffix("\n") if (line := sys.stdin.readline()) else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it is what makes input() editable

    def ask() -> str | None:
        try:
            return input("> ")
        except EOFError:
            return None

    return ask


class Conversation:
    """The messages so far, and turns taken one after another."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        given: argparse.Namespace,
        mode: str,
        quiet: bool = False,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._given = given
        self._mode = mode
        self._quiet = quiet
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        system = self._given.system
        self.messages = [{"role": "system", "content": system}] if system is not None else []

    def hold(self, read: Reader) -> int:
        """Take turns until `read` gives None; returns the exit code."""
        while True:
            try:
                line = read()
            except KeyboardInterrupt:
                line = None
            if line is None or line.strip() in ("/quit", "/exit"):
                return 0
            match line.strip():
                case "":
                    continue
                case "/reset":
                    self.reset()
                    say("forgotten")
                case "/help":
                    say(HELP)
                case _:
                    self.turn(line)

    def turn(self, text: str) -> None:
        """One message and its answer. What can't be answered is not kept."""
        from spec_serve.api.convert import to_request

        self.messages.append({"role": "user", "content": text})
        try:
            wire = make_wire({"messages": self.messages}, self._given, self._mode)
            prepared = to_request(wire, self._tokenizer)
            self._engine.validate(prepared.request)
        except ValueError as error:  # BadMessage and RequestError
            self.messages.pop()
            say(f"error: {error}; /reset begins afresh")
            return
        done, answer, _ = run(self._engine, prepared, show)
        print(flush=True)
        if done.error is not None:
            self.messages.pop()
            say(f"error: {done.error}")
            return
        self.messages.append({"role": "assistant", "content": answer})
        if not self._quiet:
            say(summary(done))
            if done.steps:
                say(f"tokens per step: {steps_line(done)}")


def steps_line(done: Completion) -> str:
    """How many steps gave how many tokens: "1 x12, 3 x4"."""
    counts = Counter(step.accepted + 1 for step in done.steps)
    return ", ".join(f"{tokens} x{steps}" for tokens, steps in sorted(counts.items()))
