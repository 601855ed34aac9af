// AVX-512 with VNNI: four products a lane and instruction, sixteen rows a register.
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#include <immintrin.h>

#include <cmath>

#include "half.h"
#include "native.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#endif

namespace native {
namespace avx512 {

#include "x86.inl"

#include "parts.inl"

#include "pick.inl"

// The codes of a block: eight steps, four inputs of sixteen rows each.
template <int BITS>
static inline void unpack(const uint8_t* planes, __m512i* w) {
  if constexpr (BITS == 8) {
    for (int s = 0; s < 8; s++) w[s] = _mm512_loadu_si512(planes + s * 64);
    return;
  }
  const __m512i nibble = _mm512_set1_epi8(15);
  constexpr int kMerge = 0xEA;  // (a & b) | c
  for (int s = 0; s < 4; s++) {
    const __m512i v = _mm512_loadu_si512(planes + s * 64);
    w[s] = v, w[s + 4] = _mm512_srli_epi16(v, 4);
  }
  if constexpr (BITS == 4)
    for (int s = 0; s < 8; s++) w[s] = _mm512_and_si512(w[s], nibble);
  if constexpr (BITS == 5) {
    const __m512i above = _mm512_loadu_si512(planes + 256), bit = _mm512_set1_epi8(16);
    for (int s = 0; s < 8; s++) {
      __m512i high = s < 4 ? _mm512_slli_epi16(above, 4 - s) : _mm512_srli_epi16(above, s - 4);
      w[s] = _mm512_ternarylogic_epi32(w[s], nibble, _mm512_and_si512(high, bit), kMerge);
    }
  }
  if constexpr (BITS == 6) {
    const __m512i bits = _mm512_set1_epi8(48);
    for (int s = 0; s < 8; s++) {
      __m512i high = _mm512_loadu_si512(planes + 256 + (s >> 2) * 64);
      const int by = 2 * (s & 3);
      high = by < 4 ? _mm512_slli_epi16(high, 4 - by) : _mm512_srli_epi16(high, by - 4);
      w[s] = _mm512_ternarylogic_epi32(w[s], nibble, _mm512_and_si512(high, bits), kMerge);
    }
  }
}

static inline __m512i four(const int8_t* q) {
  int32_t codes;
  __builtin_memcpy(&codes, q, 4);
  return _mm512_set1_epi32(codes);
}

static inline __m512 wider(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}

// A group of sixteen rows times T tokens. ahead: these weights are met for the first time.
template <int BITS, int SUBS, bool MINIMA, int PLANES, int T>
static inline void tile(const Matrix& m, const uint8_t* p, const Codes& x, int64_t token,
                        float* out, int64_t stride, bool add, const float* bias, bool ahead) {
  const int64_t blocks = m.inputs / kBlock;
  constexpr size_t kCodes = BITS == 8 ? 512 : BITS == 6 ? 384 : BITS == 5 ? 320 : 256;
  constexpr size_t kBytes = kCodes + 32 * SUBS + (MINIMA ? 32 : 0);
  constexpr int kSteps = 8 / SUBS, kWide = kBlock * PLANES;
  const __m512 zero = _mm512_set1_ps((float)-m.zero);
  __m512 acc[T];
  for (int t = 0; t < T; t++) acc[t] = _mm512_setzero_ps();
  const int8_t* q = x.q + token * kWide;
  const float* scale = x.scale + token;
  const float* weights = (SUBS == 2 ? x.half : x.whole) + token * SUBS;
  for (int64_t b = 0; b < blocks; b++, p += kBytes, q += x.tokens * kWide,
               weights += x.tokens * SUBS, scale += PLANES == 1 ? x.tokens : 0) {
    if (ahead)
      for (size_t i = 0; i < kBytes; i += 64)
        _mm_prefetch((const char*)(p + 4096 + i), _MM_HINT_T0);
    const uint16_t* scales = (const uint16_t*)p;
    __m512i w[8];
    unpack<BITS>(p + 32 * SUBS + (MINIMA ? 32 : 0), w);
    __m512 by[SUBS], under[SUBS];
    for (int sub = 0; sub < SUBS; sub++) {
      by[sub] = wider(scales + kRows * sub);
      under[sub] = MINIMA ? wider(scales + kRows * SUBS) : _mm512_mul_ps(by[sub], zero);
    }
    // Some tokens at a time, so that their chains of sums overlap and all stays in registers.
    constexpr int kSome = T <= 4 ? T : (T + 1) / 2;
#pragma GCC unroll 2
    for (int begin = 0; begin < T; begin += kSome) {
#pragma GCC unroll 2
      for (int sub = 0; sub < SUBS; sub++) {
        const int8_t* at = q + begin * kWide + sub * kSteps * 4;
        const int some = begin + kSome <= T ? kSome : T - begin;
        __m512i sums[kSome], lows[kSome];
#pragma GCC unroll 4
        for (int t = 0; t < some; t++) sums[t] = lows[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int s = 0; s < kSteps; s++) {
#pragma GCC unroll 4
          for (int t = 0; t < some; t++) {
            const __m512i codes = w[sub * kSteps + s];
            const int8_t* own = at + t * kWide + s * 4;
            sums[t] = _mm512_dpbusd_epi32(sums[t], codes, four(own));
            if (PLANES == 2) lows[t] = _mm512_dpbusd_epi32(lows[t], codes, four(own + kBlock));
          }
        }
#pragma GCC unroll 4
        for (int t = 0; t < some; t++) {
          __m512 factor = by[sub], low = under[sub];
          if constexpr (PLANES == 2) {
            const __m512i high = _mm512_slli_epi32(sums[t], kPlaneBits);
            sums[t] = _mm512_add_epi32(high, lows[t]);
          } else {
            factor = _mm512_mul_ps(factor, _mm512_set1_ps(scale[begin + t]));
            low = _mm512_mul_ps(low, _mm512_set1_ps(scale[begin + t]));
          }
          const __m512 weight = _mm512_set1_ps(weights[(begin + t) * SUBS + sub]);
          __m512& to = acc[begin + t];
          to = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), factor, to);
          to = _mm512_fmadd_ps(low, weight, to);
        }
      }
    }
  }
  for (int t = 0; t < T; t++) {
    float* o = out + t * stride;
    const __m512 by = _mm512_set1_ps(PLANES == 2 ? scale[t] : 1.0f);
    __m512 made = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
    made = _mm512_fmadd_ps(acc[t], by, made);
    if (add) made = _mm512_add_ps(_mm512_loadu_ps(o), made);
    _mm512_storeu_ps(o, made);
  }
}

