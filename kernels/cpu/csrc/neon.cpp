// AArch64: four rows a register. Integer products by plain NEON (sixteen-bit sums), by sdot, or by
// smmla, which takes both planes of an activation at once; all sums of products are exact.
#if defined(__aarch64__)
#include <cmath>
#include <cstring>

#include "half.h"
#include "native.h"
#include "neon.h"

namespace native {
namespace neon {

constexpr int kMaxGroup = 16;
typedef float f8 __attribute__((vector_size(32)));

#define SPEC_PAIRS
struct w8 {
  float32x4_t low, high;
};

static inline w8 load_wide(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }

static inline void store_wide(float* p, w8 v) { vst1q_f32(p, v.low), vst1q_f32(p + 4, v.high); }

static inline w8 all_wide(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }

static inline w8 fma8(w8 a, w8 b, w8 c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}

static inline f8 joined(float32x4_t low, float32x4_t high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}

static inline float32x4_t low_of(f8 v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }

static inline float32x4_t high_of(f8 v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }

static inline float32x4_t wider(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

static inline f8 from_half8(const uint16_t* p) { return joined(wider(p), wider(p + 4)); }

static inline f8 fma8(f8 a, f8 b, f8 c) {
  return joined(vfmaq_f32(low_of(c), low_of(a), low_of(b)),
                vfmaq_f32(high_of(c), high_of(a), high_of(b)));
}

static inline void to_half8(f8 v, uint16_t* out) {
  vst1_u16(out, vreinterpret_u16_f16(vcvt_f16_f32(low_of(v))));
  vst1_u16(out + 4, vreinterpret_u16_f16(vcvt_f16_f32(high_of(v))));
}

#include "parts.inl"

#include "pick.inl"

// Sums of sixteen-bit products of four rows, four inputs each: as many steps as fit.
template <int BITS, int STEPS>
static inline int32x4_t products(const int8x16_t* w, const int8_t* q) {
  // 8 steps of 15 or 31 times 127, 4 of 63, 2 of -128.
  constexpr int kFits = BITS == 8 ? 2 : BITS == 6 ? 4 : 8;
  int32x4_t low = vdupq_n_s32(0), high = low;
#pragma GCC unroll 4
  for (int begin = 0; begin < STEPS; begin += kFits) {
    int16x8_t first = vdupq_n_s16(0), second = first;
#pragma GCC unroll 8
    for (int s = begin; s < begin + kFits && s < STEPS; s++) {
      int32_t four;
      __builtin_memcpy(&four, q + s * 4, 4);
      const int8x8_t x = vreinterpret_s8_s32(vdup_n_s32(four));
      first = vmlal_s8(first, vget_low_s8(w[s]), x);
      second = vmlal_s8(second, vget_high_s8(w[s]), x);
    }
    low = vpadalq_s16(low, first);
    high = vpadalq_s16(high, second);
  }
  return vpaddq_s32(low, high);
}

template <int BITS, int SUBS, int PLANES>
static inline void meet(const int8x16_t* w, const int8_t* q, int32x4_t* sums) {
  constexpr int kSteps = 8 / SUBS;
#pragma GCC unroll 2
  for (int sub = 0; sub < SUBS; sub++) {
    sums[sub] = products<BITS, kSteps>(w + sub * kSteps, q + sub * kSteps * 4);
    if (PLANES == 2)
      sums[sub] = vaddq_s32(
          vshlq_n_s32(sums[sub], kPlaneBits),
          products<BITS, kSteps>(w + sub * kSteps, q + kBlock + sub * kSteps * 4));
  }
}

template <int PLANES>
static inline void arrange(int8x16_t*) {}

#include "neon.inl"

static const Kernels kernels = {linear, quantise, norm,  rotate, gate,
                                halves, eights, attend,   merge, dequantise_row, largest, pick};

}  // namespace neon

#if defined(SPEC_DOT)
#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#elif __clang_major__ >= 16
#pragma clang attribute push(SPEC_DOT, apply_to = function)
#endif

namespace dotprod {

using neon::wider;

template <int STEPS>
static inline int32x4_t products(const int8x16_t* w, const int8_t* q) {
  int32x4_t sum = vdupq_n_s32(0);
#pragma GCC unroll 2
  for (int s = 0; s < STEPS; s += 4) {
    const int8x16_t x = vld1q_s8(q + s * 4);
    sum = vdotq_laneq_s32(sum, w[s], x, 0);
    sum = vdotq_laneq_s32(sum, w[s + 1], x, 1);
    sum = vdotq_laneq_s32(sum, w[s + 2], x, 2);
    sum = vdotq_laneq_s32(sum, w[s + 3], x, 3);
  }
  return sum;
}

template <int BITS, int SUBS, int PLANES>
static inline void meet(const int8x16_t* w, const int8_t* q, int32x4_t* sums) {
  constexpr int kSteps = 8 / SUBS;
#pragma GCC unroll 2
  for (int sub = 0; sub < SUBS; sub++) {
    sums[sub] = products<kSteps>(w + sub * kSteps, q + sub * kSteps * 4);
    if (PLANES == 2)
      sums[sub] = vaddq_s32(vshlq_n_s32(sums[sub], kPlaneBits),
                            products<kSteps>(w + sub * kSteps, q + kBlock + sub * kSteps * 4));
  }
}

template <int PLANES>
static inline void arrange(int8x16_t*) {}

#include "neon.inl"

}  // namespace dotprod

#if !defined(__clang__)
#pragma GCC pop_options
#elif __clang_major__ >= 16
#pragma clang attribute pop
#endif
#endif

#if defined(SPEC_MATRIX)
#if !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#elif __clang_major__ >= 16
#pragma clang attribute push(SPEC_MATRIX, apply_to = function)
#endif

namespace i8mm {

using neon::wider;

// Two planes: eight inputs of two rows against eight of both planes. One plane: as dotprod does.
template <int BITS, int SUBS, int PLANES>
static inline void meet(const int8x16_t* w, const int8_t* q, int32x4_t* sums) {
  if constexpr (PLANES == 1) {
    dotprod::meet<BITS, SUBS, 1>(w, q, sums);
    return;
  }
  constexpr int kSteps = 8 / SUBS;
#pragma GCC unroll 2
  for (int sub = 0; sub < SUBS; sub++) {
    int32x4_t first = vdupq_n_s32(0), second = first;  // [row][plane] of two rows each
#pragma GCC unroll 2
    for (int s = sub * kSteps; s < (sub + 1) * kSteps; s += 4) {
      const int64x2_t high = vreinterpretq_s64_s8(vld1q_s8(q + s * 4));
      const int64x2_t low = vreinterpretq_s64_s8(vld1q_s8(q + kBlock + s * 4));
      const int8x16_t a = vreinterpretq_s8_s64(vzip1q_s64(high, low));
      const int8x16_t b = vreinterpretq_s8_s64(vzip2q_s64(high, low));
      first = vmmlaq_s32(first, w[s], a);
      second = vmmlaq_s32(second, w[s + 1], a);
      first = vmmlaq_s32(first, w[s + 2], b);
      second = vmmlaq_s32(second, w[s + 3], b);
    }
    sums[sub] = vaddq_s32(vshlq_n_s32(vuzp1q_s32(first, second), kPlaneBits),
                          vuzp2q_s32(first, second));
  }
}

// Steps s and s + 1, four inputs of four rows each -> eight inputs of two rows, twice.
template <int PLANES>
static inline void arrange(int8x16_t* w) {
  if (PLANES == 1) return;
#pragma GCC unroll 4
  for (int s = 0; s < 8; s += 2) {
    const int32x4_t a = vreinterpretq_s32_s8(w[s]), b = vreinterpretq_s32_s8(w[s + 1]);
    w[s] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
    w[s + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
  }
}

#include "neon.inl"

}  // namespace i8mm

#if !defined(__clang__)
#pragma GCC pop_options
#elif __clang_major__ >= 16
#pragma clang attribute pop
#endif
#endif

const Kernels& neon_kernels() { return neon::kernels; }

const Kernels* dotprod_kernels() {
#ifdef SPEC_DOT
  static const Kernels all = [] {
    Kernels made = neon::kernels;
    made.linear = dotprod::linear;
    return made;
  }();
  return &all;
#else
  return nullptr;
#endif
}

const Kernels* i8mm_kernels() {
#ifdef SPEC_MATRIX
  static const Kernels all = [] {
    Kernels made = neon::kernels;
    made.linear = i8mm::linear;
    return made;
  }();
  return &all;
#else
  return nullptr;
#endif
}

}  // namespace native
#endif
