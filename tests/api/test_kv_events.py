"""Cache events: what subscribers here and on ZMQ are told, late, slow or from the start."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import zmq

from spec_serve.api import kv_events
from spec_serve.api.kv_events import Publisher, addresses
from spec_serve.api.kv_feed import Batch, Feed
from spec_serve.api.server_settings import ServeSettings
from spec_serve.cache.blocks import BlockLog, Change, Cleared, Removed, Stored, block_hashes
from spec_serve.cache.radix import RadixTree

SIZE = 2


def settings(publish: str = "tcp://127.0.0.1:0", replay: str = "") -> ServeSettings:
    return ServeSettings(kv_events=publish, kv_events_replay=replay)


class Changing:
    """A tree whose changes go into a feed."""

    def __init__(self, kept: int = 10_000, seed: int = 1) -> None:
        self.tree, self.log = RadixTree(), BlockLog(SIZE)
        self.tree.log = self.log
        self.feed = Feed(SIZE, kept)
        self._random = random.Random(seed)

    def change(self, times: int = 1) -> None:
        rng = self._random
        made = 0
        while made < times:
            if rng.random() < 0.7:
                self.tree.insert([rng.randrange(3) for _ in range(rng.randrange(2, 12))])
            elif rng.random() < 0.95:
                self.tree.evict(rng.randrange(1, 10))
            else:
                self.tree.clear()
            if changes := self.log.take():
                self.feed.take(changes)
                made += 1

    def blocks(self) -> set[int]:
        return {block for _, path in self.tree.paths() for block in block_hashes(path, SIZE)}


def applied(held: set[int], changes: list[Change]) -> None:
    for change in changes:
        match change:
            case Stored(hashes, parent, tokens):
                assert parent is None or parent in held
                assert len(tokens) == SIZE * len(hashes)
                held.update(hashes)
            case Removed(hashes):
                assert held.issuperset(hashes)
                held.difference_update(hashes)
            case Cleared():
                held.clear()


def looped(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """A coroutine as a test."""

    def run() -> None:
        async def bounded() -> None:
            async with asyncio.timeout(120):
                await test()

        asyncio.run(bounded())

    run.__name__ = getattr(test, "__name__", "run")
    run.__doc__ = test.__doc__
    return run


async def follow(
    feed: Feed, start: int, until: int, known: set[int] | None = None
) -> tuple[set[int], list[Batch]]:
    """What a subscriber knows once it has seen batch `until`, and how it came to know."""
    held = set(known or ())
    seen: list[Batch] = []
    subscription = feed.subscribe(start)
    async for batch in subscription:
        if seen:
            assert batch.seq == seen[-1].seq + 1 or batch.snapshot
        seen.append(batch)
        applied(held, batch.changes)
        if batch.seq >= until:
            break
    await subscription.aclose()  # type: ignore[attr-defined]
    return held, seen


@looped
async def test_a_subscriber_from_the_start_and_late_ones_know_the_same() -> None:
    changing = Changing()
    tasks = [asyncio.create_task(follow(changing.feed, 0, 300))]
    for i in range(300):
        changing.change()
        if i % 50 == 49:
            tasks.append(asyncio.create_task(follow(changing.feed, 0, 300)))
        if i % 7 == 0:
            await asyncio.sleep(0)
    tasks.append(asyncio.create_task(follow(changing.feed, 0, 300)))
    results = await asyncio.gather(*tasks)
    assert changing.blocks(), "there is something to know"
    for held, seen in results:
        assert held == changing.blocks()
        assert seen[0].snapshot and not any(batch.snapshot for batch in seen[1:])
    assert len(results[0][1]) == 300 and len(results[-1][1]) == 1
    assert len(changing.feed) == len(changing.blocks())


@looped
async def test_a_subscriber_goes_on_where_it_was() -> None:
    changing = Changing()
    changing.change(20)
    held, seen = await follow(changing.feed, 1, 20)
    assert [batch.seq for batch in seen] == list(range(1, 21))
    assert not any(batch.snapshot for batch in seen)
    assert held == changing.blocks()
    changing.change(5)
    held, seen = await follow(changing.feed, 21, 25, held)
    assert [batch.seq for batch in seen] == list(range(21, 26))
    assert held == changing.blocks()
    _, [ahead] = await follow(changing.feed, 900, 25)
    assert ahead.snapshot, "a number of an earlier life of the server"


@looped
async def test_who_falls_behind_gets_the_state() -> None:
    changing = Changing(kept=10)
    held: set[int] = set()
    kinds = []
    async for batch in changing.feed.subscribe():
        kinds.append(batch.snapshot)
        applied(held, batch.changes)
        assert held == changing.blocks() or batch.seq < changing.feed.last
        if len(kinds) == 1:
            changing.change(5)  # still kept
        elif len(kinds) == 6:
            changing.change(50)  # more than is kept
        elif len(kinds) == 8:
            break
        elif batch.seq == changing.feed.last:
            changing.change()
    assert kinds == [True] + [False] * 5 + [True, False]


def subscriber(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    made = context.socket(zmq.SUB)
    made.set(zmq.RCVTIMEO, 60_000)
    made.setsockopt(zmq.SUBSCRIBE, b"")
    made.connect(address)
    return made


def replayed(context: zmq.Context[Any], address: str, start: int) -> list[tuple[int, bytes]]:
    """Ask as vLLM's clients do, by a REQ socket whose answers have several parts."""
    with context.socket(zmq.DEALER) as socket:
        socket.set(zmq.RCVTIMEO, 60_000)
        socket.connect(address)
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        found = []
        while True:
            empty, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == kv_events.END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))