template <int BITS, int SUBS, bool MINIMA, int PLANES>
static void rows16(const Matrix& m, const Codes& x, int64_t tokens, float* out, int64_t stride,
                   bool add, int from, int to) {
  const int64_t blocks = m.inputs / kBlock;
  const size_t bytes = block_bytes(m);
  for (int g = from; g < to; g++) {
    const uint8_t* p = m.data + (size_t)g * blocks * bytes;
    const float* bias = m.bias ? m.bias + g * kRows : nullptr;
    float* o = out + g * kRows;
    int64_t t = 0;
    const auto some = [&](auto count) {
      constexpr int T = decltype(count)::value;
      tile<BITS, SUBS, MINIMA, PLANES, T>(m, p, x, t, o + t * stride, stride, add, bias, t == 0);
      t += T;
    };
    while (tokens - t >= 8) some(Count<8>());
    switch (tokens - t) {
      case 7: some(Count<7>()); break;
      case 6: some(Count<6>()); break;
      case 5: some(Count<5>()); break;
      case 4: some(Count<4>()); break;
      case 3: some(Count<3>()); break;
      case 2: some(Count<2>()); break;
      case 1: some(Count<1>()); break;
    }
  }
}

#include "dispatch.inl"

}  // namespace avx512

const Kernels& avx512_kernels() {
  using namespace avx512;
  static const Kernels all = {linear, quantise, norm,  rotate, gate,
                              halves, eights, attend,   merge, dequantise_row, largest, pick};
  return all;
}

}  // namespace native

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
