// Everything but the linear maps, in vectors of eight floats that each compiler target maps onto
// its registers. Included once per instruction set, inside that set's namespace. Products and sums
// are joined only where fma8 says so (-ffp-contract=off): no bit hangs on what a compiler inlines.

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

static inline f8 load8(const float* p) { f8 v; __builtin_memcpy(&v, p, 32); return v; }
static inline void store8(float* p, f8 v) { __builtin_memcpy(p, &v, 32); }
static inline f8 all8(float x) { return f8{x, x, x, x, x, x, x, x}; }

static inline float sum8(f8 v) {  // a fixed tree of additions
  const float a = (v[0] + v[4]) + (v[2] + v[6]), b = (v[1] + v[5]) + (v[3] + v[7]);
  return a + b;
}

static inline float max8(f8 v) {
  float m = v[0];
  for (int i = 1; i < 8; i++) m = v[i] > m ? v[i] : m;
  return m;
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

// The codes of one block; the sum of each half.
template <bool TWO>
static inline void encode(const float* x, float inverse, int8_t* q, int64_t plane, int32_t* sums) {
  i8 sum[2] = {};
  for (int i = 0; i < 4; i++) {
    const f8 whole = rounded8(load8(x + 8 * i) * all8(inverse));
    const i8 code = __builtin_convertvector(whole, i8);
    sum[i / 2] += code;
    i8 high = code;
    if (TWO) {
      high = __builtin_convertvector(rounded8(whole * all8(1.0f / kPlane)), i8);
      const i8 low = code - high * kPlane;
      for (int j = 0; j < 8; j++) q[plane + 8 * i + j] = (int8_t)low[j];
    }
    for (int j = 0; j < 8; j++) q[8 * i + j] = (int8_t)high[j];
  }
  for (int i = 0; i < 2; i++) {
    sums[i] = 0;
    for (int j = 0; j < 8; j++) sums[i] += sum[i][j];
  }
}

static void quantise(const float* x, const Codes& codes, int64_t token) {
  int8_t* q = codes.q + token * codes.inputs;
  float* scale = codes.scale + token * codes.blocks;
  float* whole = codes.whole + token * codes.blocks;
  float* half = codes.half + token * codes.blocks * 2;
  float inverse = 0.0f;
  if (codes.plane) {
    f8 most = all8(0.0f);
    for (int64_t i = 0; i < codes.inputs; i += 8) {
      const f8 size = size8(load8(x + i));
      most = size > most ? size : most;
    }
    const float peak = max8(most), top = 127.0f * kPlane;
    inverse = peak > 0 ? top / peak : 0.0f;
    scale[0] = peak / top;
  }
  for (int64_t b = 0; b < codes.blocks; b++, x += kBlock, q += kBlock) {
    int32_t sums[2];
    if (codes.plane) {
      encode<true>(x, inverse, q, codes.plane, sums);
    } else {
      f8 most = all8(0.0f);
      for (int i = 0; i < 4; i++) {
        const f8 size = size8(load8(x + 8 * i));
        most = size > most ? size : most;
      }
      const float peak = max8(most);
      scale[b] = peak / 127.0f;
      encode<false>(x, peak > 0 ? 127.0f / peak : 0.0f, q, 0, sums);
    }
    half[2 * b] = (float)sums[0];
    half[2 * b + 1] = (float)sums[1];
    whole[b] = (float)(sums[0] + sums[1]);
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

static inline int64_t slot_at(const Keys& keys, int64_t i) {
  return i < keys.cached ? keys.table[i] : keys.own[i - keys.cached];
}

// Keys [from, to) of one node, chunk by chunk of absolute positions, so that the order of every sum
// hangs on positions alone: whether a key was cached or is part of the tree changes no bit.
template <int G>
static void attend_group(const Head& head, const Keys& keys, int64_t from, int64_t to,
                         float* out) {
  constexpr int kMost = G ? G : kMaxGroup;
  const int group = G ? G : head.group, dim = head.dim;
  float* sums = out;
  float* tops = out + (int64_t)group * dim;
  float* bottoms = tops + group;
  for (int i = 0; i < group * dim; i++) sums[i] = 0.0f;
  for (int g = 0; g < group; g++) tops[g] = -INFINITY, bottoms[g] = 0.0f;
  float scores[kMost][kChunk];
  int64_t slots[kChunk];
  while (from < to) {
    const int64_t position = keys.first + from;
    int64_t end = from + kChunk - position % kChunk;
    if (end > to) end = to;
    const int count = (int)(end - from);
    for (int i = 0; i < count; i++) slots[i] = slot_at(keys, from + i) * head.stride;
    for (int i = 0; i < count; i++) {
      const uint16_t* k = head.k + slots[i];
      f8 acc[kMost];
      for (int g = 0; g < group; g++) acc[g] = f8{};
      for (int d = 0; d < dim; d += 8) {
        const f8 kd = from_half8(k + d);
        for (int g = 0; g < group; g++) acc[g] = fma8(load8(head.q + g * dim + d), kd, acc[g]);
      }
      for (int g = 0; g < group; g++) scores[g][i] = sum8(acc[g]);
    }
    const int padded = (count + 7) & ~7;
    for (int g = 0; g < group; g++) {
      float* s = scores[g];
      if (head.softcap > 0)
        for (int i = 0; i < count; i += 8)
          store8(s + i, tanh8(load8(s + i) / all8(head.softcap)) * all8(head.softcap));
      for (int i = count; i < padded; i++) s[i] = -INFINITY;
      float top = tops[g];
      for (int i = 0; i < count; i++) top = s[i] > top ? s[i] : top;
      const float fade = scalar_exp(tops[g] - top);
      f8 total = {};
      for (int i = 0; i < padded; i += 8) {
        const f8 p = exp8(load8(s + i) - all8(top));
        store8(s + i, p);
        total += p;
      }
      tops[g] = top;
      bottoms[g] = bottoms[g] * fade + sum8(total);
      for (int d = 0; d < dim; d += 8) {
        f8 acc = load8(sums + g * dim + d) * all8(fade);
        store8(sums + g * dim + d, acc);
      }
    }
    for (int d = 0; d < dim; d += 8) {
      f8 acc[kMost];
      for (int g = 0; g < group; g++) acc[g] = load8(sums + g * dim + d);
      for (int i = 0; i < count; i++) {
        const f8 vd = from_half8(head.v + slots[i] + d);
        for (int g = 0; g < group; g++) acc[g] = fma8(all8(scores[g][i]), vd, acc[g]);
      }
      for (int g = 0; g < group; g++) store8(sums + g * dim + d, acc[g]);
    }
    from = end;
  }
}

static void attend(const Head& head, const Keys& keys, int64_t from, int64_t to, float* out) {
  switch (head.group) {
    case 1: return attend_group<1>(head, keys, from, to, out);
    case 2: return attend_group<2>(head, keys, from, to, out);
    case 3: return attend_group<3>(head, keys, from, to, out);
    case 4: return attend_group<4>(head, keys, from, to, out);
    case 6: return attend_group<6>(head, keys, from, to, out);
    case 7: return attend_group<7>(head, keys, from, to, out);
    case 8: return attend_group<8>(head, keys, from, to, out);
    default: return attend_group<0>(head, keys, from, to, out);
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
