"""One stream over each transport, piece by piece, whatever becomes of it; and a relay that breaks.

For tests of faults: nothing a server or a network does raises here, it is told as the stream's end.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from grpc_status import rpc_status
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from spec_serve.api import messages as m
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from tests.servers import from_status, to_openai, to_proto

CUT = "cut"  # an end that is none, as a client can tell


class Stream:
    """Iterate for its pieces of text; `end` afterwards: a reason, an error's code, or CUT."""

    def __init__(self, address: str, transport: str, **fields: Any) -> None:
        """address: HOST:PORT of what speaks that transport."""
        self.end = ""
        self._address, self._transport, self._fields = address, transport, fields

    def __iter__(self) -> Iterator[str]:
        made = {"http": self._http, "grpc": self._grpc}.get(self._transport, self._socket)
        try:
            yield from made()
        except (OSError, http.client.HTTPException, EOFError):
            self.end = CUT

    def whole(self) -> tuple[str, str]:
        """(end, text)."""
        text = "".join(self)
        return self.end, text

    def _http(self) -> Iterator[str]:
        path, body = to_openai(**self._fields)
        connection = http.client.HTTPConnection(self._address, timeout=60)
        self.end = CUT
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            answer = connection.getresponse()
            if answer.status != 200:
                self.end = json.loads(answer.read())["error"]["code"]
                return
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.end = event["error"]["code"]
                else:
                    choice = event["choices"][0]
                    self.end = choice["finish_reason"] or self.end
                    yield choice["text"]
        finally:
            connection.close()

    def _grpc(self) -> Iterator[str]:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        with grpc.insecure_channel(self._address, options) as channel:
            stub: Any = pb_grpc.SpecServeStub(channel)
            try:
                for event in stub.Generate(to_proto(**self._fields), timeout=60):
                    if event.HasField("delta"):
                        yield event.delta.text
                    elif event.HasField("finished"):
                        self.end = pb.Finished.Reason.Name(event.finished.reason).lower()
            except grpc.RpcError as error:
                known = rpc_status.from_call(error) is not None
                self.end = from_status(error)[0] if known else CUT

    def _socket(self) -> Iterator[str]:
        codec, name = m.Codec(self._transport), Subprotocol(self._transport)
        try:
            with connect(
                f"ws://{self._address}/v1/stream", subprotocols=[name], proxy=None,
                close_timeout=0.2, open_timeout=60,
            ) as opened:  # fmt: skip
                frame = codec.encode({"type": "generate", "gen": "g", **self._fields})
                opened.send(frame.decode() if codec.text else frame)
                while True:
                    message = codec.server_message(opened.recv(60))
                    if isinstance(message, m.Delta):
                        yield message.text
                    elif isinstance(message, m.Finished | m.Error):
                        self.end = getattr(message, "reason", "") or getattr(message, "code", "")
                        return
        except InvalidStatus as error:
            refusals = {b"the server is shutting down": "draining",
                        b"the engine is not ready": "overloaded"}  # fmt: skip
            self.end = refusals.get(bytes(error.response.body), CUT)
        except InvalidHandshake:
            self.end = CUT
        except ConnectionClosed:
            self.end = CUT


class Relay:
    """Passes bytes on to an address until it is told to cut or to freeze."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._loop = asyncio.new_event_loop()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            raw = socket.socket()
            # What a frozen relay holds for the server is to be little.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            raw.setblocking(False)
            await self._loop.sock_connect(raw, (self._host, int(self._port)))
            upstream = await asyncio.open_connection(sock=raw, limit=1 << 12)
        except OSError:
            raw.close()
            writer.transport.abort()
            return
        self._writers += [writer, upstream[1]]
        for one, other in ((reader, upstream[1]), (upstream[0], writer)):
            task = asyncio.ensure_future(self._pass(one, other))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 12):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    def freeze(self) -> None:
        """Pass nothing on any more, and close nothing: a peer that has died without a word."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def cut(self, reset: bool) -> None:
        """End every connection, with RST or with FIN."""

        async def now() -> None:
            for writer in self._writers:
                if reset and not writer.transport.is_closing():
                    raw: socket.socket = writer.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            self._writers.clear()

        self._do(now())

    def close(self) -> None:
        """Cut, and take no more."""

        async def end() -> None:
            self._server.close()
            self._flowing.set()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)

        self.cut(reset=False)
        self._do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def relay(address: str) -> Iterator[Relay]:
    """Until the block is left."""
    made = Relay(address)
    try:
        yield made
    finally:
        made.close()
