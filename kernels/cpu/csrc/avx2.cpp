// AVX2: integer products by maddubs (four-bit sums of a block fit into 16 bits), eight rows a lane.
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

#include <cmath>

#include "half.h"
#include "native.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#endif

namespace native {
namespace avx2 {

#include "x86.inl"

#include "parts.inl"

#include "pick.inl"

// The codes of one step (four inputs of eight rows) of a half group; at: its offset in the planes.
template <int BITS>
static inline __m256i codes(const uint8_t* planes, int step, int at) {
  if constexpr (BITS == 8) {
    return _mm256_loadu_si256((const __m256i*)(planes + step * 64 + at));
  } else {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i v = _mm256_loadu_si256((const __m256i*)(planes + (step & 3) * 64 + at));
    if (step >= 4) v = _mm256_srli_epi16(v, 4);
    v = _mm256_and_si256(v, nibble);
    if constexpr (BITS == 5) {
      __m256i high = _mm256_loadu_si256((const __m256i*)(planes + 256 + at));
      high = step < 4 ? _mm256_slli_epi16(high, 4 - step) : _mm256_srli_epi16(high, step - 4);
      v = _mm256_or_si256(v, _mm256_and_si256(high, _mm256_set1_epi8(16)));
    }
    if constexpr (BITS == 6) {
      __m256i high = _mm256_loadu_si256((const __m256i*)(planes + 256 + (step >> 2) * 64 + at));
      const int by = 2 * (step & 3);
      high = by < 4 ? _mm256_slli_epi16(high, 4 - by) : _mm256_srli_epi16(high, by - 4);
      v = _mm256_or_si256(v, _mm256_and_si256(high, _mm256_set1_epi8(48)));
    }
    return v;
  }
}

static inline __m256 wider(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}

// Sums of products of one sub-block of codes with one plane of activations, eight rows each.
template <int BITS, int SUBS, int T>
static inline void products(const uint8_t* planes, int half, int sub, const int8_t* q, int stride,
                            __m256i* sums) {
  constexpr int kSteps = 8 / SUBS;
  // Sums of pairs stay below 2^15 for 8 steps of 15 * 127 * 2, 4 of 31, 2 of 63.
  constexpr int kFits = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i pairs[T];
  for (int t = 0; t < T; t++) sums[t] = pairs[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int s = 0; s < kSteps; s++) {
    const int step = sub * kSteps + s;
    __m256i w = codes<BITS>(planes, step, half * 32), size = w;
    if constexpr (BITS == 8) {  // signed here: unsigned sums of pairs would not fit
      w = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
      size = _mm256_abs_epi8(w);
    }
    for (int t = 0; t < T; t++) {
      int32_t four;
      __builtin_memcpy(&four, q + t * stride + step * 4, 4);
      __m256i x = _mm256_set1_epi32(four);
      if constexpr (BITS == 8) x = _mm256_sign_epi8(x, w);
      const __m256i product = _mm256_maddubs_epi16(size, x);
      pairs[t] = s % kFits ? _mm256_add_epi16(pairs[t], product) : product;
    }
    if (s % kFits == kFits - 1 || s == kSteps - 1)
      for (int t = 0; t < T; t++)
        sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(pairs[t], ones));
  }
}

// Eight rows (half a group) times T tokens.
template <int BITS, int SUBS, bool MINIMA, int PLANES, int T>
static inline void tile(const Matrix& m, const uint8_t* p, int half, const Codes& x, int64_t token,
                        float* out, int64_t stride, bool add, const float* bias) {
  const int64_t blocks = m.inputs / kBlock;
  constexpr size_t kCodes = BITS == 8 ? 512 : BITS == 6 ? 384 : BITS == 5 ? 320 : 256;
  constexpr size_t kBytes = kCodes + 32 * SUBS + (MINIMA ? 32 : 0);
  const __m256 zero = _mm256_set1_ps((float)-m.zero);
  __m256 acc[T];
  for (int t = 0; t < T; t++) acc[t] = _mm256_setzero_ps();
  constexpr int kWide = kBlock * PLANES;  // from token to token
  const int8_t* q = x.q + token * kWide;
  const float* scale = x.scale + token;
  const float* weights = (SUBS == 2 ? x.half : x.whole) + token * SUBS;
  for (int64_t b = 0; b < blocks; b++, p += kBytes, q += x.tokens * kWide,
               weights += x.tokens * SUBS, scale += PLANES == 1 ? x.tokens : 0) {
    const uint8_t* planes = p + 32 * SUBS + (MINIMA ? 32 : 0);
    const uint16_t* scales = (const uint16_t*)p + half * 8;
    _mm_prefetch((const char*)(p + 2048 + half * kBytes / 2), _MM_HINT_T0);
#pragma GCC unroll 2
    for (int sub = 0; sub < SUBS; sub++) {
      const __m256 dw = wider(scales + kRows * sub);
      const __m256 low = MINIMA ? wider(scales + kRows * SUBS) : _mm256_mul_ps(dw, zero);
      __m256i sums[T];
      products<BITS, SUBS, T>(planes, half, sub, q, kWide, sums);
      if constexpr (PLANES == 2) {
        __m256i lows[T];
        products<BITS, SUBS, T>(planes, half, sub, q + kBlock, kWide, lows);
        for (int t = 0; t < T; t++) {
          const __m256i high = _mm256_slli_epi32(sums[t], kPlaneBits);
          sums[t] = _mm256_add_epi32(high, lows[t]);
        }
      }
      for (int t = 0; t < T; t++) {
        const __m256 weight = _mm256_set1_ps(weights[t * SUBS + sub]);
        __m256 by = dw, under = low;
        if constexpr (PLANES == 1) {
          by = _mm256_mul_ps(dw, _mm256_set1_ps(scale[t]));
          under = _mm256_mul_ps(low, _mm256_set1_ps(scale[t]));
        }
        if constexpr (BITS == 8)  // these were summed less 128
          sums[t] = _mm256_add_epi32(sums[t], _mm256_slli_epi32(_mm256_cvtps_epi32(weight), 7));
        acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[t]), by, acc[t]);
        acc[t] = _mm256_fmadd_ps(under, weight, acc[t]);
      }
    }
  }
  for (int t = 0; t < T; t++) {
    float* o = out + t * stride;
    const __m256 by = _mm256_set1_ps(PLANES == 2 ? scale[t] : 1.0f);
    __m256 made = bias ? _mm256_loadu_ps(bias) : _mm256_setzero_ps();
    made = _mm256_fmadd_ps(acc[t], by, made);
    if (add) made = _mm256_add_ps(_mm256_loadu_ps(o), made);
    _mm256_storeu_ps(o, made);
  }
}

