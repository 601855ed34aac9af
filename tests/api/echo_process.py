"""The echoing engine as a process of its own; how tests start it.

`asked.options` are Echo's arguments and "load_s", how long loading takes, or {"refuse": TEXT} and
{"exit": CODE} for one that can't load. Imported by tests and by the processes they start.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from spec_serve.api import process_messages as p
from spec_serve.api.process_child import ChildProcess, EngineProcess, launch
from spec_serve.api.process_engine import Opened, Tell
from spec_serve.api.process_engine import main as work
from tests.api.echo import ByteTokens, Echo

TESTS = Path(__file__).resolve().parents[1]
# The `tests` package is not installed, and the repository's root must not come onto the path.
COMMAND = (
    sys.executable, "-P", "-W", "error", "-c",
    "import sys, types; tests = types.ModuleType('tests'); "
    f"tests.__path__ = [{str(TESTS)!r}]; sys.modules['tests'] = tests; "
    "from tests.api.echo_process import main; sys.exit(main())",
)  # fmt: skip


def main() -> int:
    """The process's whole life."""
    return work(sys.argv[1:], load)


def load(asked: p.Load, tell: Tell) -> Opened:
    options = dict(asked.options)
    time.sleep(options.pop("load_s", 0.0))
    if "refuse" in options:
        raise ValueError(options["refuse"])
    if "exit" in options:
        os._exit(options["exit"])
    tell("target", 0.5)
    return Echo(**options), ByteTokens()


def echo_process(**options: object) -> EngineProcess:
    """An echoing engine that has loaded in a process of its own."""
    return launch(p.Load(options), lambda what, share: None, lambda: ChildProcess(COMMAND))
