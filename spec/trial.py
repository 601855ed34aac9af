"""Grammars tried out in a process that can be killed: some take minutes and gigabytes to compile.

Compiled code can't be interrupted from Python, and llguidance's own limits miss some sources. So a
source that comes from outside is compiled here first, over single bytes instead of a vocabulary,
within an amount of processor time and memory; what passes is compiled again by who asked. A parent
process that has everything loaded forks those that try: a new one takes milliseconds. This module
is all sides: `try_out`, and what `python -m spec_serve.spec.trial` runs. Knows no requests.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from time import monotonic

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMMAND = (sys.executable, "-P", "-m", "spec_serve.spec.trial")
WITHIN_S = 0.25  # of processor time, so that what is refused is the same on a busy machine
START_S = 20.0  # for the very first process to begin
TURN_S = 30.0  # for what has been begun: a busy machine takes longer for the same processor time
GRACE_S = 0.05  # after which a process ends by itself though nobody waits for it
MEMORY = 1 << 30  # bytes of address space
AT_ONCE = 2
NICE = 2  # the engine goes first

# A step of a matcher is given up rather than let others wait; a shared lexer stays below 100 MB.
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}


def limits() -> LLParserLimits:
    """What a matcher may use."""
    return LLParserLimits(**LIMITS, verbose_errors=False)  # type: ignore[arg-type]


class Busy(Exception):
    """There was no time to find out: the machine, or all places, are taken."""


class _Parent:
    """The process that forks others. Sent a socket, it has a new process listen to that."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip
        self.end = weakref.finalize(self, _end, self._process, self._control)
        self.begun = False  # whether anything forked has ever answered

    def fork(self) -> socket.socket:
        """The way to a new process, which may still be on its way. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


_places = threading.Semaphore(AT_ONCE)
_lock = threading.Lock()
_idle: list[socket.socket] = []  # ways to processes that have answered and wait
_parents: list[_Parent] = []  # one at most


@atexit.register
def _leave() -> None:
    for way in _idle:
        way.close()


def get_ready() -> None:
    """Have a process begin, so that nobody has to wait for that. Does not wait; errors are left to
    who needs it next."""
    with suppress(OSError), _lock:
        _parent()


def try_out(source: str, within_s: float = WITHIN_S, until: float | None = None) -> str:
    """What is wrong with a grammar for llguidance, "" = nothing. From any thread; waits.

    within_s: processor time it may take. until: monotonic seconds when it has to have begun (None:
    that may take a while). Raises Busy where it has not, or has no answer `TURN_S` later.
    """
    begun = monotonic()
    until = begun + START_S if until is None else until
    if begun > until or not _places.acquire(timeout=until - begun):
        raise Busy
    try:
        way = _way(monotonic() + TURN_S)
        said = _asked(way, source, within_s, TURN_S)
    finally:
        _places.release()
    if said is None:
        get_ready()
        return f"compiling it takes more than {within_s:g} s or {MEMORY >> 20} MB"
    return said


def _asked(way: socket.socket, source: str, within_s: float, left: float) -> str | None:
    """What a process says of it; None if it died of it. Raises Busy."""
    data = source.encode("utf-8", "surrogatepass")
    end = monotonic() + left
    try:
        way.settimeout(left)
        way.sendall(struct.pack("<ffI", within_s, left + GRACE_S, len(data)) + data)
        said = _read(way)
    except TimeoutError:
        way.close()
        raise Busy from None
    except OSError:
        said = None
    if said is None:
        way.close()
        if monotonic() >= end:  # then it may have ended for the time that passed
            raise Busy
    else:
        with _lock:
            _idle.append(way)
    return said


def _way(until: float) -> socket.socket:
    """A process that waits for work. Raises Busy."""
    for _ in range(3):
        with _lock:
            if _idle:
                return _idle.pop()
            parent = _parent()
            try:
                way = parent.fork()
            except OSError:  # somebody killed it
                _drop(parent)
                continue
        first = until if parent.begun else max(until, monotonic() + START_S)
        way.settimeout(max(first - monotonic(), 1e-3))
        try:
            if _read(way) is not None:
                parent.begun = True
                return way
        except TimeoutError:
            way.close()
            raise Busy from None
        except OSError:
            pass
        way.close()
        with _lock:
            _drop(parent)
    raise OSError("the process that tries grammars out does not start")


def _parent() -> _Parent:
    if not _parents:
        _parents.append(_Parent())
    return _parents[0]


def _drop(parent: _Parent) -> None:
    parent.end()
    if parent in _parents:
        _parents.remove(parent)


def _read(way: socket.socket) -> str | None:
    """Four bytes of length, then UTF-8; None at the end."""
    head = _exactly(way, 4)
    if head is None:
        return None
    data = _exactly(way, struct.unpack("<I", head)[0])
    return None if data is None else data.decode("utf-8", "replace")


def _exactly(way: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = way.recv(size - len(data))
        if not more:
            return None
        data += more
    return data


def main() -> None:
    """The parent: fork until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    with suppress(OSError):
        os.nice(NICE)
    tokenizer = LLTokenizer("byte")
    control = socket.socket(fileno=0)
    while True:
        message, ways, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            with socket.socket(fileno=ways[0]) as way:
                _listen(way, tokenizer)
            return
        os.close(ways[0])


def _listen(way: socket.socket, tokenizer: LLTokenizer) -> None:
    """A child: answer until the other side is gone."""
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _say(way, "")
    while (head := _exactly(way, 12)) is not None:
        within_s, left, size = struct.unpack("<ffI", head)
        data = _exactly(way, size)
        if data is None:
            return
        # Both end the process though Python does not get to run.
        signal.setitimer(signal.ITIMER_PROF, within_s)
        signal.setitimer(signal.ITIMER_REAL, left)
        source = data.decode("utf-8", "replace")
        made = LLMatcher(tokenizer, source, log_level=0, limits=limits())
        if not made.is_error():
            made.compute_bitmask()
        told = made.get_error() if made.is_error() else ""
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(way, told)
        del made


def _say(way: socket.socket, text: str) -> None:
    data = text.encode("utf-8", "replace")[: 1 << 15]
    way.sendall(struct.pack("<I", len(data)) + data)


if __name__ == "__main__":
    main()
