"""A server process around the tiny real engine, in which things go wrong: `main` is its whole life.

Prompts that begin with "bad0:" to "bad5:" fail in one stage of the engine each, and the clock on
the wall jumps by days all the time. Started by tests only.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spec_serve.api.server import run_server
from spec_serve.api.server_settings import ServeSettings
from spec_serve.spec.engine import Engine
from tests.api.processes import ROOT, process
from tests.api.tokens import TinyTokens
from tests.engines import engine
from tests.servers import Server

STAGES = ("submit", "open", "sources", "build", "device", "commit")
TOKENS = TinyTokens()
_CODE = (
    "import sys, types; tests = types.ModuleType('tests'); "
    f"tests.__path__ = [{str(ROOT / 'tests')!r}]; sys.modules['tests'] = tests; "
    "from tests.faulty import main; sys.exit(main())"
)


def bad(stage: str) -> str:
    """The beginning of a prompt that fails there."""
    return f"bad{STAGES.index(stage)}:"


def fails(stage: str, request: Any) -> bool:
    marker = TOKENS.encode(bad(stage))
    return list(request.prompt[: len(marker)]) == marker


def failing(real: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise RuntimeError("injected")
        return real(*args, **kwargs)

    return wrapped


def inject(made: Engine) -> None:
    """Make every stage fail for its own prompts."""
    builder: Any = made.builder
    device: Any = made._device
    build, rows = builder.build, []

    def built(picked: Any) -> Any:
        if any(fails("build", row.request) for row, _ in picked):
            raise RuntimeError("injected")
        got = build(picked)
        rows[:] = [row for row, _ in picked]
        return got

    builder.build = built
    builder.open = failing(builder.open, lambda row, *_: fails("open", row.request))
    builder._sources = failing(builder._sources, lambda row, *_: fails("sources", row.request))
    builder.commit = failing(builder.commit, lambda row, *_: fails("commit", row.request))
    device.step = failing(
        device.step, lambda job: any(fails("device", row.request) for row in rows)
    )
    whole: Any = made
    whole.submit = failing(made.submit, lambda request: fails("submit", request))


def main() -> int:
    """Serve until a signal; the exit code."""
    made = engine("lookup", kv_tokens=2048, max_rows=4)
    inject(made)
    real, jumps = time.time, itertools.cycle((0.0, 864e5, -864e5, 3e7, -3e7))

    def jumping() -> float:
        # To tell a call's remaining time gRPC subtracts this clock from its C core's, which does
        # not jump here. Its own frames are compiled: what is seen is who asked gRPC.
        asks = sys._getframe(1).f_code
        ours = asks.co_filename.endswith("grpc_call.py") and asks.co_name == "deadline"
        return real() if ours else real() + next(jumps)

    time.time = jumping

    def ready(addresses: list[str]) -> None:
        print(json.dumps(addresses), flush=True)

    settings = ServeSettings(port=0, grpc_port=0, model_name="tiny", generation_config={})
    return run_server(made, TOKENS, settings, ready)


@contextmanager
def faulty_server() -> Iterator[Server]:
    """Such a process; its standard error is read when it has ended."""
    with process([sys.executable, "-P", "-W", "error", "-c", _CODE]) as child:
        assert child.stdout is not None and child.stderr is not None
        line = child.stdout.readline()
        assert line, child.stderr.read()
        found = json.loads(line)
        at = next(one.partition("://")[2] for one in found if one.startswith("grpc"))
        yield Server(child, found[0], at, found[-1], ROOT)
