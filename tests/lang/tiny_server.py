"""A server in this process around the tiny real model, for programs. Imported by tests only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from spec_serve.api.server import Server
from spec_serve.api.server_settings import ServeSettings
from spec_serve.spec import compiler
from spec_serve.target.tokenizer import Tokenizer, load_tokenizer
from tests.engines import engine
from tests.tiny import write_tiny_model_dir


@cache
def tokenizer() -> Tokenizer:
    """The tiny model's."""
    with TemporaryDirectory() as place:
        return load_tokenizer(write_tiny_model_dir(Path(place)))


@asynccontextmanager
async def running(kind: str = "lookup") -> AsyncIterator[Server]:
    """The server. kind: of the drafts."""
    settings = ServeSettings(
        port=0, grpc_port=None, model_name="tiny", drain_s=5.0, generation_config={}
    )
    server = Server(engine(kind, spelling=tokenizer()), tokenizer(), settings)
    usual, compiler.ANSWER_S = compiler.ANSWER_S, 60.0  # waited for, also on a busy machine
    try:
        await server.start()
        yield server
    finally:
        compiler.ANSWER_S = usual
        await server.close()


@asynccontextmanager
async def tiny_server(kind: str = "lookup") -> AsyncIterator[str]:
    """The address of its WebSocket."""
    async with running(kind) as server:
        yield server.addresses()[0]
