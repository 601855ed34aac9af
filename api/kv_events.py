"""Cache events on ZMQ, in the form vLLM and SGLang publish and routers read.

Each message of the PUB socket has three parts: topic, sequence number (8 bytes, big-endian) and a
batch in MessagePack. Who asks the ROUTER socket with a sequence number gets the batches from there
on again, then one numbered -1. There are no keys on these sockets, and blocks tell the tokens of
prompts: off by default, and on loopback unless another address is given. The format was read off
those servers' sources and clients.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING

import msgspec

from spec_serve.api.kv_feed import KEPT, Batch, Feed
from spec_serve.api.ports import is_loopback
from spec_serve.api.server_settings import ServeSettings
from spec_serve.cache.blocks import Cleared, Removed, Stored

if TYPE_CHECKING:
    import zmq

log = logging.getLogger("spec_serve.kv_events")

ONLY_GRPC = "grpc"
TOPIC = b"kv-events"
END = (-1).to_bytes(8, "big", signed=True)
MOST_WAITING = 100_000  # messages for one slow subscriber; what is beyond is lost to it
MAX_QUESTION = 64  # bytes of a part; who sends more is disconnected
MOST_REPLAYS = 16  # at the same time; questions beyond get no answer
AT_ONCE = 200  # batches replayed before others get their turn
# The first tier of a cache, whatever memory it is in: routers take other names for slower tiers.
MEDIUM = "GPU"


class _Event(msgspec.Struct, tag=True):
    """Tagged by its name under `type`."""


class BlockStored(_Event):
    """Blocks that follow one another; token_ids are those of all of them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


class BlockRemoved(_Event):
    """Blocks that left the cache."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(_Event):
    """The cache is empty."""


class EventBatch(msgspec.Struct, array_like=True):
    """ts: seconds since the epoch."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


_encode = msgspec.msgpack.Encoder().encode


def encoded(batch: Batch, block_size: int) -> bytes:
    """A batch as it goes over the wire."""
    made: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    for change in batch.changes:
        match change:
            case Stored(hashes, parent, tokens):
                made.append(BlockStored(hashes, parent, tokens, block_size))
            case Removed(hashes):
                made.append(BlockRemoved(hashes))
            case Cleared():
                made.append(AllBlocksCleared())
    return _encode(EventBatch(batch.at, made))


def addresses(settings: ServeSettings) -> tuple[str, str]:
    """Where to publish and where to replay, "" = not at all. Raises ValueError naming the setting.

    A port alone stands for that port on loopback.
    """
    publish, replay = settings.kv_events, settings.kv_events_replay
    if publish in ("", ONLY_GRPC):
        if replay:
            raise ValueError("kv-events-replay: needs an address in kv-events")
        return "", ""
    made = _address("kv-events", publish)
    again = _address("kv-events-replay", replay) if replay else ""
    if again == made and not made.endswith(":*"):
        raise ValueError(f"kv-events-replay: {replay} is where events are published already")
    return made, again


def _address(name: str, text: str) -> str:
    if text.isascii() and text.isdigit():
        text = f"tcp://127.0.0.1:{text}"
    if re.fullmatch(r"ipc://[^\s]{1,100}", text):
        return text
    found = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+|\*):(\d{1,5})", text)
    if found is None or int(found[2]) > 65535:
        raise ValueError(f"{name}: must be like tcp://127.0.0.1:5557 or ipc:///PATH, not {text!r}")
    return f"tcp://{found[1]}:{'*' if int(found[2]) == 0 else found[2]}"


class Publisher:
    """The sockets. All methods belong to the loop's thread; `start` binds, `close` lets go."""

    def __init__(self, feed: Feed, settings: ServeSettings) -> None:
        self._feed = feed
        self._wanted = addresses(settings)
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._replays: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Bind and publish from now on. Raises OSError naming the setting."""
        publish, replay = self._wanted
        if not publish:
            return
        import zmq

        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(MOST_WAITING)
        self._bind("kv-events", self._pub, publish)
        if replay:
            self._router = self._context.socket(zmq.ROUTER)
            # A whole replay fits, or its end would be lost; who does not read gets no more.
            self._router.set(zmq.SNDHWM, KEPT + 100)
            self._router.set(zmq.RCVHWM, 100)
            self._router.set(zmq.MAXMSGSIZE, MAX_QUESTION)
            self._bind("kv-events-replay", self._router, replay)
            asyncio.get_running_loop().add_reader(self._router.fileno(), self._asked)
        self._feed.listeners.append(self._publish)

    def bound(self) -> list[str]:
        """The addresses that are listened on."""
        import zmq

        sockets = [socket for socket in (self._pub, self._router) if socket is not None]
        return [socket.get_string(zmq.LAST_ENDPOINT) for socket in sockets]

    def close(self) -> None:
        """Stop publishing; what no subscriber has taken yet is dropped."""
        if self._publish in self._feed.listeners:
            self._feed.listeners.remove(self._publish)
        for task in self._replays:
            task.cancel()
        if self._router is not None:
            asyncio.get_running_loop().remove_reader(self._router.fileno())
            self._router.close()
        if self._pub is not None:
            self._pub.close()
        if self._context is not None:
            self._context.term()
        self._pub = self._router = self._context = None

    def _bind(self, name: str, socket: zmq.Socket[bytes], address: str) -> None:
        import zmq

        host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if not (address.startswith("ipc:") or is_loopback(host)):
            log.warning("%s: whoever reaches %s is told the tokens of prompts", name, address)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(f"{name}: can't listen on {address}: {error.strerror}") from error

    def _publish(self, batch: Batch) -> None:
        assert self._pub is not None
        payload = encoded(batch, self._feed.block_tokens)
        # Never blocks: a PUB socket drops what a subscriber is too slow for.
        self._pub.send_multipart((TOPIC, batch.seq.to_bytes(8, "big"), payload))

    def _asked(self) -> None:
        """ZMQ's descriptor tells of changes only, so all that waits is read."""
        router = self._router
        while router is not None and router.poll(0):
            parts = router.recv_multipart()
            if len(parts) != 3 or len(parts[2]) != 8 or len(self._replays) >= MOST_REPLAYS:
                log.debug("a question for a replay in %d parts is not answered", len(parts))
                continue
            start = int.from_bytes(parts[2], "big")
            task = asyncio.get_running_loop().create_task(self._replay(parts[0], start))
            self._replays.add(task)
            task.add_done_callback(self._replays.discard)

    async def _replay(self, peer: bytes, start: int) -> None:
        feed = self._feed
        first = feed.last + 1 - feed.kept
        batches = feed.since(max(start, first)) or []
        for i, batch in enumerate(batches):
            if self._router is None:
                return
            number = batch.seq.to_bytes(8, "big")
            payload = encoded(batch, feed.block_tokens)
            self._router.send_multipart((peer, b"", number, payload))
            if i % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        if self._router is not None:
            self._router.send_multipart((peer, b"", END, b""))
            self._asked()
