"""The Python clients of a spec-serve server: WebSocket and gRPC, async and sync.

`Client` and `SyncClient` speak over a WebSocket, `GrpcClient` and `SyncGrpcClient` over gRPC; all
have `generate`, `complete` and `chat`, and give the same events. Imports no torch, and gRPC only
when one of its clients is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_serve.api.messages import JSON, MSGPACK, BadMessage
from spec_serve.client.answers import (
    Answer,
    Choice,
    ConnectionLost,
    GenerationEvent,
    ServerError,
)
from spec_serve.client.sync import SyncClient
from spec_serve.client.tls import Tls
from spec_serve.client.websocket import Client

if TYPE_CHECKING:
    from spec_serve.client.rpc import GrpcClient, SyncGrpcClient

__all__ = [
    "JSON",
    "MSGPACK",
    "Answer",
    "BadMessage",
    "Choice",
    "Client",
    "ConnectionLost",
    "GenerationEvent",
    "GrpcClient",
    "ServerError",
    "SyncClient",
    "SyncGrpcClient",
    "Tls",
]


def __getattr__(name: str) -> Any:
    if name in ("GrpcClient", "SyncGrpcClient"):
        from spec_serve.client import rpc

        return getattr(rpc, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
