# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton programs that draw tokens: masks, temperature, filters, noise and arg-max over V.

Device code only; fused_draw.py launches them. Noise is made where it is added and never stored. A
filter's cut is searched among the logits' bits instead of sorting them. What is drawn is specified
by spec/sampling.py and spec/filters.py, the noise by noise.py.
"""

import triton
import triton.language as tl

NEVER = tl.constexpr(float("-inf"))
LOWEST_KEY = tl.constexpr(-(1 << 31))
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
PIVOTS = tl.constexpr(16)
# Parts of larger buffers: no program is compiled anew because one starts at a multiple of 16.
PARTS = [
    "masks", "mask_of", "temperature", "seeds", "positions", "top_k", "top_p", "min_p",
]  # fmt: skip
# Searches over 32 bits with 16 pivots.
PASSES = tl.constexpr(8)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def mix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def noise_of(seed, position, tokens):
    """Gumbel noise of tokens at one (seed, position): `noise.gumbel`'s but for the last bits.

    Small uniform values take the series of log(1 - u): hardware logarithms are coarse near 1, and
    the largest noise comes from there.
    """
    gamma = tl.full((1,), GAMMA, tl.uint64)
    state = mix64(seed.to(tl.uint64, bitcast=True) + gamma)
    key = mix64(state + position.to(tl.uint64, bitcast=True) * gamma)
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    h = mix32(tokens.to(tl.uint32) + low)
    h = mix32(h ^ high)
    u = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = 0.125 + u * (1.0 / 9)
    series = 0.14285714 + u * series
    series = 0.16666667 + u * series
    series = 0.2 + u * series
    series = 0.25 + u * series
    series = 0.33333334 + u * series
    series = 0.5 + u * series
    series = u + u * u * series
    return -tl.log(tl.where(u < 0.125, series, -tl.log(1.0 - u)))


@triton.jit
def logits_at(logits, masks, mask, ids, vocab, words):
    """Logits of these ids as float32; -inf behind the vocabulary and where the mask says so."""
    inside = ids < vocab
    x = tl.load(logits + ids, mask=inside, other=NEVER).to(tl.float32)
    word = ids // 64
    row = mask + tl.zeros_like(word)  # a scalar would not do beside a block in the interpreter
    listed = inside & (row >= 0) & (word < words)
    held = tl.load(masks + row * words + word, mask=listed, other=0)
    allowed = (row < 0) | (((held >> (ids & 63).to(tl.int64)) & 1) != 0)
    return tl.where(inside & allowed, x, NEVER)


@triton.jit(do_not_specialize_on_alignment=PARTS)
def best_of_block(
    logits,
    masks,
    mask_of,
    tops,
    temperature,
    seeds,
    positions,
    values,
    tokens,
    vocab,
    words,
    logits_row,
    blocks,
    DRAW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One stretch of a row. DRAW: its best sum of scaled logit and noise and that token; else its
    largest logit. Rows at temperature 0 have no noise."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = logits_at(logits + row * logits_row, masks, tl.load(mask_of + row), ids, vocab, words)
    if DRAW:
        t = tl.load(temperature + row)
        if t > 0:
            at = tl.arange(0, BLOCKS)
            top = tl.max(tl.load(tops + row * blocks + at, mask=at < blocks, other=NEVER), 0)
            top = tl.where(top == NEVER, 0.0, top)
            noise = noise_of(tl.load(seeds + row), tl.load(positions + row), ids)
            x = tl.div_rn(x - top, t) + noise
        best = tl.max(x, 0)
        tl.store(values + row * blocks + block, best)
        found = tl.min(tl.where((x == best) & (ids < vocab), ids, vocab - 1), 0)
        tl.store(tokens + row * blocks + block, found)
    else:
        tl.store(tops + row * blocks + block, tl.max(x, 0))


@triton.jit
def best_of_row(values, tokens, out, blocks, BLOCKS: tl.constexpr):
    """One row: the best of its stretches, the lowest token among equals."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    value = tl.load(values + row * blocks + at, mask=at < blocks, other=NEVER)
    token = tl.load(tokens + row * blocks + at, mask=at < blocks, other=0)
    best = (value == tl.max(value, 0)) & (at < blocks)
    last = tl.max(tl.where(at < blocks, token, 0), 0)
    tl.store(out + row, tl.min(tl.where(best, token, last), 0).to(tl.int64))


@triton.jit
def key_of(x):
    """Integers that order like the floats; adding zero makes -0 a +0."""
    raw = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(raw < 0, raw ^ 0x7FFFFFFF, raw).to(tl.int64)


@triton.jit
def weight_of(key, top, t):
    """exp((logit - top) / t) of the logit that has this key."""
    raw = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32)
    return tl.exp(tl.div_rn(raw.to(tl.float32, bitcast=True) - top, t)).to(tl.float64)


