"""Cache events of a real engine: subscribers know its blocks, wherever it runs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any
from urllib.request import Request as Post
from urllib.request import urlopen

import msgspec
import psutil
import pytest
import zmq

from spec_serve.api.kv_feed import Feed
from spec_serve.api.process_link import link_to
from spec_serve.cache.blocks import BlockLog, block_hashes
from spec_serve.cache.radix import RadixTree
from spec_serve.spec.request import Event, Finished
from tests.api.hosted import hosted
from tests.api.serving import until
from tests.api.tokens import TinyTokens
from tests.engines import engine, request
from tests.servers import start
from tests.tiny import write_tiny_model_dir

SIZE = 4
TOKENS = TinyTokens()


def blocks(tree: RadixTree) -> set[int]:
    return {
        block for salt, path in tree.paths() if not salt for block in block_hashes(path, SIZE)
    }


@pytest.mark.parametrize("place", ["thread", "process"])
def test_a_feed_knows_what_the_engine_holds(place: str) -> None:
    """Rows that share prefixes, salts, a cache too small for them, cancelling, flushing."""
    made = engine("self", kv_tokens=160, max_rows=3, max_context=96)
    made.store.tree.log = made.blocks = BlockLog(SIZE)
    rng = random.Random(5)
    stems = [[rng.randrange(1, 40) for _ in range(24)] for _ in range(4)]

    async def go() -> None:
        link = link_to(hosted(made) if place == "process" else made, lambda: None)
        feed = Feed(SIZE)
        link.cache_observers.append(feed.take)
        link.start()
        sent: list[str] = []

        async def one(i: int) -> None:
            over = asyncio.Event()

            def hear(event: Event) -> None:
                if type(event) is Finished:
                    over.set()

            prompt = [*rng.choice(stems)[: rng.randrange(5, 25)], rng.randrange(1, 40)]
            asked = request(prompt, rng.randrange(1, 30), salt="s" if i % 5 == 0 else "")
            asked.sink = hear
            sent.append(asked.id)
            link.submit(asked)
            if i % 7 == 3:
                await asyncio.sleep(0.01)
                link.cancel(asked.id)
            await over.wait()

        for wave in range(8):
            await asyncio.gather(*(one(wave * 6 + i) for i in range(6)))
            if wave == 5:
                await link.flush()
                await until(lambda: not len(feed))  # of an idle cache nothing is left
        await until(lambda: feed.blocks() == blocks(made.store.tree))
        assert blocks(made.store.tree), "there is something to know"
        assert feed.blocks() == blocks(made.store.tree)
        assert feed.last > 8
        await link.stop()

    asyncio.run(go())


class Router:
    """A subscriber in another process, as routers are."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.held: dict[int, list[int]] = {}
        self.cleared = 0
        self._last = 0
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)

    def hear(self, within_s: float = 0.0) -> bool:
        """Take what comes; whether anything did."""
        if not self._socket.poll(within_s * 1000):
            return False
        while self._socket.poll(0):
            _, number, payload = self._socket.recv_multipart()
            seq = int.from_bytes(number, "big")
            assert seq == self._last + 1 or not self._last
            self._last = seq
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)
        return True

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "BlockStored":
            size = event["block_size"]
            for i, block in enumerate(event["block_hashes"]):
                self.held[block] = event["token_ids"][i * size : (i + 1) * size]
        elif event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                self.held.pop(block, None)
        else:
            self.held.clear()
            self.cleared += 1

    def close(self) -> None:
        self._socket.close(linger=0)


def complete(base: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
    asked = Post(f"{base}/v1/completions", json.dumps(body).encode())
    with urlopen(asked, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_a_server_with_its_engine_in_another_process(tmp_path: Path) -> None:
    model = write_tiny_model_dir(tmp_path / "model")
    where = f"ipc://{tmp_path}/kv"
    prompt = "the other the other the other " * 3
    wanted = block_hashes(TOKENS.encode(prompt), 16)
    assert len(wanted) >= 2
    context: zmq.Context[Any] = zmq.Context()
    with start(model, tmp_path / "log", "--engine-process", "--kv-events", where) as server:
        base = server.health.removesuffix("/health")
        router = Router(context, where)
        end = time.monotonic() + 120
        while not router.held:  # until the subscription has come through
            assert time.monotonic() < end
            complete(base, f"{time.monotonic()} and much more of it, so that there is a block")
            router.hear(0.2)
        complete(base, "a secret " * 8, cache_salt="mine")
        complete(base, prompt)
        while not set(wanted) <= set(router.held):
            assert router.hear(60), "the blocks of a prompt were told"
        at = [token for block in wanted for token in router.held[block]]
        assert at == TOKENS.encode(prompt)[: len(at)]
        secret = TOKENS.encode("a secret " * 8)[:16]
        assert secret not in router.held.values(), "salted prompts are nobody's business"
        [child] = psutil.Process(server.process.pid).children()
        os.kill(child.pid, signal.SIGKILL)
        while not router.cleared:
            assert router.hear(60), "the cache of a killed engine is gone"
        assert router.held == {}
        router.close()
    context.destroy(linger=0)
