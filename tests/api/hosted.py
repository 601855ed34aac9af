"""An engine behind a socketpair, worked by the same code as in a process of its own.

The worker runs in a thread here, so that tests can reach into the engine. Imported by tests only.
"""

from __future__ import annotations

import socket
import threading

from spec_serve.api import process_messages as p
from spec_serve.api.link import Runs
from spec_serve.api.process_channel import Channel
from spec_serve.api.process_child import Child, EngineProcess, launch
from spec_serve.api.process_engine import Tell, Worker
from spec_serve.api.text import TokenTable
from tests.api.echo import ByteTokens

KINDS = ("thread", "process")


class Hosted:
    """A Child whose engine runs in a thread."""

    def __init__(self, engine: Runs, tokenizer: TokenTable) -> None:
        self.engine = engine
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._theirs = theirs
        self._tokenizer = tokenizer
        self.code: int | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        worker = Worker(Channel(self._theirs), self._orphaned)
        self.code = worker.run(self._load)
        self._theirs.shutdown(socket.SHUT_RDWR)  # the reading thread ends, too

    def _orphaned(self) -> None:
        self.engine.stop()
        self._theirs.close()

    def _load(self, asked: p.Load, tell: Tell) -> tuple[Runs, TokenTable]:
        tell("target", 1.0)
        return self.engine, self._tokenizer

    def kill(self) -> None:
        raise AssertionError("a thread can't be killed")

    def ended(self, within_s: float) -> str:
        self._thread.join(within_s)
        return f"exit code {self.code}"


def hosted(engine: Runs, tokenizer: TokenTable | None = None) -> EngineProcess:
    """Ready to be linked; a second start fails, as this engine can end only once."""
    first = [Hosted(engine, tokenizer or ByteTokens())]

    def start() -> Child:
        if not first:
            raise OSError("a hosted engine is not started again")
        return first.pop()

    return launch(p.Load({}), lambda what, share: None, start)