@triton.jit
def weight_above(
    logits, masks, mask, vocab, words, top, t, edges, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """For each of the edges [PIVOTS]: how many logits (COUNT), or what weight, lie above it.

    A weight is exp((logit - top) / t); sums are float64, as the specification's.
    """
    sums = tl.zeros((PIVOTS,), tl.float64)
    for at in range(0, vocab, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        x = logits_at(logits, masks, mask, ids, vocab, words)
        above = (key_of(x)[:, None] > edges[None, :]) & (ids < vocab)[:, None]
        if COUNT:
            sums += tl.sum(above.to(tl.int32), 0).to(tl.float64)
        else:
            w = tl.exp(tl.div_rn(x - top, t)).to(tl.float64)
            sums += tl.sum(tl.where(above, w[:, None], 0.0), 0)
    return sums


@triton.jit
def lowest_below(
    logits, masks, mask, vocab, words, top, t, low, high, limit,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least key in low..high with less than `limit` above it; high is one of those."""
    i = tl.arange(0, PIVOTS).to(tl.int64)
    for _ in range(PASSES):
        step = (high - low + PIVOTS) // PIVOTS
        edges = tl.maximum(high - i * step, low)
        sums = weight_above(logits, masks, mask, vocab, words, top, t, edges, COUNT, BLOCK)
        good = tl.min(tl.where((sums < limit) | (i == 0), edges, high), 0)
        low = tl.maximum(low, good - step + 1)
        high = good
    return high


@triton.jit
def top_k_cut(
    logits, masks, mask, vocab, words, top, t, highest, k, BLOCK: tl.constexpr
):  # fmt: skip
    """Key of the k-th largest logit, and how many of those that have it are among the k."""
    lowest = tl.full((), LOWEST_KEY, tl.int64)
    limit = k.to(tl.float64)
    cut = lowest_below(
        logits, masks, mask, vocab, words, top, t, lowest, highest, limit, True, BLOCK
    )
    edges = tl.full((PIVOTS,), 0, tl.int64) + cut
    above = weight_above(logits, masks, mask, vocab, words, top, t, edges, True, BLOCK)
    return cut, k - tl.max(above, 0).to(tl.int64)


@triton.jit
def top_p_cut(
    logits, masks, mask, vocab, words, top, t, highest, p, cut, ties, BLOCK: tl.constexpr
):  # fmt: skip
    """The cut that top_p makes among the tokens above `cut` and `ties` of those at it.

    A token survives while the weight before it is less than the share p of all.
    """
    none = tl.full((PIVOTS,), 0, tl.int64)
    inside = weight_above(logits, masks, mask, vocab, words, top, t, none + cut, False, BLOCK)
    limit = tl.max(inside, 0)
    if cut > LOWEST_KEY:
        limit += ties.to(tl.float64) * weight_of(cut, top, t)
    limit = limit * p
    lower = lowest_below(
        logits, masks, mask, vocab, words, top, t, cut, highest, limit, False, BLOCK
    )
    above = weight_above(logits, masks, mask, vocab, words, top, t, none + lower, False, BLOCK)
    weight = weight_of(lower, top, t)
    room = (limit - tl.max(above, 0)) / tl.where(weight > 0, weight, 1.0)
    fit = tl.ceil(tl.minimum(tl.where(weight > 0, room, 0.0), 2.0e9)).to(tl.int64)
    return lower, tl.where(lower == cut, tl.minimum(ties, fit), fit)


@triton.jit(do_not_specialize_on_alignment=PARTS)
def draw_filtered(
    logits, masks, mask_of, temperature, seeds, positions, top_k, top_p, min_p, out, vocab, words,
    logits_row, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the best sum of scaled logit and noise among the tokens that survive the filters.

    All three keep the first tokens of one order (larger logit, then lower id). So each is a cut: a
    key, and how many of the tokens that have it.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    mask = tl.load(mask_of + row)
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    k = tl.where(k < vocab, k, 0)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    tops = tl.full((BLOCK,), NEVER, tl.float32)
    for at in range(0, vocab, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        tops = tl.maximum(tops, logits_at(logits, masks, mask, ids, vocab, words))
    top = tl.max(tops, 0)
    highest = key_of(top)
    top = tl.where(top == NEVER, 0.0, top)

    cut = tl.full((), LOWEST_KEY, tl.int64)
    ties = k * 0 + vocab
    if k > 0:
        cut, ties = top_k_cut(logits, masks, mask, vocab, words, top, t, highest, k, BLOCK)
    if p < 1:
        cut, ties = top_p_cut(
            logits, masks, mask, vocab, words, top, t, highest, p, cut, ties, BLOCK
        )

    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    found = tl.full((), 0, tl.int32)
    score = tl.full((), NEVER, tl.float32)
    equal = tl.full((), 0, tl.int32)
    highs = tl.full((), 0, tl.int32)
    for at in range(0, vocab, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        x = logits_at(logits, masks, mask, ids, vocab, words)
        key = key_of(x)
        z = tl.div_rn(x - top, t)
        same = ((key == cut) & (ids < vocab)).to(tl.int32)
        rank = equal + tl.cumsum(same, 0) - same
        keep = (key > cut) | ((same != 0) & (rank < ties))
        keep = keep & (tl.exp(z).to(tl.float64) >= least)
        first = ((key == highest) & (ids < vocab)).to(tl.int32)
        keep = keep | ((first != 0) & (highs + tl.cumsum(first, 0) == 1))
        equal += tl.sum(same, 0)
        highs += tl.sum(first, 0)
        total = tl.where(keep, z + noise_of(seed, position, ids), NEVER)
        high = tl.max(total, 0)
        token = tl.min(tl.where(total == high, ids, vocab - 1), 0)
        found = tl.where(high > score, token, found)
        score = tl.maximum(score, high)
    tl.store(out + row, found.to(tl.int64))
