// Everything but the linear maps, in vectors of eight floats that each compiler target maps onto
// its registers. Included once per instruction set, inside that set's namespace. Products and sums
// are joined only where fma8 says so (-ffp-contract=off): no bit hangs on what a compiler inlines.

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

static inline f8 load8(const float* p) { f8 v; __builtin_memcpy(&v, p, 32); return v; }
static inline void store8(float* p, f8 v) { __builtin_memcpy(p, &v, 32); }
static inline f8 all8(float x) { return f8{x, x, x, x, x, x, x, x}; }

// Of the loops that take the time: two registers where none holds eight floats, since compilers make
// memory of vectors that are wider than a register.
#if !defined(SPEC_PAIRS)
typedef f8 w8;

static inline w8 load_wide(const float* p) { return load8(p); }
static inline void store_wide(float* p, w8 v) { store8(p, v); }
static inline w8 all_wide(float x) { return all8(x); }
#endif

#define SPEC_SHUFFLE __builtin_shufflevector

static inline float sum8(f8 v) {  // a fixed tree of additions
  v += SPEC_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v += SPEC_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  return v[0] + v[1];
}

static inline f8 larger8(f8 a, f8 b) { return a > b ? a : b; }

static inline float max8(f8 v) {
  v = larger8(v, SPEC_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = larger8(v, SPEC_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  return v[0] > v[1] ? v[0] : v[1];
}

// The sums of eight vectors, one a lane; the same tree for each.
static inline f8 sums8(const f8* a) {
  f8 b[4], c[2];
  for (int i = 0; i < 4; i++)
    b[i] = SPEC_SHUFFLE(a[2 * i], a[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
           SPEC_SHUFFLE(a[2 * i], a[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  for (int i = 0; i < 2; i++)
    c[i] = SPEC_SHUFFLE(b[2 * i], b[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
           SPEC_SHUFFLE(b[2 * i], b[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return SPEC_SHUFFLE(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         SPEC_SHUFFLE(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// exp by 2^n * p(r), |r| <= ln2 / 2, a polynomial of degree 6; below -87 it is 0.
static inline f8 exp8(f8 x) {
  const f8 low = all8(-87.0f), high = all8(88.0f);
  const i8 gone = x < low;
  x = x > high ? high : x;
  x = x < low ? low : x;
  const f8 shift = all8(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
  const f8 n = (x * all8(1.44269504f) + shift) - shift;
  const f8 r = (x - n * all8(0.693359375f)) - n * all8(-2.12194440e-4f);
  f8 p = all8(1.0f / 720);
  p = fma8(p, r, all8(1.0f / 120));
  p = fma8(p, r, all8(1.0f / 24));
  p = fma8(p, r, all8(1.0f / 6));
  p = fma8(p, r, all8(0.5f));
  p = fma8(p, r, all8(1.0f));
  p = fma8(p, r, all8(1.0f));
  const i8 exponent = (__builtin_convertvector(n, i8) + 127) << 23;
  f8 scale;
  __builtin_memcpy(&scale, &exponent, 32);
  i8 bits;
  p = p * scale;
  __builtin_memcpy(&bits, &p, 32);
  bits &= ~gone;
  __builtin_memcpy(&p, &bits, 32);
  return p;
}

static inline float scalar_exp(float x) { return exp8(all8(x))[0]; }

static inline f8 tanh8(f8 x) {  // (1 - e) / (1 + e), e = exp(-2 |x|), with x's sign
  i8 bits, sign;
  __builtin_memcpy(&bits, &x, 32);
  sign = bits & (int32_t)0x80000000;
  bits ^= sign;
  f8 size;
  __builtin_memcpy(&size, &bits, 32);
  const f8 e = exp8(size * all8(-2.0f));
  f8 t = (all8(1.0f) - e) / (all8(1.0f) + e);
  __builtin_memcpy(&bits, &t, 32);
  bits |= sign;
  __builtin_memcpy(&t, &bits, 32);
  return t;
}

static inline f8 size8(f8 v) { return v < 0 ? -v : v; }

static inline f8 rounded8(f8 v) {
  const f8 shift = all8(12582912.0f);
  return (v + shift) - shift;
}

typedef int8_t b8 __attribute__((vector_size(8)));

static inline void store_codes(int8_t* q, i8 code) {
  const b8 narrow = __builtin_convertvector(code, b8);
  __builtin_memcpy(q, &narrow, 8);
}

// The codes of one block; the sum of each half, whole numbers that a float holds.
template <bool TWO>
static inline void encode(const float* x, float inverse, int8_t* q, float* sums) {
  f8 sum[2] = {};
  for (int i = 0; i < 4; i++) {
    const f8 whole = rounded8(load8(x + 8 * i) * all8(inverse));
    sum[i / 2] += whole;
    if (TWO) {
      const f8 high = rounded8(whole * all8(1.0f / kPlane));
      const f8 low = whole - high * all8((float)kPlane);
      store_codes(q + kBlock + 8 * i, __builtin_convertvector(low, i8));
      store_codes(q + 8 * i, __builtin_convertvector(high, i8));
    } else {
      store_codes(q + 8 * i, __builtin_convertvector(whole, i8));
    }
  }
  sums[0] = sum8(sum[0]);
  sums[1] = sum8(sum[1]);
}

static void quantise(const float* x, const Codes& codes, int64_t token) {
  const int64_t blocks = codes.inputs / kBlock;
  float inverse = 0.0f;
  if (codes.planes == 2) {
    f8 most = all8(0.0f);
    for (int64_t i = 0; i < codes.inputs; i += 8) {
      const f8 size = size8(load8(x + i));
      most = larger8(size, most);
    }
    const float peak = max8(most), top = 127.0f * kPlane;
    inverse = peak > 0 ? top / peak : 0.0f;
    codes.scale[token] = peak / top;
  }
  int64_t at = token;
  for (int64_t b = 0; b < blocks; b++, x += kBlock, at += codes.tokens) {
    int8_t* q = codes.q + at * kBlock * codes.planes;
    float* sums = codes.half + 2 * at;
    if (codes.planes == 2) {
      encode<true>(x, inverse, q, sums);
    } else {
      f8 most = all8(0.0f);
      for (int i = 0; i < 4; i++) {
        const f8 size = size8(load8(x + 8 * i));
        most = larger8(size, most);
      }
      const float peak = max8(most);
      codes.scale[at] = peak / 127.0f;
      encode<false>(x, peak > 0 ? 127.0f / peak : 0.0f, q, sums);
    }
    codes.whole[at] = sums[0] + sums[1];
  }
}

static void norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
  f8 squares = {};
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    const f8 v = load8(x + i);
    squares = fma8(v, v, squares);
  }
  float sum = sum8(squares);
  for (; i < size; i++) sum += x[i] * x[i];
  const float scale = 1.0f / __builtin_sqrtf(sum / (float)size + eps);
  for (i = 0; i + 8 <= size; i += 8)
    store8(out + i, load8(x + i) * all8(scale) * load8(weight + i));
  for (; i < size; i++) out[i] = x[i] * scale * weight[i];
}

// Pairs (i, i + dim / 2), as Hugging Face's checkpoints have them.
static void rotate(float* x, const float* rotation, int64_t dim) {
  const int64_t half = dim / 2;
  const float *cosine = rotation, *sine = rotation + half;
  int64_t i = 0;
  for (; i + 8 <= half; i += 8) {
    const f8 a = load8(x + i), b = load8(x + half + i), c = load8(cosine + i), s = load8(sine + i);
    store8(x + i, a * c - b * s);
    store8(x + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}

static f8 erf8(f8 x) {  // Abramowitz and Stegun 7.1.26, error below 1.5e-7
  const f8 size = x < 0 ? -x : x;
  const f8 t = all8(1.0f) / (all8(1.0f) + all8(0.3275911f) * size);
  f8 p = all8(1.061405429f);
  p = p * t + all8(-1.453152027f);
  p = p * t + all8(1.421413741f);
  p = p * t + all8(-0.284496736f);
  p = p * t + all8(0.254829592f);
  const f8 y = all8(1.0f) - p * t * exp8(-size * size);
  return x < 0 ? -y : y;
}

static inline f8 activate(f8 x, int kind) {
  if (kind == 0) return x / (all8(1.0f) + exp8(-x));
  if (kind == 1) return all8(0.5f) * x * (all8(1.0f) + erf8(x * all8(0.70710678f)));
  const f8 inner = all8(0.79788456f) * (x + all8(0.044715f) * x * x * x);
  return all8(0.5f) * x * (all8(1.0f) + tanh8(inner));
}

static void gate(float* gated, const float* up, int64_t size, int kind) {
  int64_t i = 0;
  for (; i + 8 <= size; i += 8)
    store8(gated + i, activate(load8(gated + i), kind) * load8(up + i));
  for (; i < size; i++) gated[i] = activate(all8(gated[i]), kind)[0] * up[i];
}

static void halves(const float* x, int64_t size, uint16_t* out) {
  for (int64_t i = 0; i + 8 <= size; i += 8) to_half8(load8(x + i), out + i);
  for (int64_t i = size & ~7; i < size; i++) {
    uint16_t made[8];
    to_half8(all8(x[i]), made);
    out[i] = made[0];
  }
}

static void eights(const float* x, int64_t size, int8_t* out) {
  f8 most = all8(0.0f);
  for (int64_t i = 0; i < size; i += 8) {
    const f8 v = size8(load8(x + i));
    most = larger8(v, most);
  }
  const float peak = max8(most), inverse = peak > 0 ? 127.0f / peak : 0.0f, scale = peak / 127.0f;
  for (int64_t i = 0; i < size; i += 8)
    store_codes(out + i, __builtin_convertvector(rounded8(load8(x + i) * all8(inverse)), i8));
  __builtin_memcpy(out + size, &scale, 4);
}

// A node's keys are taken chunk by chunk of absolute positions, so that the order of every sum hangs
// on positions alone: whether a key was cached or is part of the tree changes no bit.
static inline void widen(const Heads& h, const uint16_t* held, float* out) {
  if (!h.eight) {
    for (int d = 0; d < h.dim; d += 8) store8(out + d, from_half8(held + d));
    return;
  }
  const int8_t* codes = (const int8_t*)held;
  float scale;
  __builtin_memcpy(&scale, codes + h.dim, 4);
  for (int d = 0; d < h.dim; d += 8) {
    b8 narrow;
    __builtin_memcpy(&narrow, codes + d, 8);
    const f8 whole = __builtin_convertvector(__builtin_convertvector(narrow, i8), f8);
    store8(out + d, whole * all8(scale));
  }
}

// Scores of keys [begin, begin + count) of a chunk against the queries of nodes [node, end).
// known: how many slots there are, those behind `count` of the next chunk.
template <int G>
static inline void score(const Heads& h, int node, int end, const int64_t* slots, int begin,
                         int count, int known, float (*scores)[kChunk + 8]) {
  const int group = G ? G : h.group, dim = h.dim;
  alignas(32) float wide[8][kMaxDim];
  for (int i = 0; i < count; i += 8) {  // eight keys at a time, widened once for all heads
    const int keys = count - i < 8 ? count - i : 8;
    // Slots lie anywhere: what comes next is asked for in time.
    for (int j = 0; j < keys; j++)
      for (int d = 0; d < dim; d += 32) {
        if (i + 8 + j < known) __builtin_prefetch(h.k + slots[i + 8 + j] + d);
        __builtin_prefetch(h.v + slots[i + j] + d);
      }
    for (int j = 0; j < 8; j++) widen(h, h.k + slots[i + (j < keys ? j : 0)], wide[j]);
    for (int n = node; n < end; n++)
      for (int g = 0; g < group; g++) {
        w8 acc[8] = {};
        for (int d = 0; d < dim; d += 8) {
          const w8 q = load_wide(h.q[n] + g * dim + d);
          for (int j = 0; j < 8; j++) acc[j] = fma8(q, load_wide(wide[j] + d), acc[j]);
        }
        f8 each[8];
        __builtin_memcpy(each, acc, sizeof each);
        store8(scores[n * group + g] + begin + i, sums8(each));
      }
  }
}

// The same keys' values into the sums, key after key.
template <int G>
static inline void mix(const Heads& h, int node, int end, const int64_t* slots, int begin,
                       int count, const float (*scores)[kChunk + 8]) {
  const int group = G ? G : h.group, dim = h.dim;
  alignas(32) float wide[8][kMaxDim];
  for (int i = 0; i < count; i += 8) {
    const int keys = count - i < 8 ? count - i : 8;
    for (int j = 0; j < keys; j++) widen(h, h.v + slots[i + j], wide[j]);
    for (int n = node; n < end; n++)
      for (int g = 0; g < group; g++) {
        const float* weight = scores[n * group + g] + begin + i;
        float* sums = h.out[n] + g * dim;
        if (keys == 8) {
          w8 by[8];
          for (int j = 0; j < 8; j++) by[j] = all_wide(weight[j]);
          for (int d = 0; d < dim; d += 8) {
            w8 acc = load_wide(sums + d);
            for (int j = 0; j < 8; j++) acc = fma8(by[j], load_wide(wide[j] + d), acc);
            store_wide(sums + d, acc);
          }
        } else {
          for (int d = 0; d < dim; d += 8) {
            w8 acc = load_wide(sums + d);
            for (int j = 0; j < keys; j++)
              acc = fma8(all_wide(weight[j]), load_wide(wide[j] + d), acc);
            store_wide(sums + d, acc);
          }
        }
      }
  }
}

// Scores of a chunk into weights; what was summed before fades with the new maximum.
static inline void soften(const Heads& h, float* s, int count, float* sums, float* top_of,
                          float* bottom) {
  const int padded = (count + 7) & ~7;
  if (h.softcap > 0)
    for (int i = 0; i < count; i += 8)
      store8(s + i, tanh8(load8(s + i) / all8(h.softcap)) * all8(h.softcap));
  for (int i = count; i < padded; i++) s[i] = -INFINITY;
  f8 most = all8(*top_of);
  for (int i = 0; i < padded; i += 8) {
    const f8 v = load8(s + i);
    most = larger8(v, most);
  }
  const float top = max8(most);
  const float fade = scalar_exp(*top_of - top);
  f8 total = {};
  for (int i = 0; i < padded; i += 8) {
    const f8 p = exp8(load8(s + i) - all8(top));
    store8(s + i, p);
    total += p;
  }
  *top_of = top;
  *bottom = *bottom * fade + sum8(total);
  for (int d = 0; d < h.dim; d += 8) store8(sums + d, load8(sums + d) * all8(fade));
}

template <int G>
static void attend_group(const Heads& h) {
  constexpr int kMost = (G ? G : kMaxGroup) * kTogether;
  const int group = G ? G : h.group, dim = h.dim, size = group * dim;
  float scores[kMost][kChunk + 8];
  int64_t last = 0, slots[kChunk + 8];
  for (int n = 0; n < h.nodes; n++) {
    float* out = h.out[n];
    for (int i = 0; i < size; i++) out[i] = 0.0f;
    for (int g = 0; g < group; g++) out[size + g] = -INFINITY, out[size + group + g] = 0.0f;
    last = h.to[n] > last ? h.to[n] : last;
  }
  for (int64_t begin = h.from, end; begin < last; begin = end) {
    end = begin + kChunk - (h.keys[0].first + begin) % kChunk;
    const int64_t border = h.common < end ? h.common : end;  // up to it keys are shared
    const int shared = border > begin ? (int)(border - begin) : 0;
    const auto own = [&](int n) {
      const int64_t to = h.to[n] < end ? h.to[n] : end;
      return to > begin + shared ? (int)(to - begin) - shared : 0;
    };
    const auto fetch = [&](int n, int skip, int count) {
      for (int i = 0; i < count; i++)
        slots[i] = slot_at(h.keys[n], begin + skip + i) * h.stride;
    };
    const int64_t limit = h.common < last ? h.common : last;
    const int known = shared && limit - begin < kChunk + 8 ? (int)(limit - begin) : shared + 8;
    fetch(0, 0, shared ? known : 0);
    score<G>(h, 0, h.nodes, slots, 0, shared, known, scores);
    for (int n = 0; n < h.nodes; n++) {
      const int more = own(n), count = shared + more;
      if (!count) continue;
      fetch(n, shared, more);
      score<G>(h, n, n + 1, slots, shared, more, more, scores);
      for (int g = 0; g < group; g++)
        soften(h, scores[n * group + g], count, h.out[n] + g * dim, h.out[n] + size + g,
               h.out[n] + size + group + g);
    }
    fetch(0, 0, shared);
    mix<G>(h, 0, h.nodes, slots, 0, shared, scores);
    for (int n = 0; n < h.nodes; n++) {
      const int more = own(n);
      fetch(n, shared, more);
      mix<G>(h, n, n + 1, slots, shared, more, scores);
    }
  }
}

static void attend(const Heads& h) {
  switch (h.group) {
    case 1: return attend_group<1>(h);
    case 2: return attend_group<2>(h);
    case 3: return attend_group<3>(h);
    case 4: return attend_group<4>(h);
    case 6: return attend_group<6>(h);
    case 7: return attend_group<7>(h);
    case 8: return attend_group<8>(h);
    default: return attend_group<0>(h);
  }
}

// Segments of one head's keys, first to last, into the mean of the values.
static void merge(const float* parts, int64_t count, int64_t stride, int group, int dim,
                  float* out) {
  for (int g = 0; g < group; g++) {
    const int64_t tops = (int64_t)group * dim + g, bottoms = tops + group;
    float top = -INFINITY, bottom = 0.0f;
    for (int64_t i = 0; i < count; i++) {
      const float t = parts[i * stride + tops];
      top = t > top ? t : top;
    }
    float* o = out + g * dim;
    for (int d = 0; d < dim; d++) o[d] = 0.0f;
    for (int64_t i = 0; i < count; i++) {
      const float* part = parts + i * stride;
      const float weight = scalar_exp(part[tops] - top);
      bottom += part[bottoms] * weight;
      for (int d = 0; d < dim; d += 8)
        store8(o + d, load8(o + d) + all8(weight) * load8(part + g * dim + d));
    }
    for (int d = 0; d < dim; d += 8) store8(o + d, load8(o + d) / all8(bottom));
  }
}

static inline int code_at(const Matrix& m, const uint8_t* planes, int step, int at) {
  if (m.bits == 8) return planes[step * 64 + at];
  const uint8_t nibbles = planes[(step & 3) * 64 + at];
  int code = step < 4 ? nibbles & 15 : nibbles >> 4;
  const uint8_t* above = planes + 256;
  if (m.bits == 5) code |= (above[at] >> step & 1) << 4;
  if (m.bits == 6) code |= (above[(step >> 2) * 64 + at] >> (2 * (step & 3)) & 3) << 4;
  return code;
}

static void dequantise_row(const Matrix& m, int64_t row, float* out) {
  const int lane = (int)(row % kRows);
  const int64_t blocks = m.inputs / kBlock;
  const size_t bytes = block_bytes(m);
  const uint8_t* p = m.data + (size_t)(row / kRows) * blocks * bytes;
  for (int64_t b = 0; b < blocks; b++, p += bytes) {
    const uint16_t* scales = (const uint16_t*)p;
    const uint16_t* minima = scales + kRows * m.subblocks;
    const uint8_t* planes = p + 32 * m.subblocks + (m.minima ? 32 : 0);
    const float low = m.minima ? half_to_float(minima[lane]) : 0.0f;
    for (int step = 0; step < 8; step++) {
      const int sub = m.subblocks == 2 ? step / 4 : 0;
      const float scale = half_to_float(scales[kRows * sub + lane]);
      for (int j = 0; j < 4; j++) {
        const int code = code_at(m, planes, step, lane * 4 + j);
        out[b * kBlock + step * 4 + j] = scale * (float)(code - m.zero) + low;
      }
    }
  }
}