template <int BITS, int SUBS, bool MINIMA, int PLANES>
static void rows16(const Matrix& m, const Codes& x, int64_t tokens, float* out, int64_t stride,
                   bool add, int from, int to) {
  const int64_t blocks = m.inputs / kBlock;
  const size_t bytes = block_bytes(m);
  for (int g = from; g < to; g++) {
    const uint8_t* p = m.data + (size_t)g * blocks * bytes;
    for (int half = 0; half < 2; half++) {
      const int row = g * kRows + half * 8;
      if (row >= m.outputs) break;
      const float* bias = m.bias ? m.bias + row : nullptr;
      float* o = out + row;
      int64_t t = 0;
      const auto some = [&](auto count) {
        constexpr int T = decltype(count)::value;
        tile<BITS, SUBS, MINIMA, PLANES, T>(m, p, half, x, t, o + t * stride, stride, add, bias);
        t += T;
      };
      while (tokens - t >= 4) some(Count<4>());
      if (tokens - t == 3) some(Count<3>());
      if (tokens - t == 2) some(Count<2>());
      if (tokens - t == 1) some(Count<1>());
    }
  }
}

#include "dispatch.inl"

}  // namespace avx2

const Kernels& avx2_kernels() {
  using namespace avx2;
  static const Kernels all = {linear, quantise, norm,  rotate, gate,
                              halves, eights, attend,   merge, dequantise_row, largest, pick};
  return all;
}

}  // namespace native

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
