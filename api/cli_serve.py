"""`spec-serve`, also `spec-serve serve`: load a model and serve it until told to stop.

Knows the order in which things are checked: settings, then ports, then the model, so that what is
wrong is said before anything large is read. The server itself is server.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

from spec_serve.api import logs
from spec_serve.api.cli import command_list
from spec_serve.api.cli_engine import open_engine
from spec_serve.api.cli_flags import Parser, add_settings, fail, read_settings
from spec_serve.api.ports import taken
from spec_serve.api.settings import SettingError
from spec_serve.api.version import __version__


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
        refusal = taken(serve.host, {"port": serve.port, "grpc-port": serve.grpc_port})
        if refusal:
            return fail(refusal)
        logs.set_up(settings["log-format"], settings["quiet"])
        engine, tokenizer = open_engine(settings)
    except SettingError as error:
        return fail(error)
    except (ValueError, OSError) as error:
        return fail(error, 1)
    from spec_serve.api.server import run_server

    return run_server(engine, tokenizer, serve, ready)


def ready(host: str, port: int, grpc_port: int | None) -> None:
    """Say what to open; the one thing a server writes to standard output."""
    print("\n".join(addresses(host, port, grpc_port)), flush=True)


def addresses(host: str, port: int, grpc_port: int | None) -> list[str]:
    """What to open, a line each. The address "any" is shown as this machine's loopback."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    if ":" in shown:
        shown = f"[{shown}]"
    lines = [
        "spec-serve is ready",
        f"  WebSocket  ws://{shown}:{port}/v1/stream",
        f"  health     http://{shown}:{port}/health",
    ]
    if grpc_port is not None:
        lines.append(f"  gRPC       {shown}:{grpc_port}")
    return lines
