"""Cache events as a gateway gets them: whoever applies them holds what the cache holds."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

pytest.importorskip("smg_grpc_proto")

from smg_grpc_proto.generated import common_pb2 as common  # noqa: E402

from spec_serve.api import vllm_events  # noqa: E402
from spec_serve.api.grpc_call import Calls  # noqa: E402
from spec_serve.api.kv_feed import Batch, Feed  # noqa: E402
from spec_serve.api.vllm_grpc import VllmEngine  # noqa: E402
from spec_serve.cache.blocks import Change, Cleared, Removed, Stored  # noqa: E402

SIZE = 4
Held = dict[int, tuple[int | None, list[int]]]


def store(block: int, parent: int | None, count: int) -> Stored:
    """A run of blocks, each with tokens of its own."""
    hashes = list(range(block, block + count))
    return Stored(hashes, parent, [h * SIZE + i for h in hashes for i in range(SIZE)])


class Gateway:
    """Applies messages; holds blocks as the cache should."""

    def __init__(self) -> None:
        self.held: Held = {}
        self.seqs: list[int] = []

    def take(self, message: Any) -> None:
        self.seqs.append(message.sequence_number)
        for event in message.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.held.clear()
            elif kind == "removed":
                for block in event.removed.block_hashes:
                    del self.held[block]
            else:
                stored = event.stored
                parent = (
                    stored.parent_block_hash if stored.HasField("parent_block_hash") else None
                )
                assert parent is None or parent in self.held
                assert stored.tier == common.KV_CACHE_TIER_DEVICE
                for block in stored.blocks:
                    assert block.block_size == len(block.token_ids) == SIZE
                    self.held[block.block_hash] = parent, list(block.token_ids)
                    parent = block.block_hash


def random_changes(rng: random.Random, held: Held, fresh: int) -> list[Change]:
    parents = {parent for parent, _ in held.values()}
    leaves = [block for block in held if block not in parents]
    kind = rng.random()
    if kind < 0.05:
        return [Cleared()]
    if kind < 0.3 and leaves:
        return [Removed([rng.choice(leaves)])]
    parent = rng.choice([None, *held])
    return [store(fresh, parent, rng.randint(1, 9))]


@pytest.mark.parametrize("chunk", [1, 3, 4096])
def test_batches_and_states_rebuild_the_cache(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(vllm_events, "CHUNK_BLOCKS", chunk)
    rng, feed, steady = random.Random(chunk), Feed(SIZE), Gateway()
    for turn in range(300):
        feed.take(random_changes(rng, steady.held, 1 + turn * 10))
        (batch,) = feed.since(feed.last) or []
        for message in vllm_events.messages(batch, SIZE):
            steady.take(message)
        if turn % 10 == 0:
            late = Gateway()
            parts = list(vllm_events.messages(feed.snapshot(), SIZE))
            for message in parts:
                late.take(message)
            assert late.held == steady.held
            last = feed.last
            assert late.seqs == list(range(last - len(parts) + 1, last + 1))
            told = [part.snapshot for part in parts]
            assert [one.index for one in told] == list(range(len(parts)))
            assert {(one.count, one.blocks) for one in told} == {(len(parts), len(late.held))}
            if last > len(late.held):  # enough numbers for the chunks
                assert all(_blocks(part) <= chunk for part in parts)
    assert steady.seqs == list(range(1, 301))


def _blocks(message: Any) -> int:
    return sum(len(event.stored.blocks) for event in message.events)


def test_an_empty_cache_has_a_state_too() -> None:
    (message,) = vllm_events.messages(Feed(SIZE).snapshot(), SIZE)
    assert message.sequence_number == 0 and message.snapshot.count == 1
    (event,) = message.events
    assert event.WhichOneof("data") == "cleared"


def test_numbers_stay_in_64_bits() -> None:
    batch = Batch(1, 0.0, [Stored([2**63 - 1], 2**63 - 2, [2**32 - 1] * SIZE)])
    (message,) = vllm_events.messages(batch, SIZE)
    assert message.events[0].stored.blocks[0].block_hash == 2**63 - 1


def test_a_subscriber_gets_the_state_then_what_changes() -> None:
    class Context:
        def __init__(self) -> None:
            self.gateway = Gateway()

        async def write(self, message: Any) -> None:
            self.gateway.take(common.KvEventBatch.FromString(message.SerializeToString()))

    async def go() -> None:
        feed, context = Feed(SIZE), Context()
        feed.take([store(1, None, 3)])
        feed.take([Removed([3])])
        service: Any = None
        engine = VllmEngine(service, Calls(), feed)
        asked = common.SubscribeKvEventsRequest()
        watching = asyncio.create_task(engine.SubscribeKvEvents(asked, context))
        await asyncio.sleep(0)
        assert set(context.gateway.held) == {1, 2}
        feed.take([store(10, 2, 1)])
        feed.take([store(20, None, 1)])
        for _ in range(20):
            await asyncio.sleep(0)
        assert set(context.gateway.held) == {1, 2, 10, 20}
        assert context.gateway.seqs == [2, 3, 4]
        watching.cancel()
        again = Context()
        asked = common.SubscribeKvEventsRequest(start_sequence_number=3)
        watching = asyncio.create_task(engine.SubscribeKvEvents(asked, again))
        again.gateway.held = {2: (1, [])}
        await asyncio.sleep(0)
        assert again.gateway.seqs == [3, 4]
        watching.cancel()

    asyncio.run(go())
