"""What the server needs to know before it starts: addresses, names and the time a drain may take.

Kept apart from the server so that the command line can read and check settings without importing
torch, gRPC or uvicorn. Knows nothing of models beyond the name a client sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Where and how to serve. Port 0 = a free port; grpc_port None = no gRPC.

    model_name: the name clients see. ws_impl: WebSocket implementation given to uvicorn.
    allow_origins: origins of web pages that may connect besides the server's own; "*" = any.
    drain_s: seconds running requests get to finish after the first SIGTERM or SIGINT.
    generation_config: sampling defaults as in a generation_config.json; None = the model's own.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = 50051
    model_name: str = ""
    ws_impl: str = "websockets"
    allow_origins: tuple[str, ...] = ()
    drain_s: float = 30.0
    generation_config: Mapping[str, Any] | None = None
