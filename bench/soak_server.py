"""A server started for a soak: its addresses, its memory and its books.

A child process of the same Python; its log goes to a file. Knows nothing of traffic.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc

STOP_S = 60.0


class Server:
    """A running server. ws, grpc, http: its addresses."""

    def __init__(self, process: subprocess.Popen[str], addresses: Sequence[str], log: Path) -> None:
        self._process, self._log = process, log
        found = {address.partition("://")[0]: address for address in addresses}
        self.ws, self.grpc = found["ws"], found["grpc"]
        self.http = found["http"].removesuffix("/health")

    def log(self) -> str:
        """What it wrote to standard error."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def runs(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def rss_mib(self) -> float:
        """Resident memory of the process, in MiB."""
        status = Path(f"/proc/{self._process.pid}/status")
        if status.exists():
            line = next(ln for ln in status.read_text().splitlines() if ln.startswith("VmRSS"))
            return int(line.split()[1]) / 1024
        command = ["ps", "-o", "rss=", "-p", str(self._process.pid)]
        return int(subprocess.run(command, capture_output=True, check=True).stdout) / 1024

    def stats(self) -> Any:
        """The engine's counters."""
        with grpc.insecure_channel(self.grpc.removeprefix("grpc://")) as channel:
            stub: Any = pb_grpc.SpecServeStub(channel)  # type: ignore[no-untyped-call]
            return stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10).stats

    def stop(self) -> int:
        """As SIGTERM does; the exit code, -1 if it does not end."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return -1


def unbalanced(stats: Any) -> str:
    """What is wrong in the books of an idle server whose requests had one choice each; "" if
    nothing is."""
    wrong = [
        f"{name} is {getattr(stats, name)}, not 0"
        for name in ("running", "waiting", "kv_used")
        if getattr(stats, name)
    ]
    if stats.finished != stats.requests:
        wrong.append(f"{stats.requests} requests came, {stats.finished} ended")
    return "; ".join(wrong)


@contextmanager
def server(flags: Sequence[str], start_s: float = 600.0) -> Iterator[Server]:
    """`spec-serve` on free ports with these flags. Raises RuntimeError if it does not start."""
    command = [
        sys.executable, "-P", "-m", "spec_serve.api.cli", "serve", *flags,
        "--host", "127.0.0.1", "--port", "0", "--grpc-port", "0",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with (
            log.open("w") as stderr,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
        ):
            try:
                yield Server(process, _addresses(process, log, start_s), log)
            finally:
                if process.poll() is None:
                    process.kill()


def _addresses(process: subprocess.Popen[str], log: Path, start_s: float) -> list[str]:
    assert process.stdout is not None
    found: list[str] = []
    end = time.monotonic() + start_s
    while not any(address.startswith("http") for address in found):
        line = process.stdout.readline()
        if not line or time.monotonic() > end:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:].strip()}")
        if "://" in line:
            found.append(line.strip())
    return found
