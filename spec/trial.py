"""Grammars tried out in a process that can be killed: some take minutes and gigabytes to compile.

Compiled code can't be interrupted from Python, and llguidance's own limits miss some sources. So a
source that comes from outside is compiled here first, over single bytes instead of a vocabulary,
within a time and an amount of memory; what passes is compiled again by who asked. This module is
both sides: `try_out`, and what `python -m spec_serve.spec.trial` runs. Knows no requests.
"""

from __future__ import annotations

import selectors
import signal
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from time import monotonic
from typing import IO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMMAND = (sys.executable, "-P", "-m", "spec_serve.spec.trial")
WITHIN_S = 0.8
START_S = 20.0  # for the process itself to begin
MEMORY = 1 << 30  # bytes of address space beyond what the process begins with
AT_ONCE = 2

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


class _Trial:
    """One process. Said to it and by it: four bytes of length, then UTF-8."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self.end = weakref.finalize(self, _end, self._process)
        if self._receive(START_S) is None:
            self.end()
            raise OSError("the process that tries grammars out does not start")

    def run(self, source: str, within_s: float) -> str | None:
        """What is wrong with it, "" = nothing; None if it had to be killed."""
        data = source.encode("utf-8", "surrogatepass")
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(struct.pack("<fI", within_s, len(data)) + data)
            self._process.stdin.flush()
            said = self._receive(within_s)
        except OSError:
            said = None
        if said is None:
            self.end()
        return said

    def _receive(self, within_s: float) -> str | None:
        """What it says, None if it doesn't in time."""
        out = self._process.stdout
        assert out is not None
        until = monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(max(until - monotonic(), 0.0)):
                return None
        # Whatever it says is short and said at once.
        return _read(out)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _read(pipe: IO[bytes]) -> str | None:
    head = pipe.read(4)
    if len(head) < 4:
        return None
    return pipe.read(struct.unpack("<I", head)[0]).decode("utf-8", "replace")


_places = threading.Semaphore(AT_ONCE)
_lock = threading.Lock()
_idle: list[_Trial] = []


def get_ready() -> None:
    """Start a process if none waits, so that nobody has to wait for that. Errors are left to who
    needs it next."""
    with _lock:
        if _idle:
            return
    with suppress(OSError):
        made = _Trial()
        with _lock:
            spare = bool(_idle)
            if not spare:
                _idle.append(made)
        if spare:
            made.end()


def try_out(source: str, within_s: float = WITHIN_S) -> str:
    """What is wrong with a grammar for llguidance, "" = nothing. From any thread; waits."""
    with _places:
        with _lock:
            trial = _idle.pop() if _idle else None
        trial = trial or _Trial()
        said = trial.run(source, within_s)
        if said is None:
            threading.Thread(target=get_ready, name="grammar trial", daemon=True).start()
            return f"compiling it takes more than {within_s:g} s or {MEMORY >> 20} MB"
        with _lock:
            _idle.append(trial)
        return said


def main() -> None:
    """Answer until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")
    _say("")
    while len(head := sys.stdin.buffer.read(8)) == 8:
        within_s, size = struct.unpack("<fI", head)
        source = sys.stdin.buffer.read(size).decode("utf-8", "replace")
        # Ends the process though Python does not get to run.
        signal.setitimer(signal.ITIMER_REAL, within_s + 0.5)
        made = LLMatcher(tokenizer, source, log_level=0, limits=limits())
        if not made.is_error():
            made.compute_bitmask()
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(made.get_error() if made.is_error() else "")
        del made


def _say(text: str) -> None:
    data = text.encode("utf-8", "replace")[: 1 << 15]
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
