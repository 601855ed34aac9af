"""One engine's process: started, asked a line at a time, ended with everything it started.

Knows the protocol of runners/loop.py; not what the questions mean.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from spec_serve.bench.peers.engines import RUNNERS


class PeerError(RuntimeError):
    """The engine failed, or did not answer in time; the message holds its last words."""


class PeerProcess:
    """A context manager: the process lives in it."""

    def __init__(self, name: str, python: Path, runner: Path, options: dict[str, Any]) -> None:
        """Start it; `load` waits until it is ready."""
        self.name = name
        self._options = options
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._held = b""
        self._process = subprocess.Popen(
            [python, "-P", RUNNERS / "loop.py", runner],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            start_new_session=True, bufsize=0,
        )  # fmt: skip

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def load(self, timeout_s: float) -> dict[str, Any]:
        """Load the model; returns what the runner tells about itself."""
        return dict(self.ask({"load": self._options}, timeout_s)["ready"])

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One question, one answer. Raises PeerError."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        reply = json.loads(self._line(timeout_s))
        if "error" in reply:
            raise PeerError(f"{reply['error']}{self._last_words()}")
        return dict(reply)

    def _line(self, timeout_s: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._held:
                if not waiting.select(timeout_s):
                    self.close(0.0)
                    raise PeerError(f"no answer in {timeout_s:.0f} s")
                read = os.read(stdout.fileno(), 1 << 16)
                if not read:
                    raise PeerError(f"it ended{self._last_words()}")
                self._held += read
        line, _, self._held = self._held.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log.tell() - 4000, 0))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "; it said: " + " | ".join(lines[-3:]) if lines else ""

    def close(self, grace_s: float = 10.0) -> None:
        """End it: a closed stdin first, then by force, with whatever it started."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
