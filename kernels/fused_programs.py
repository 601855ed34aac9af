# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton programs for what lies between a model's matrices, and for the walk down the trees.

Device code only; fused.py launches them and says what each means. Intermediate values are rounded
where the torch modules round them, so that both give the same numbers but for the last bit. They
know tensors, not layers, and run in Triton's interpreter too.
"""

import triton
import triton.language as tl

# Parts of one buffer, whose addresses depend on the parts before them: no program is compiled anew
# because one of them happens to be a multiple of 16.
PARTS = [
    "tokens", "parents", "given", "logit_of", "node_ptr", "positions", "slots", "row_ids", "path",
    "leaf", "next_slots", "replayed",
]  # fmt: skip


@triton.jit
def normed(x, weight, eps, D: tl.constexpr, WIDE: tl.constexpr, dtype: tl.constexpr):
    """x [.., DIM] float32, zeros behind D: x / rms(x) * weight, as `dtype`.

    WIDE: the product is float32's; otherwise the factors are rounded first.
    """
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    if WIDE:
        return (y * weight.to(tl.float32)).to(dtype)
    return (y.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def norm_rows(
    x,
    residual,
    weight,
    out,
    added,
    eps,
    x_row,
    residual_row,
    D: tl.constexpr,
    DIM: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One row: the norm of x, or of x + residual, which is then kept in `added`."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM)
    mask = d < D
    held = tl.load(x + row * x_row + d, mask=mask, other=0.0)
    if ADD:
        more = tl.load(residual + row * residual_row + d, mask=mask, other=0.0)
        held = (held.to(tl.float32) + more.to(tl.float32)).to(held.dtype)
        tl.store(added + row * D + d, held, mask=mask)
    w = tl.load(weight + d, mask=mask, other=0.0)
    y = normed(held.to(tl.float32), w, eps, D, WIDE, held.dtype)
    tl.store(out + row * D + d, y, mask=mask)


@triton.jit(do_not_specialize_on_alignment=PARTS)
def rope_and_store(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    q,
    k_pool,
    v_pool,
    slots,
    eps,
    qkv_node,
    k_slot,
    k_head,
    v_slot,
    v_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One head of one node: queries are normed and rotated, keys too and stored, values stored."""
    node = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, DIM)
    mask = d < D
    half = tl.where(d < D // 2, d + D // 2, d - D // 2)  # the channel each is paired with
    at = qkv + node * qkv_node + head * D
    x = tl.load(at + d, mask=mask, other=0.0)
    if head >= HEADS + KV_HEADS:
        slot = tl.load(slots + node)
        where = v_pool + slot * v_slot + (head - HEADS - KV_HEADS) * v_head
        tl.store(where + d, x.to(v_pool.dtype.element_ty), mask=mask)
    else:
        other = tl.load(at + half, mask=mask, other=0.0)
        if NORM:
            weight = q_weight
            if head >= HEADS:
                weight = k_weight
            w = tl.load(weight + d, mask=mask, other=0.0)
            paired = tl.load(weight + half, mask=mask, other=0.0)
            x = normed(x.to(tl.float32), w, eps, D, WIDE, x.dtype)
            other = normed(other.to(tl.float32), paired, eps, D, WIDE, other.dtype)
        c = tl.load(cos + node * D + d, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + node * D + d, mask=mask, other=0.0).to(tl.float32)
        turned = (x.to(tl.float32) * c).to(x.dtype).to(tl.float32) + other.to(tl.float32) * s
        turned = turned.to(x.dtype)
        if head < HEADS:
            tl.store(q + (node * HEADS + head) * D + d, turned, mask=mask)
        else:
            slot = tl.load(slots + node)
            where = k_pool + slot * k_slot + (head - HEADS) * k_head
            tl.store(where + d, turned.to(k_pool.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul(gate_up, out, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One stretch of a row: silu of the first half's values times the second half's."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < WIDTH
    gate = tl.load(gate_up + row * row_stride + i, mask=mask, other=0.0)
    up = tl.load(gate_up + row * row_stride + WIDTH + i, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    act = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    y = act.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * WIDTH + i, y.to(gate.dtype), mask=mask)


@triton.jit
def drawn_at(logit_of, chosen, node, wanted):
    """The token drawn at a node, or the one that must follow; -1 where there is none, or where it
    isn't wanted, and then nothing is read."""
    at = tl.load(logit_of + node, mask=wanted, other=-1)
    token = tl.load(chosen + tl.maximum(at, 0), mask=at >= 0, other=0)
    return tl.where(at >= 0, token, -2 - at)


@triton.jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=PARTS)
def walk_rows(
    tokens,
    parents,
    given,
    logit_of,
    node_ptr,
    chosen,
    path,
    accepted,
    leaf,
    bonus,
    depth,
    BLOCK: tl.constexpr,
):
    """One row: from its last given node down, always to the child that was drawn."""
    b = tl.program_id(0).to(tl.int64)
    start = tl.load(node_ptr + b)
    stop = tl.load(node_ptr + b + 1)
    certain = start * 0
    for at in range(start, stop, BLOCK):
        i = at + tl.arange(0, BLOCK)
        certain += tl.sum(tl.load(given + i, mask=i < stop, other=0), 0)
    here = start + certain - 1
    token = drawn_at(logit_of, chosen, here, here >= 0)
    count = start * 0
    begin = here + 1
    for d in range(depth):
        child = start * 0 - 1
        for at in range(begin, stop, BLOCK):
            i = at + tl.arange(0, BLOCK)
            real = i < stop
            hit = tl.load(parents + i, mask=real, other=-2) == here
            hit = hit & (tl.load(tokens + i, mask=real, other=-2) == token)
            hit = hit & (tl.load(given + i, mask=real, other=1) == 0)
            child = tl.maximum(child, tl.max(tl.where(hit, i, -1), 0))
        tl.store(path + b * depth + d, child)
        found = child >= 0
        here = tl.where(found, child, here)
        token = tl.where(found, drawn_at(logit_of, chosen, here, found), token)
        count += found.to(tl.int64)
        begin = tl.where(found, here + 1, stop)
    tl.store(accepted + b, count)
    tl.store(leaf + b, here)
    tl.store(bonus + b, token)


@triton.jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=PARTS)
def settle_rows(
    positions,
    slots,
    given,
    node_ptr,
    row_ids,
    path,
    leaf,
    next_slots,
    replayed,
    table,
    table_row,
    columns,
    depth,
    REPLAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the slots of its given nodes, of the walk, and of the token behind it."""
    b = tl.program_id(0).to(tl.int64)
    row = table + tl.load(row_ids + b) * table_row
    start = tl.load(node_ptr + b)
    stop = tl.load(node_ptr + b + 1)
    for at in range(start, stop, BLOCK):
        i = at + tl.arange(0, BLOCK)
        kept = tl.load(given + i, mask=i < stop, other=0) == 1
        if REPLAYS:
            kept = kept & (tl.load(replayed + i, mask=i < stop, other=1) == 0)
        place = tl.load(positions + i, mask=kept, other=0)
        tl.store(row + place, tl.load(slots + i, mask=kept, other=0), mask=kept)
    for at in range(0, depth, BLOCK):
        i = at + tl.arange(0, BLOCK)
        node = tl.load(path + b * depth + i, mask=i < depth, other=-1)
        kept = node >= 0
        if REPLAYS:
            kept = kept & (tl.load(replayed + node, mask=kept, other=1) == 0)
        place = tl.load(positions + node, mask=kept, other=0)
        tl.store(row + place, tl.load(slots + node, mask=kept, other=0), mask=kept)
    slot = tl.load(next_slots + b)
    place = tl.load(positions + tl.load(leaf + b)) + 1
    tl.store(row + tl.minimum(place, columns - 1), slot, mask=slot != 0)
