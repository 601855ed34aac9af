// The likeliest tokens of a row of logits, with the target's own noise where a row is sampled.
// Included once per instruction set, behind parts.inl.

typedef uint32_t u8 __attribute__((vector_size(32)));

// Natural logarithm of positive normal numbers; the polynomial is Cephes' logf.
static inline f8 log8(f8 x) {
  i8 bits;
  __builtin_memcpy(&bits, &x, 32);
  i8 exponent = (bits >> 23) - 126;
  bits = (bits & 0x7fffff) | 0x3f000000;
  f8 m;
  __builtin_memcpy(&m, &bits, 32);  // [0.5, 1)
  const i8 small = m < all8(0.70710678f);
  exponent += small;  // -1 where true
  m = small ? m + m : m;
  m -= all8(1.0f);
  const f8 z = m * m, e = __builtin_convertvector(exponent, f8);
  f8 p = all8(7.0376836292e-2f);
  p = fma8(p, m, all8(-1.1514610310e-1f));
  p = fma8(p, m, all8(1.1676998740e-1f));
  p = fma8(p, m, all8(-1.2420140846e-1f));
  p = fma8(p, m, all8(1.4249322787e-1f));
  p = fma8(p, m, all8(-1.6668057665e-1f));
  p = fma8(p, m, all8(2.0000714765e-1f));
  p = fma8(p, m, all8(-2.4999993993e-1f));
  p = fma8(p, m, all8(3.3333331174e-1f));
  const f8 y = p * m * z + e * all8(-2.12194440e-4f) - all8(0.5f) * z;
  return m + y + e * all8(0.693359375f);
}

// The finaliser of kernels/noise.py, in 32 bits.
static inline u8 scattered8(u8 h) {
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ h >> 16;
}

// -log(u) of uniform 1 - u as kernels/noise.py makes it: Gumbel noise is minus its logarithm.
static inline f8 exponential8(u8 ids, uint64_t key) {
  const u8 bits = scattered8(scattered8(ids + (uint32_t)key) ^ (uint32_t)(key >> 32));
  f8 u = (__builtin_convertvector(bits, f8) + all8(0.5f)) * all8(2.3283064365386963e-10f);
  const f8 most = all8(1.0f - 5.9604644775390625e-8f), one = all8(1.0f);
  u = u > most ? most : u;
  // log(1 - u), the rounding of 1 - u taken out again (Kahan).
  const f8 rest = one - u, gone = one - rest;
  const f8 kahan = -log8(rest) * (u / (gone == 0 ? one : gone));
  return gone == 0 ? u : kahan;
}

// The largest `count` of x [size], the first of equals first.
static void largest(const float* x, int64_t size, int count, int32_t* chosen, float* values) {
  int held = 0;
  const auto insert = [&](int64_t i) {
    int at = held < count ? held++ : count - 1;
    for (; at > 0 && values[at - 1] < x[i]; at--) {
      values[at] = values[at - 1];
      chosen[at] = chosen[at - 1];
    }
    values[at] = x[i];
    chosen[at] = (int32_t)i;
  };
  int64_t i = 0;
  for (; i < count && i < size; i++) insert(i);
  for (; i < size && i % 64; i++)
    if (x[i] > values[count - 1]) insert(i);
  for (; i + 64 <= size; i += 64) {
    f8 top = load8(x + i);
    for (int j = 8; j < 64; j += 8) {
      const f8 other = load8(x + i + j);
      top = larger8(other, top);
    }
    if (!(max8(top) > values[count - 1])) continue;
    for (int64_t j = i; j < i + 64; j++)
      if (x[j] > values[count - 1]) insert(j);
  }
  for (; i < size; i++)
    if (x[i] > values[count - 1]) insert(i);
}

// At most 0 in spite of rounding, and a number in spite of what the logits were: scores fall along
// a path and can be sorted.
static inline float log_probability(float x) { return x <= 0 ? x : x > 0 ? 0.0f : -INFINITY; }

static void pick(float* x, int64_t size, const Draw& draw, int count, int32_t* chosen,
                 float* scores) {
  const int64_t end = (size + kRows - 1) / kRows * kRows;
  for (int64_t i = size; i < end; i++) x[i] = -INFINITY;
  f8 most = all8(-INFINITY), total = {};
  for (int64_t i = 0; i < end; i += 8) {
    const f8 v = load8(x + i);
    most = larger8(v, most);
  }
  const f8 top = all8(max8(most));
  if (draw.temperature > 0) {
    // exp(logit / T + noise): it has the order of what it is the exponential of.
    u8 count8 = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int64_t i = 0; i < end; i += 8, count8 += 8) {
      u8 ids = count8;
      if (draw.ids) __builtin_memcpy(&ids, draw.ids + i, 32);
      const f8 weight = exp8((load8(x + i) - top) / all8(draw.temperature));
      const f8 noisy = weight / exponential8(ids, draw.key);
      store8(x + i, noisy);
      total += noisy;
    }
    largest(x, size, count, chosen, scores);
    const float all = __builtin_logf(sum8(total));
    for (int i = 0; i < count; i++) scores[i] = log_probability(__builtin_logf(scores[i]) - all);
  } else {
    for (int64_t i = 0; i < end; i += 8) total += exp8(load8(x + i) - top);
    largest(x, size, count, chosen, scores);
    const float all = __builtin_logf(sum8(total));
    for (int i = 0; i < count; i++) scores[i] = log_probability(scores[i] - top[0] - all);
  }
}
