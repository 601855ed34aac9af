"""Server processes for tests: started on free ports, always ended.

The `tests` package is not installed; a child process finds it through a module object with our
path, so that the repository's root never comes onto the import path.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_START = (
    "import sys, types; tests = types.ModuleType('tests'); "
    f"tests.__path__ = [{str(ROOT / 'tests')!r}]; sys.modules['tests'] = tests; "
    "from tests.api.serve_echo import main; sys.exit(main())"
)


class Running:
    """A server process; ws, grpc and health are its addresses."""

    def __init__(self, process: subprocess.Popen[str], addresses: list[str]) -> None:
        self.process = process
        self.ws, self.health = addresses[0], addresses[-1]
        self.grpc = next((a.partition("://")[2] for a in addresses if a.startswith("grpc")), "")

    def ended(self, within_s: float = 60.0) -> tuple[int, str]:
        """Its exit code and what it wrote to standard error."""
        _, said = self.process.communicate(timeout=within_s)
        return self.process.returncode, said


@contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command until the block is left."""
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def echo_server(engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """A server around tests/api/echo.py. engine: arguments of Echo."""
    command = [
        sys.executable, "-P", "-W", "error", "-c", _START,
        json.dumps(settings), json.dumps(engine or {}),
    ]  # fmt: skip
    with process(command) as child:
        assert child.stdout is not None and child.stderr is not None
        line = child.stdout.readline()
        assert line, child.stderr.read()
        yield Running(child, json.loads(line))