def read(payload: bytes) -> list[Any]:
    """As plain MessagePack, without our own classes."""
    at, events, rank = msgspec.msgpack.decode(payload)
    assert at > 1.6e9 and rank == 0
    return list(events)


def told(held: set[int], events: list[Any]) -> None:
    for event in events:
        if event["type"] == "BlockStored":
            assert event["block_size"] == SIZE and event["lora_id"] is None
            assert len(event["token_ids"]) == SIZE * len(event["block_hashes"])
            parent = event["parent_block_hash"]
            assert parent is None or parent in held
            held.update(event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            held.difference_update(event["block_hashes"])
        else:
            assert event == {"type": "AllBlocksCleared"}
            held.clear()


@looped
async def test_publishing_and_replay() -> None:
    changing = Changing()
    publisher = Publisher(changing.feed, settings(replay="tcp://127.0.0.1:0"))
    publisher.start()
    first, second = publisher.bound()
    context: zmq.Context[Any] = zmq.Context()
    try:
        with subscriber(context, first) as socket:
            for _ in range(2000):  # until the subscription has come through
                changing.change()
                await asyncio.sleep(0.02)
                if socket.poll(0):
                    break
            changing.change(50)
            held: set[int] = set()
            missed: list[tuple[int, bytes]] = []
            last = 0
            while last < changing.feed.last:
                topic, number, payload = await asyncio.to_thread(socket.recv_multipart)
                seq = int.from_bytes(number, "big")
                assert topic == b"kv-events" and (seq == last + 1 or not last)
                if not last:
                    missed = await asyncio.to_thread(replayed, context, second, 0)
                    assert [i for i, _ in missed] == list(range(1, changing.feed.last + 1))
                    for _, earlier in missed[: seq - 1]:
                        told(held, read(earlier))
                told(held, read(payload))
                assert missed[seq - 1] == (seq, payload), "replayed as it was published"
                last = seq
            assert held == changing.blocks()
        some = await asyncio.to_thread(replayed, context, second, changing.feed.last - 2)
        assert len(some) == 3
        assert await asyncio.to_thread(replayed, context, second, 2**63) == []
    finally:
        publisher.close()
        context.destroy(linger=0)


@looped
async def test_a_long_replay_and_nonsense_on_its_socket() -> None:
    changing = Changing()
    changing.change(3000)
    publisher = Publisher(changing.feed, settings(replay="tcp://127.0.0.1:0"))
    publisher.start()
    address = publisher.bound()[1]
    context: zmq.Context[Any] = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as socket:
            socket.connect(address)
            for parts in ([b"x"], [b"", b"x"], [b"", b"", b""], [b"", b"\xff" * 9]):
                socket.send_multipart(parts)
            socket.send_multipart([b"", b"x" * 1_000_000])
            everything = await asyncio.to_thread(replayed, context, address, 0)
        assert [i for i, _ in everything] == list(range(1, 3001))
        held: set[int] = set()
        for _, payload in everything:
            told(held, read(payload))
        assert held == changing.blocks()
    finally:
        publisher.close()
        context.destroy(linger=0)


@looped
async def test_a_port_that_is_taken_is_named() -> None:
    feed = Feed()
    first = Publisher(feed, settings())
    first.start()
    [address] = first.bound()
    second = Publisher(feed, settings(address))
    with pytest.raises(OSError, match=r"kv-events: can't listen on tcp://127\.0\.0\.1:\d+"):
        second.start()
    first.close()
    second.start()
    assert len(feed.listeners) == 1 and second.bound() == [address]
    second.close()
    assert feed.listeners == []


def test_addresses() -> None:
    assert addresses(ServeSettings()) == ("", "")
    assert addresses(settings("grpc")) == ("", "")
    assert addresses(settings("5557", "5558")) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    assert addresses(settings("tcp://*:5557"))[0] == "tcp://*:5557"
    assert addresses(settings("tcp://[::1]:1", "ipc:///run/x"))[1] == "ipc:///run/x"
    assert addresses(settings("tcp://127.0.0.1:0", "tcp://127.0.0.1:0"))[1].endswith(":*")
    for publish, replay, name in (
        ("udp://127.0.0.1:1", "", "kv-events"),
        ("tcp://127.0.0.1", "", "kv-events"),
        ("tcp://127.0.0.1:99999", "", "kv-events"),
        ("tcp://a b:1", "", "kv-events"),
        ("", "5558", "kv-events-replay"),
        ("grpc", "5558", "kv-events-replay"),
        ("5557", "5557", "kv-events-replay"),
        ("5557", "x", "kv-events-replay"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            addresses(settings(publish, replay))
