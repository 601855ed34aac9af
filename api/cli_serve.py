"""`spec-serve`, also `spec-serve serve`: load a model and serve it until told to stop.

Knows the order in which things are checked: settings, then ports, then the model, so that what is
wrong is said before anything large is read. The server itself is server.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from spec_serve.api import kv_events, logs, tls
from spec_serve.api.auth import configured
from spec_serve.api.cli import command_list
from spec_serve.api.cli_engine import open_engine, open_process
from spec_serve.api.cli_flags import Parser, add_settings, fail, read_settings
from spec_serve.api.cli_notify import notify
from spec_serve.api.engine_thread import EngineThread
from spec_serve.api.ports import taken
from spec_serve.api.server_settings import ServeSettings
from spec_serve.api.settings import SettingError
from spec_serve.api.version import __version__

if TYPE_CHECKING:
    from spec_serve.api.process_child import EngineProcess
    from spec_serve.spec.engine import Engine


def parser() -> Parser:
    """The flags of `serve`."""
    made = Parser(
        "spec-serve",
        "Serve a language model with speculative decoding: the same tokens, sooner.",
        command_list(),
    )
    made.add_argument("--version", action="version", version=f"spec-serve {__version__}")
    add_settings(made)
    return made


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    given = parser().parse_args(argv)
    try:
        settings = read_settings(given)
        settings.engine_fields()
        serve = settings.serve_settings()
        if refusal := unfit(serve):
            return fail(refusal)
        logs.set_up(settings["log-format"], settings["quiet"])
        engine: Engine | EngineProcess
        thread = None
        if serve.engine_process:
            engine, tokenizer = open_process(settings)
        else:
            import spec_serve.spec.load  # noqa: F401  (two threads must not begin it both)

            thread = EngineThread()
            opening = thread.begin(lambda: open_engine(settings))
            # Found and compiled while the weights are read: a third of a second of the start.
            import spec_serve.api.server  # noqa: F401

            engine, tokenizer = opening.result()
    except SettingError as error:
        return fail(error)
    except (ValueError, OSError) as error:
        return fail(error, 1)
    from spec_serve.api.server import run_server

    try:
        return run_server(engine, tokenizer, serve, partial(ready, page=serve.page), thread)
    except (ValueError, OSError) as error:  # such as a port taken meanwhile
        return fail(error, 1)


def unfit(serve: ServeSettings) -> str | None:
    """Why nothing can be served like this, as far as can be known without a model; or None."""
    try:
        configured(serve)
        tls.context(serve)
        kv_events.addresses(serve)
    except ValueError as error:
        return str(error)
    return taken(serve.host, {"port": serve.port, "grpc-port": serve.grpc_port})


def ready(addresses: list[str], page: bool = False) -> None:
    """Say what to open; the one thing a server writes to standard output."""
    lines = ["spec-serve is ready", *(f"  {line}" for line in addresses)]
    if page:  # last: a person looks there first
        base = addresses[-1].removesuffix("/health")
        lines += [f"  {base}/v1   for OpenAI clients", f"  {base}/   to chat in a browser"]
    print("\n".join(lines), flush=True)
    notify("READY=1")
