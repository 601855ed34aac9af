// Linear maps of AArch64, from `meet` (products of four rows' codes with a token's) and `arrange`
// (what it wants done to the codes before); included once per kind of integer product.

// The codes of a block, signed: eight steps, four inputs of four rows each; those of eight bits
// less 128. planes: of these rows.
template <int BITS>
static inline void unpack(const uint8_t* planes, int8x16_t* w) {
  if constexpr (BITS == 8) {
    for (int s = 0; s < 8; s++)
      w[s] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(planes + s * 64), vdupq_n_u8(0x80)));
    return;
  }
  uint8x16_t v[8];
  for (int s = 0; s < 4; s++) {
    const uint8x16_t both = vld1q_u8(planes + s * 64);
    v[s] = vandq_u8(both, vdupq_n_u8(15)), v[s + 4] = vshrq_n_u8(both, 4);
  }
  if constexpr (BITS == 5) {
    const uint8x16_t above = vld1q_u8(planes + 256), bit = vdupq_n_u8(16);
    for (int s = 0; s < 8; s++)
      v[s] = vorrq_u8(v[s], vandq_u8(vshlq_u8(above, vdupq_n_s8((int8_t)(4 - s))), bit));
  }
  if constexpr (BITS == 6) {
    const uint8x16_t bits = vdupq_n_u8(48);
    for (int s = 0; s < 8; s++) {
      const uint8x16_t above = vld1q_u8(planes + 256 + (s >> 2) * 64);
      v[s] = vorrq_u8(
          v[s], vandq_u8(vshlq_u8(above, vdupq_n_s8((int8_t)(4 - 2 * (s & 3)))), bits));
    }
  }
  for (int s = 0; s < 8; s++) w[s] = vreinterpretq_s8_u8(v[s]);
}

// Four rows (a quarter of a group) times T tokens.
template <int BITS, int SUBS, bool MINIMA, int PLANES, int T>
static inline void tile(const Matrix& m, const uint8_t* p, int quarter, const Codes& x,
                        int64_t token, float* out, int64_t stride, bool add, const float* bias) {
  const int64_t blocks = m.inputs / kBlock;
  constexpr size_t kCodes = BITS == 8 ? 512 : BITS == 6 ? 384 : BITS == 5 ? 320 : 256;
  constexpr size_t kBytes = kCodes + 32 * SUBS + (MINIMA ? 32 : 0);
  constexpr int kWide = kBlock * PLANES;  // from token to token
  const float32x4_t zero = vdupq_n_f32((float)-m.zero);
  float32x4_t acc[T];
  for (int t = 0; t < T; t++) acc[t] = vdupq_n_f32(0.0f);
  const int8_t* q = x.q + token * kWide;
  const float* scale = x.scale + token;
  const float* weights = (SUBS == 2 ? x.half : x.whole) + token * SUBS;
  for (int64_t b = 0; b < blocks; b++, p += kBytes, q += x.tokens * kWide,
               weights += x.tokens * SUBS, scale += PLANES == 1 ? x.tokens : 0) {
    __builtin_prefetch(p + 2048 + quarter * (kBytes / 4));
    const uint16_t* scales = (const uint16_t*)p + quarter * 4;
    int8x16_t w[8];
    unpack<BITS>(p + 32 * SUBS + (MINIMA ? 32 : 0) + quarter * 16, w);
    arrange<PLANES>(w);
    float32x4_t by[SUBS], under[SUBS];
    for (int sub = 0; sub < SUBS; sub++) {
      by[sub] = wider(scales + kRows * sub);
      under[sub] = MINIMA ? wider(scales + kRows * SUBS) : vmulq_f32(by[sub], zero);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      int32x4_t sums[SUBS];
      meet<BITS, SUBS, PLANES>(w, q + t * kWide, sums);
#pragma GCC unroll 2
      for (int sub = 0; sub < SUBS; sub++) {
        float32x4_t factor = by[sub], low = under[sub];
        if constexpr (PLANES == 1) {
          factor = vmulq_f32(factor, vdupq_n_f32(scale[t]));
          low = vmulq_f32(low, vdupq_n_f32(scale[t]));
        }
        const float32x4_t weight = vdupq_n_f32(weights[t * SUBS + sub]);
        if constexpr (BITS == 8)  // these were summed less 128
          sums[sub] = vaddq_s32(sums[sub], vshlq_n_s32(vcvtq_s32_f32(weight), 7));
        acc[t] = vfmaq_f32(acc[t], vcvtq_f32_s32(sums[sub]), factor);
        acc[t] = vfmaq_f32(acc[t], low, weight);
      }
    }
  }
  for (int t = 0; t < T; t++) {
    float* o = out + t * stride;
    float32x4_t made = bias ? vld1q_f32(bias) : vdupq_n_f32(0.0f);
    made = vfmaq_f32(made, acc[t], vdupq_n_f32(PLANES == 2 ? scale[t] : 1.0f));
    if (add) made = vaddq_f32(vld1q_f32(o), made);
    vst1q_f32(o, made);
  }
}

template <int BITS, int SUBS, bool MINIMA, int PLANES>
static void rows16(const Matrix& m, const Codes& x, int64_t tokens, float* out, int64_t stride,
                   bool add, int from, int to) {
  const int64_t blocks = m.inputs / kBlock;
  const size_t bytes = block_bytes(m);
  for (int g = from; g < to; g++) {
    const uint8_t* p = m.data + (size_t)g * blocks * bytes;
    for (int quarter = 0; quarter < 4; quarter++) {
      const int row = g * kRows + quarter * 4;
      if (row >= m.outputs) break;
      const float* bias = m.bias ? m.bias + row : nullptr;
      float* o = out + row;
      int64_t t = 0;
      const auto some = [&](auto count) {
        constexpr int T = decltype(count)::value;
        tile<BITS, SUBS, MINIMA, PLANES, T>(m, p, quarter, x, t, o + t * stride, stride, add, bias);
        t += T;
      };
      while (tokens - t >= 8) some(Count<8>());
      if (tokens - t >= 4) some(Count<4>());
      if (tokens - t >= 2) some(Count<2>());
      if (tokens - t == 1) some(Count<1>());
    }
  }
}

#include "dispatch.inl"
