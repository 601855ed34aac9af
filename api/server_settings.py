"""What the server needs to know before it starts: addresses, names and the time a drain may take.

Kept apart from the server so that the command line can read and check settings without importing
torch, gRPC or uvicorn. Knows nothing of models beyond the name a client sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BLOCK_TOKENS = 16  # of a block in cache events; what routers expect


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Where and how to serve. Port 0 = a free port; grpc_port None = no gRPC.

    model_name: the name clients see. ws_impl: WebSocket implementation given to uvicorn.
    allow_origins: origins of web pages that may connect besides the server's own; "*" = any.
    drain_s: seconds running requests get to finish after the first SIGTERM or SIGINT.
    generation_config: sampling defaults as in a generation_config.json; None = the model's own.
    api_keys, api_key_file, admin_key: who may use the server, see api/auth.py; anonymous: serve
    without keys beyond loopback. tls_*: PEM files; tls_client_ca asks clients for certificates.
    engine_process: run the engine in a process of its own; engine_hang_s: how long that may make no
    progress, 0 = for ever. max_queue, max_queue_tokens: requests
    and prompt tokens that may wait, 0 = no bound. *_timeout_s: 0 = none. key_*: per key, 0 = none.
    kv_events: ZMQ address, or grpc for subscribers by gRPC alone, "" = none.
    otel_endpoint: OTLP over HTTP, "" = none. programs: a folder of compiled programs, "" = none;
    program_functions: the Python module whose functions they may call. adapt_folder: where traffic
    is kept as token ids, "" = nowhere; adapt_mib: how much; adapt_salted: also with a cache salt.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = 50051
    model_name: str = ""
    ws_impl: str = "picows"
    allow_origins: tuple[str, ...] = ()
    drain_s: float = 30.0
    generation_config: Mapping[str, Any] | None = None
    api_keys: tuple[str, ...] = ()
    api_key_file: str = ""
    admin_key: str = ""
    anonymous: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    engine_process: bool = False
    engine_hang_s: float = 300.0
    page: bool = True
    reflection: bool = True
    max_queue: int = 256
    max_queue_tokens: int = 0
    first_token_timeout_s: float = 0.0
    total_timeout_s: float = 0.0
    key_parallel: int = 0
    key_requests_per_minute: int = 0
    key_tokens_per_minute: int = 0
    resume_window_s: float = 60.0
    metrics_compat: str = "none"
    kv_events: str = ""
    kv_events_replay: str = ""
    otel_endpoint: str = ""
    programs: str = ""
    program_functions: str = ""
    adapt_folder: str = ""
    adapt_mib: int = 64
    adapt_salted: bool = False
