"""Starting the process that runs the engine, and waiting until it has loaded.

Knows commands, descriptors and exit codes; what is said over the socket is process_messages.py's,
living with the process process_link.py's business.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from spec_serve.api import process_messages as p
from spec_serve.api.process_channel import Channel
from spec_serve.spec.admission import EngineInfo, Limits

COMMAND = (sys.executable, "-P", "-m", "spec_serve.api.process_engine")
STDERR = 2  # also what the child says on standard output: ours is for the addresses alone


class Child(Protocol):
    """A running engine behind a channel."""

    channel: Channel

    def kill(self) -> None:
        """End it at once."""
        ...

    def ended(self, within_s: float) -> str:
        """Wait for its end, bring it about if it does not come; how it ended."""
        ...


class ChildProcess:
    """A process with one end of a socketpair as its last argument.

    It gets a process group of its own: what a terminal's Ctrl-C ends is the server, which then ends
    the engine in good order.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A new program, not a fork: gRPC's and torch's threads don't survive one.
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                process_group=0,
            )
        self.pid = self._process.pid
        self.channel = Channel(ours)

    def kill(self) -> None:
        """See Child."""
        self._process.kill()

    def ended(self, within_s: float) -> str:
        """See Child."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "did not end by itself"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"


class EngineProcess:
    """An engine that has loaded in a process of its own, and how to get another one like it.

    info, limits: as the engine told them. Made by `launch`.
    """

    def __init__(
        self, start: Callable[[], Child], load: p.Load, child: Child, ready: p.Ready
    ) -> None:
        self.start, self.load, self.child = start, load, child
        self.info: EngineInfo = ready.info
        self.limits: Limits = ready.limits

    def close(self) -> None:
        """End it, if no link has it."""
        self.child.channel.sock.close()
        self.child.ended(1.0)


def launch(
    load: p.Load,
    told: Callable[[str, float], None],
    start: Callable[[], Child] = ChildProcess,
) -> EngineProcess:
    """Start the engine and wait until it has loaded; told: its progress.

    Raises ValueError with the engine's own words for what a user can mend, and OSError if the
    process ends without any.
    """
    child = start()
    channel = child.channel
    try:
        channel.send(p.encode(load))
        while (payload := channel.receive()) is not None:
            match p.for_server(payload):
                case p.Loading(what, share):
                    told(what, share)
                case p.Ready() as ready:
                    return EngineProcess(start, load, child, ready)
                case p.Failed(message):
                    raise ValueError(message)
                case _:
                    raise AssertionError("nothing else is said before it is ready")
        how = child.ended(5.0)
        raise OSError(f"the engine's process ended while it was loading ({how})")
    except BaseException:
        channel.sock.close()
        child.ended(1.0)
        raise
