"""`spec-serve chat`: talk to a model in the terminal, and see what speculation did for each answer.

Runs the engine in this thread, as `generate` does, or asks a server (cli_connect.py). The history
is sent whole each turn, so that all but the newest message comes from the prefix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_serve.api.cli_connect import add_connection, ask, counted, failed, open_client, told
from spec_serve.api.cli_engine import open_engine
from spec_serve.api.cli_flags import Parser, add_settings, fail, read_settings, say
from spec_serve.api.cli_generate import run, show, summary
from spec_serve.api.cli_prompt import add_sampling, make_wire
from spec_serve.api.messages import BadMessage, Generate
from spec_serve.api.settings import ENGINE_GROUPS, PROCESS, SettingError
from spec_serve.client import ServerError, SyncClient

if TYPE_CHECKING:
    from spec_serve.spec.engine import Engine
    from spec_serve.target.tokenizer import Tokenizer

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends; Ctrl-C stops an answer"
Reader = Callable[[], str | None]


def parser() -> Parser:
    """The flags of `chat`."""
    made = Parser("spec-serve chat", "Talk to a model. Greedy unless --temperature is given.", HELP)
    made.add_argument("--system", metavar="TEXT", help="begin with this system message")
    add_connection(made)
    add_sampling(made, None)
    add_settings(made, (*ENGINE_GROUPS, PROCESS))
    return made


def main(argv: Sequence[str]) -> int:
    """Chat until the input ends; returns the exit code."""
    given = parser().parse_args(argv)
    try:
        settings = read_settings(given)
        mode, quiet = settings["speculation"], bool(settings["quiet"])
        if given.connect is None:
            settings.engine_fields()
        make_wire({"messages": [{"role": "user", "content": ""}]}, given, mode)
        if given.connect is not None:
            return connected(given, mode, quiet)
        engine, tokenizer = open_engine(settings)
    except (SettingError, BadMessage) as error:
        return fail(error)
    except (ValueError, OSError) as error:
        return fail(error, 1)
    if tokenizer.chat_template is None:
        return fail("this model has no chat template; use spec-serve generate --prompt", 1)
    return Conversation(Local(engine, tokenizer), given, mode, quiet).hold(_reader())


def connected(given: argparse.Namespace, mode: str, quiet: bool) -> int:
    """Chat with a server; returns the exit code. Raises SettingError."""
    client = open_client(given)
    try:
        with client as held:
            return Conversation(Remote(held), given, mode, quiet).hold(_reader())
    except (ServerError, OSError, TimeoutError) as error:
        return fail(f"connect: {failed(error)}", 1)


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


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer, what is to be said below it, and the error it ended with."""

    text: str = ""
    told: Sequence[str] = ()
    error: str = ""


class Local:
    """Answers from an engine in this thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer

    def __call__(self, wire: Generate) -> Turn:
        """Answer, shown as it comes."""
        from spec_serve.api.convert import to_request

        try:
            prepared = to_request(wire, self._tokenizer)
            self._engine.validate(prepared.request)
        except ValueError as error:  # BadMessage and RequestError
            return Turn(error=f"{error}; /reset begins afresh")
        done, text, _ = run(self._engine, prepared, show)
        print(flush=True)
        if done.error is not None:
            return Turn(text, error=str(done.error))
        told = [summary(done)]
        if done.steps:
            told.append(f"tokens per step: {counted(step.accepted + 1 for step in done.steps)}")
        return Turn(text, told)


class Remote:
    """Answers from a server."""

    def __init__(self, client: SyncClient) -> None:
        self._client = client

    def __call__(self, wire: Generate) -> Turn:
        """Answer, shown as it comes."""
        try:
            answer = ask(self._client, wire, show)
        except (ServerError, OSError, TimeoutError, BadMessage) as error:
            return Turn(error=failed(error))
        print(flush=True)
        return Turn(answer.text, told(answer))


class Conversation:
    """The messages so far, and turns taken one after another."""

    def __init__(
        self,
        answer: Callable[[Generate], Turn],
        given: argparse.Namespace,
        mode: str,
        quiet: bool = False,
    ) -> None:
        self._answer = answer
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
        if not self._quiet:
            say(HELP)
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
        self.messages.append({"role": "user", "content": text})
        try:
            wire = make_wire({"messages": self.messages}, self._given, self._mode)
        except BadMessage as error:
            turn = Turn(error=f"{error}; /reset begins afresh")
        else:
            turn = self._answer(wire)
        if turn.error:
            self.messages.pop()
            say(f"error: {turn.error}")
            return
        self.messages.append({"role": "assistant", "content": turn.text})
        if not self._quiet:
            for line in turn.told:
                say(line)
