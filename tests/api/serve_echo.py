"""A server process around the echoing engine: `python -c CODE settings-as-json engine-as-json`.

Its own process, because gRPC wants to be alone with its one event loop. Prints the addresses as one
line of JSON once it listens. Started by tests only.
"""

from __future__ import annotations

import json
import sys

from spec_serve.api.server import run_server
from spec_serve.api.server_settings import ServeSettings
from spec_serve.spec import compiler
from tests.api.echo import ByteTokens, Echo


def main() -> int:
    """Serve until a signal; the exit code."""
    settings, engine = (json.loads(text) for text in sys.argv[1:3])
    compiler.ANSWER_S = 60.0  # on a busy machine a constraint is waited for and not put off

    def ready(addresses: list[str]) -> None:
        sys.stdout.write(json.dumps(addresses) + "\n")
        sys.stdout.flush()

    made = ServeSettings(
        **{"port": 0, "grpc_port": 0, "model_name": "echo", "generation_config": {}, **settings}
    )
    return run_server(Echo(**engine), ByteTokens(), made, ready)
