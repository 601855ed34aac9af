# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton programs of tree attention: planning, one tile of queries over one split, merging.

Device code only: tree_attention.py allocates, picks tiles and launches. A row's keys are counted
through: first its cached tokens from `low` on, then the nodes of its twig. Everything about the
structure is read from the batch's tensors on the device, so a launch needs nothing from the host
but bounds, and can be captured in a graph. Also runs in Triton's interpreter.
"""

import triton
import triton.language as tl

MANY = tl.constexpr(1 << 30)
# Numbers that change from step to step: no program is compiled anew because one of them is 1.
VARYING = ["rows", "first", "target"]
# Parts of one buffer: nor because of where in it one of them begins.
PARTS = [
    "node_ptr", "twig_ptr", "twig_slots", "prefix", "chain", "row_ids", "positions", "ancestors",
    "slots",
]  # fmt: skip
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=PARTS)
def plan_work(
    node_ptr,
    twig_ptr,
    prefix,
    positions,
    work,  # [4, rows + 1] int32, see tree_attention.py
    rows,
    first,
    target,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: cut every row's keys into splits, so that about `target` items are added."""
    b = tl.arange(0, ROWS)
    real = b < rows
    start = tl.load(node_ptr + b, mask=real, other=0)
    nodes = tl.load(node_ptr + b + 1, mask=real, other=0) - start
    twig = tl.load(twig_ptr + b + 1, mask=real, other=0)
    twig -= tl.load(twig_ptr + b, mask=real, other=0)
    cached = tl.load(prefix + b, mask=real, other=0)
    low = tl.zeros((ROWS,), tl.int64) + first
    if WINDOW > 0:
        here = tl.load(positions + start, mask=real & (nodes > 0), other=0)
        low = tl.maximum(low, here - WINDOW + 1)
    keys = tl.maximum(cached - low, 0) + twig
    tiles = ((nodes + QUERIES - 1) // QUERIES).to(tl.int32)
    blocks = ((keys + KEYS - 1) // KEYS).to(tl.int32)
    share = (tl.sum(tiles.to(tl.int64) * blocks, 0) + target - 1) // target
    share = tl.maximum(share, LEAST).to(tl.int32)
    splits = tl.where(real, tl.maximum((blocks + share - 1) // share, 1), 0)
    cut = splits > 1
    width = rows + 1
    tl.store(work + b + 1, tl.cumsum(tiles * splits, 0), mask=real)
    tl.store(work + width + b + 1, tl.cumsum(tl.where(cut, tiles * splits, 0), 0), mask=real)
    tl.store(work + 2 * width + b + 1, tl.cumsum(tl.where(cut, tiles, 0), 0), mask=real)
    tl.store(work + 3 * width + b, splits, mask=real)
    tl.store(work + 3 * width + rows, share)
    tl.store(work + width * tl.arange(0, 4), 0, mask=tl.arange(0, 4) < 3)


@triton.jit
def row_of_item(ends, item, rows, ROWS: tl.constexpr):
    """The first b with item < ends[b]; rows if there is none."""
    at = tl.arange(0, ROWS)
    end = tl.load(ends + at, mask=at < rows, other=MANY)
    return tl.sum((end <= item).to(tl.int32), 0)


@triton.jit
def ones(word):
    """How many bits are set in each uint64: Warren, Hacker's Delight, 5-1."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word = word + (word >> 8)
    word = word + (word >> 16)
    word = word + (word >> 32)
    return (word & 0x7F).to(tl.int32)


@triton.jit
def seen_in_tree(
    ancestors, node, real, t, WORDS: tl.constexpr, WINDOW: tl.constexpr, NARROW: tl.constexpr
):
    """[M, K]: is twig node t [K] among the ancestors of `node` [M], and near enough.

    The nodes that a query sees from t on are as many as its distance from t, plus one.
    """
    inside = real[:, None] & (t >= 0)[None, :]
    word = ancestors + node[:, None] * WORDS + (t // 64)[None, :]
    bits = tl.load(word, mask=inside & (t < 64 * WORDS)[None, :], other=0)
    seen = ((bits >> (t & 63)[None, :]) & 1) != 0
    if NARROW:
        behind = tl.zeros(seen.shape, tl.int32)
        for w in tl.static_range(WORDS):
            held = tl.load(ancestors + node * WORDS + w, mask=real, other=0)
            held = held.to(tl.uint64, bitcast=True)
            shift = tl.minimum(tl.maximum(t - 64 * w, 0), 63)
            count = ones(held[:, None] >> shift.to(tl.uint64)[None, :])
            behind += tl.where((t < 64 * (w + 1))[None, :], count, 0)
        seen = seen & (behind <= WINDOW)
    return seen


@triton.jit
def cached_keys(b, start, prefix, positions, first, WINDOW: tl.constexpr):
    """A row's first cached position that counts, and how many do."""
    cached = tl.load(prefix + b)
    low = cached * 0 + first
    if WINDOW > 0:
        low = tl.maximum(low, tl.load(positions + start) - WINDOW + 1)
    low = tl.minimum(low, cached)
    return low, cached - low


@triton.jit
def softened(top, total, s):
    """Online softmax: scores [M, K] in powers of two -> weights, new top and total, and by what
    earlier sums fade."""
    new = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(s - base[:, None])
    fade = tl.exp2(top - base)
    return weights, new, total * fade + tl.sum(weights, 1), fade


@triton.jit
def keys_of_item(
    split, share, before, twig, last, chained, place, real, first_own, low,
    WINDOW: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Where a split begins and ends, less what none of its queries sees.

    last: twig nodes that a chain's queries see; first_own: number of the first query in the twig.
    """
    begin = split * share * KEYS
    end = tl.minimum((split + 1) * share * KEYS, before + twig)
    if chained != 0:
        end = tl.minimum(end, before + last)
    if WINDOW > 0:
        skip = tl.min(tl.where(real, place, MANY), 0) - WINDOW + 1 - low
        skip = tl.minimum(tl.maximum(skip, 0), before)
        if (chained != 0) & (skip == before):
            skip += tl.maximum(first_own - WINDOW + 1, 0)
        begin = tl.maximum(begin, skip // KEYS * KEYS)
    return begin, end


@triton.jit
def seen_keys(
    mixed, j, before, held, low, place, own, real, node, chained, ancestors,
    WORDS: tl.constexpr, WINDOW: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """[M, K]: which of the keys j [K] each query [M] sees. mixed: some of them are twig nodes."""
    t = j - before
    seen = (t < 0)[None, :] & real[:, None]
    if WINDOW > 0:
        seen = seen & ((low + j)[None, :] > (place - WINDOW)[:, None])
    if mixed:
        if chained != 0:
            mine = (t >= 0)[None, :] & (t[None, :] <= own[:, None])
            if WINDOW > 0:
                mine = mine & (own[:, None] - t[None, :] < WINDOW)
            seen = seen | mine
        else:
            inside = tl.where(held, t, -1)
            seen = seen | seen_in_tree(ancestors, node, real, inside, WORDS, WINDOW, NARROW)
    return seen & held[None, :]


@triton.jit
def place_of_item(work, b, item, rows):
    """An item's number within row b, and of the row: splits, blocks of a split, tiles."""
    begin = tl.load(work + b)
    splits = tl.load(work + 3 * (rows + 1) + b)
    share = tl.load(work + 3 * (rows + 1) + rows)
    return item - begin, splits, share, (tl.load(work + b + 1) - begin) // splits


@triton.jit
def channels(x, at, real, first: tl.constexpr, c, count: tl.constexpr):
    """[M, C]: channels first + c [C] of what begins at offsets `at` [M]; 0 for c >= count."""
    mask = real[:, None] & (c < count)[None, :]
    return tl.load(x + at[:, None] + (first + c)[None, :], mask=mask, other=0.0)


@triton.jit
def scores(
    queries, rest, k, at, held, d, t, D: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """[M, K]: queries [M, DIM] and their tail times the keys at offsets `at` [K]."""
    keys = tl.load(k + at[None, :] + d[:, None], mask=held[None, :] & (d < D)[:, None], other=0.0)
    s = tl.dot(queries, keys.to(queries.dtype), input_precision=PRECISION)
    if TAIL > 0:
        mask = held[None, :] & (t < TAIL)[:, None]
        more = tl.load(k + at[None, :] + (D + t)[:, None], mask=mask, other=0.0)
        s += tl.dot(rest, more.to(queries.dtype), input_precision=PRECISION)
    return s


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=PARTS)
def attend_tile(
    q, k, v, out, part, stats, work, node_ptr, twig_ptr, twig_slots, prefix, chain, row_ids, table,
    positions, ancestors, rows, first, scale, softcap, q_node, q_head, k_slot, k_head, v_slot,
    v_head, out_node, out_head, table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, D: tl.constexpr,
    DIM: tl.constexpr, TAIL: tl.constexpr, TAIL_DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, NARROW: tl.constexpr, CAPPED: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One item: QUERIES nodes of a row, all heads of one K/V head, one split of the keys.

    A value has D channels; a key has as many and TAIL behind them. Online softmax as in
    FlashAttention (Dao et al. 2022), in powers of two. What was split goes to
    part [parts, kv heads, M, DIM] float32, and log2 of its sum of weights to stats, for merging.
    WIDEN: factors become float32 first; the interpreter knows no products of bfloat16.
    """
    M: tl.constexpr = QUERIES * LANES
    item, head, width = tl.program_id(0), tl.program_id(1), rows + 1
    b = row_of_item(work + 1, item, rows, ROWS)
    if b >= rows:
        return
    local, splits, share, tiles = place_of_item(work, b, item, rows)
    tile = local % tiles

    start = tl.load(node_ptr + b)
    nodes = tl.load(node_ptr + b + 1) - start
    twig_start = tl.load(twig_ptr + b)
    twig = tl.load(twig_ptr + b + 1) - twig_start
    chained = tl.load(chain + b)
    low, before = cached_keys(b, start, prefix, positions, first, WINDOW)

    m = tl.arange(0, M)
    d = tl.arange(0, DIM)
    index = tile * QUERIES + m // LANES
    lane = m % LANES
    real = (index < nodes) & (lane < GROUP)
    node = start + index
    place = tl.load(positions + node, mask=real, other=0)
    own = twig - nodes + index  # the query's number in the twig
    q_at = node * q_node + (head * GROUP + lane) * q_head
    queries = channels(q, q_at, real, 0, d, D)
    factor: tl.constexpr = tl.float32 if WIDEN else queries.dtype
    queries = queries.to(factor)
    rest, t = queries, d
    if TAIL > 0:
        t = tl.arange(0, TAIL_DIM)
        rest = channels(q, q_at, real, D, t, TAIL).to(factor)
    last = twig - nodes + tl.minimum((tile + 1) * QUERIES, nodes)
    begin, end = keys_of_item(
        local // tiles, share, before, twig, last, chained, place, real,
        twig - nodes + tile * QUERIES, low, WINDOW, KEYS,
    )  # fmt: skip

    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DIM), tl.float32)
    slots_of_row = table + tl.load(row_ids + b) * table_row + low
    for at in range(begin, end, KEYS):
        j = at + tl.arange(0, KEYS)
        held = j < before + twig
        slot = tl.load(slots_of_row + j, mask=j < before, other=0)
        slot += tl.load(twig_slots + twig_start + j - before, mask=(j >= before) & held, other=0)
        k_at = slot * k_slot + head * k_head
        s = scores(queries, rest, k, k_at, held, d, t, D, TAIL, PRECISION) * scale
        if CAPPED:
            s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E) / softcap) + 1.0))
        seen = seen_keys(
            at + KEYS > before, j, before, held, low, place, own, real, node, chained, ancestors,
            WORDS, WINDOW, NARROW,
        )  # fmt: skip
        s = tl.where(seen, s * LOG2E, float("-inf"))
        weights, top, total, fade = softened(top, total, s)
        values = channels(v, slot * v_slot + head * v_head, held, 0, d, D)
        mixed = tl.dot(weights.to(factor), values.to(factor), input_precision=PRECISION)
        acc = acc * fade[:, None] + mixed

    whole = tl.where(total > 0, total, 1.0)
    acc = acc / whole[:, None]
    if splits == 1:
        out_at = node[:, None] * out_node + (head * GROUP + lane)[:, None] * out_head + d[None, :]
        rounded = acc.to(out.dtype.element_ty)
        tl.store(out + out_at, rounded, mask=real[:, None] & (d < D)[None, :])
    else:
        where = ((tl.load(work + width + b) + local) * HEADS + head).to(tl.int64) * M + m
        tl.store(part + where[:, None] * DIM + d[None, :], acc)
        tl.store(stats + where, tl.where(total > 0, top + tl.log2(whole), float("-inf")))


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=PARTS)
def merge_splits(
    out,
    part,
    stats,
    work,
    node_ptr,
    rows,
    out_node,
    out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    LINES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """LINES lines of one tile: the splits' results, each weighted by its sum of weights."""
    M: tl.constexpr = QUERIES * LANES
    item = tl.program_id(0)
    head = tl.program_id(1)
    width = rows + 1
    b = row_of_item(work + 2 * width + 1, item, rows, ROWS)
    if b >= rows:
        return
    tile = item - tl.load(work + 2 * width + b)
    splits = tl.load(work + 3 * width + b)
    tiles = (tl.load(work + b + 1) - tl.load(work + b)) // splits
    base = tl.load(work + width + b) + tile
    start = tl.load(node_ptr + b)
    nodes = tl.load(node_ptr + b + 1) - start
    m = tl.program_id(2) * LINES + tl.arange(0, LINES)
    d = tl.arange(0, DIM)
    top = tl.full((LINES,), float("-inf"), tl.float32)
    total = tl.zeros((LINES,), tl.float32)
    acc = tl.zeros((LINES, DIM), tl.float32)
    for split in range(splits):
        where = ((base + split * tiles) * HEADS + head).to(tl.int64) * M + m
        stat = tl.load(stats + where)
        new = tl.maximum(top, stat)
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(stat - safe)
        fade = tl.exp2(top - safe)
        top = new
        total = total * fade + weight
        held = tl.load(part + where[:, None] * DIM + d[None, :])
        acc = acc * fade[:, None] + held * weight[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    index = tile * QUERIES + m // LANES
    lane = m % LANES
    mask = ((index < nodes) & (lane < GROUP))[:, None] & (d < D)[None, :]
    out_at = (start + index)[:, None] * out_node + (head * GROUP + lane)[:, None] * out_head
    tl.store(out + out_at + d[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=PARTS)
def store_kv(
    k,
    v,
    k_pool,
    v_pool,
    slots,
    k_node,
    k_head,
    v_node,
    v_head,
    k_slot,
    k_pool_head,
    v_slot,
    v_pool_head,
    HEADS: tl.constexpr,
    HEADS_P: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
):
    """One node: its K and V to its slot, in the pool's dtype."""
    node = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS_P)[:, None]
    d = tl.arange(0, DIM)[None, :]
    mask = (h < HEADS) & (d < D)
    slot = tl.load(slots + node)
    keys = tl.load(k + node * k_node + h * k_head + d, mask=mask, other=0.0)
    values = tl.load(v + node * v_node + h * v_head + d, mask=mask, other=0.0)
    keys = keys.to(k_pool.dtype.element_ty)
    values = values.to(v_pool.dtype.element_ty)
    tl.store(k_pool + slot * k_slot + h * k_pool_head + d, keys, mask=mask)
    tl.store(v_pool + slot * v_slot + h * v_pool_head + d, values, mask=mask)
