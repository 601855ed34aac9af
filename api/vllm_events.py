"""Changes of the prefix cache as the messages of `SubscribeKvEvents`.

A state goes out in chunks numbered so that they end at the batch they stand for, as the proto
asks; a chunk holds so many blocks that no client's bound on messages is met. Knows batches of
api/kv_feed.py, no calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from smg_grpc_proto.generated import common_pb2 as common

from spec_serve.api.kv_feed import Batch
from spec_serve.cache.blocks import Change, Cleared, Removed, Stored

CHUNK_BLOCKS = 4096
MEDIUM = "GPU"  # the first tier, whatever memory it is in
_DEVICE = common.KV_CACHE_TIER_DEVICE


def messages(batch: Batch, size: int) -> Iterator[common.KvEventBatch]:
    """What to send for a batch. size: tokens of a block."""
    if not batch.snapshot:
        yield _message(batch, batch.seq, batch.changes, size)
        return
    blocks = sum(len(one.hashes) for one in batch.changes if isinstance(one, Stored))
    # The first number is 1, so a young state can't have more chunks than there were batches.
    count = min(-(-blocks // CHUNK_BLOCKS), batch.seq) or 1
    most = -(-blocks // count) or 1
    for index, changes in enumerate(_cut(batch.changes, most, size, count)):
        seq = max(batch.seq - count + 1 + index, 0)
        made = _message(batch, seq, changes, size)
        made.snapshot.CopyFrom(common.KvSnapshotChunk(index=index, count=count, blocks=blocks))
        yield made


def _cut(changes: list[Change], most: int, size: int, count: int) -> list[list[Change]]:
    """`count` parts of at most so many blocks; runs are cut where a part is full."""
    parts: list[list[Change]] = [[]]
    room = most
    for change in changes:
        if not isinstance(change, Stored):
            parts[-1].append(change)
            continue
        at = 0
        while at < len(change.hashes):
            if not room:
                parts.append([])
                room = most
            end = min(at + room, len(change.hashes))
            parent = change.hashes[at - 1] if at else change.parent
            tokens = change.tokens[at * size : end * size]
            parts[-1].append(Stored(change.hashes[at:end], parent, tokens))
            room -= end - at
            at = end
    return parts + [[] for _ in range(count - len(parts))]


def _message(
    batch: Batch, seq: int, changes: Iterable[Change], size: int
) -> common.KvEventBatch:
    made = common.KvEventBatch(sequence_number=seq, timestamp=batch.at, dp_rank=0)
    for number, change in enumerate(changes):
        event = made.events.add(event_id=0 if batch.snapshot else number)
        match change:
            case Stored(hashes, parent, tokens):
                stored = event.stored
                if parent is not None:
                    stored.parent_block_hash = parent
                stored.tier, stored.medium = _DEVICE, MEDIUM
                for i, block in enumerate(hashes):
                    held = tokens[i * size : (i + 1) * size]
                    stored.blocks.add(
                        block_hash=block, token_ids=held, block_size=size, cache_level=0
                    )
            case Removed(hashes):
                event.removed.block_hashes.extend(hashes)
                event.removed.cache_level = 0
                event.removed.tier, event.removed.medium = _DEVICE, MEDIUM
            case Cleared():
                event.cleared.SetInParent()
    return made
