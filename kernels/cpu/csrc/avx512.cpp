// AVX-512 with VNNI: four products a lane and instruction, sixteen rows a register.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#include <immintrin.h>

#include <cmath>

#include "half.h"
#include "native.h"

namespace native {
namespace avx512 {

#include "x86.inl"

#include "parts.inl"

#include "pick.inl"

// The codes of one step: four inputs of sixteen rows.
template <int BITS>
static inline __m512i codes(const uint8_t* planes, int step) {
  if constexpr (BITS == 8) {
    return _mm512_loadu_si512(planes + step * 64);
  } else {
    __m512i v = _mm512_loadu_si512(planes + (step & 3) * 64);
    if (step >= 4) v = _mm512_srli_epi16(v, 4);
    v = _mm512_and_si512(v, _mm512_set1_epi8(15));
    if constexpr (BITS == 5) {
      __m512i high = _mm512_loadu_si512(planes + 256);
      high = step < 4 ? _mm512_slli_epi16(high, 4 - step) : _mm512_srli_epi16(high, step - 4);
      v = _mm512_or_si512(v, _mm512_and_si512(high, _mm512_set1_epi8(16)));
    }
    if constexpr (BITS == 6) {
      __m512i high = _mm512_loadu_si512(planes + 256 + (step >> 2) * 64);
      const int by = 2 * (step & 3);
      high = by < 4 ? _mm512_slli_epi16(high, 4 - by) : _mm512_srli_epi16(high, by - 4);
      v = _mm512_or_si512(v, _mm512_and_si512(high, _mm512_set1_epi8(48)));
    }
    return v;
  }
}

static inline __m512 wider(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}

// A group of sixteen rows times T tokens.
template <int BITS, int SUBS, bool MINIMA, int PLANES, int T>
static inline void tile(const Matrix& m, const uint8_t* p, const Codes& x, int64_t token,
                        float* out, int64_t stride, bool add, const float* bias) {
  const int64_t blocks = m.inputs / kBlock;
  constexpr size_t kCodes = BITS == 8 ? 512 : BITS == 6 ? 384 : BITS == 5 ? 320 : 256;
  constexpr size_t kBytes = kCodes + 32 * SUBS + (MINIMA ? 32 : 0);
  constexpr int kSteps = 8 / SUBS;
  const __m512 zero = _mm512_set1_ps((float)-m.zero);
  __m512 acc[T];
  for (int t = 0; t < T; t++) acc[t] = _mm512_setzero_ps();
  const int8_t* q = x.q + token * x.inputs;
  const float* scale = x.scale + token * x.blocks;
  const float* weights = SUBS == 2 ? x.half + token * x.blocks * 2 : x.whole + token * x.blocks;
  const int64_t wide = x.blocks * SUBS;
  for (int64_t b = 0; b < blocks; b++, p += kBytes, q += kBlock, weights += SUBS) {
    const uint8_t* planes = p + 32 * SUBS + (MINIMA ? 32 : 0);
    const uint16_t* scales = (const uint16_t*)p;
    if constexpr (T == 1)
      for (size_t i = 0; i < kBytes; i += 64)
        _mm_prefetch((const char*)(p + 4096 + i), _MM_HINT_T0);
#pragma GCC unroll 2
    for (int sub = 0; sub < SUBS; sub++) {
      const __m512 dw = wider(scales + kRows * sub);
      const __m512 low = MINIMA ? wider(scales + kRows * SUBS) : _mm512_mul_ps(dw, zero);
      __m512i sums[T], lows[T];
      for (int t = 0; t < T; t++) sums[t] = lows[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; s++) {
        const int step = sub * kSteps + s;
        const __m512i w = codes<BITS>(planes, step);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
          const int8_t* at = q + t * x.inputs + step * 4;
          int32_t four;
          __builtin_memcpy(&four, at, 4);
          sums[t] = _mm512_dpbusd_epi32(sums[t], w, _mm512_set1_epi32(four));
          if constexpr (PLANES == 2) {
            __builtin_memcpy(&four, at + x.plane, 4);
            lows[t] = _mm512_dpbusd_epi32(lows[t], w, _mm512_set1_epi32(four));
          }
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        __m512 by = dw, under = low;
        if constexpr (PLANES == 2) {
          const __m512i high = _mm512_mullo_epi32(sums[t], _mm512_set1_epi32(kPlane));
          sums[t] = _mm512_add_epi32(high, lows[t]);
        } else {
          by = _mm512_mul_ps(dw, _mm512_set1_ps(scale[t * x.blocks + b]));
          under = _mm512_mul_ps(low, _mm512_set1_ps(scale[t * x.blocks + b]));
        }
        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), by, acc[t]);
        acc[t] = _mm512_fmadd_ps(under, _mm512_set1_ps(weights[t * wide + sub]), acc[t]);
      }
    }
  }
  for (int t = 0; t < T; t++) {
    float* o = out + t * stride;
    const __m512 by = _mm512_set1_ps(PLANES == 2 ? scale[t * x.blocks] : 1.0f);
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
      tile<BITS, SUBS, MINIMA, PLANES, T>(m, p, x, t, o + t * stride, stride, add, bias);
      t += T;
    };
    while (tokens - t >= 8) some(Count<8>());
    if (tokens - t >= 4) some(Count<4>());
    if (tokens - t == 3) some(Count<3>());
    if (tokens - t == 2) some(Count<2>());
    if (tokens - t == 1) some(Count<1>());
  }
}

#include "dispatch.inl"

}  // namespace avx512

const Kernels& avx512_kernels() {
  using namespace avx512;
  static const Kernels all = {linear, quantise, norm,  rotate, gate,
                              halves, attend,   merge, dequantise_row, pick};
  return all;
}

}  // namespace native
#endif
