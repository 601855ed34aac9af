// What this processor can do at most, for `bench kernels`: bytes read in a row by all threads, and
// products of small integers or floats summed in registers. Nothing here is part of a model.
#include <cstdint>
#include <cstring>

#include "native.h"
#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include "neon.h"
#endif

extern "C" const char* spec_native_isa(const char* wanted);

namespace native {

typedef uint64_t u64x2 __attribute__((vector_size(16)));

// Sums, so that every byte has to come; eight independent ones, so that adding takes no time.
static uint64_t read_all(const uint8_t* data, int64_t bytes) {
  u64x2 sums[8] = {};
  for (int64_t at = 0; at + 128 <= bytes; at += 128)
    for (int i = 0; i < 8; i++) {
      u64x2 v;
      std::memcpy(&v, data + at + i * 16, 16);
      sums[i] += v;
    }
  u64x2 all = {};
  for (int i = 0; i < 8; i++) all += sums[i];
  return all[0] + all[1];
}

// Products per round of each kind; `bits` of the weights, 32 = floats.
static int64_t generic_macs(int bits, int64_t rounds) {
  constexpr int kSize = 1024;
  if (bits == 32) {
    float a[kSize], sums[16] = {};
    for (int i = 0; i < kSize; i++) a[i] = (float)i;
    for (int64_t r = 0; r < rounds; r++) {
      asm volatile("" : : "r"(a) : "memory");
      for (int i = 0; i < kSize; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += a[i + j] * 0.5f;
    }
    asm volatile("" : : "r"(sums) : "memory");
  } else {
    int16_t a[kSize], b[kSize];
    int32_t sum = 0;
    for (int i = 0; i < kSize; i++) a[i] = (int16_t)(i & 15), b[i] = (int16_t)(i & 127);
    for (int64_t r = 0; r < rounds; r++) {
      asm volatile("" : : "r"(a), "r"(b) : "memory");
      for (int i = 0; i < kSize; i++) sum += (int32_t)a[i] * b[i];
    }
    asm volatile("" : : "r"(sum));
  }
  return rounds * kSize;
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static int64_t avx2_macs(int bits, int64_t rounds) {
  constexpr int T = 6;
  if (bits == 32) {
    __m256 sums[2 * T], a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
    for (auto& sum : sums) sum = _mm256_setzero_ps();
    for (int64_t r = 0; r < rounds; r++) {
      asm volatile("" : "+x"(a));
      for (auto& sum : sums) sum = _mm256_fmadd_ps(a, b, sum);
    }
    for (auto& sum : sums) asm volatile("" : : "x"(sum));
    return rounds * 2 * T * 8;
  }
  const __m256i ones = _mm256_set1_epi16(1), x = _mm256_set1_epi8(3);
  __m256i w = _mm256_set1_epi8(7), sums[T];
  for (auto& sum : sums) sum = _mm256_setzero_si256();
  for (int64_t r = 0; r < rounds; r++) {
    if (bits <= 4) {  // eight products of pairs fit into 16 bits
      __m256i pairs[T];
      for (auto& pair : pairs) pair = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int s = 0; s < 8; s++)
        for (auto& pair : pairs) {
          asm volatile("" : "+x"(w));
          pair = _mm256_add_epi16(pair, _mm256_maddubs_epi16(w, x));
        }
      for (int t = 0; t < T; t++)
        sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(pairs[t], ones));
    } else {
#pragma GCC unroll 8
      for (int s = 0; s < 8; s++)
        for (auto& sum : sums) {
          asm volatile("" : "+x"(w));
          sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), ones));
        }
    }
  }
  for (auto& sum : sums) asm volatile("" : : "x"(sum));
  return rounds * 8 * T * 32;
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) static int64_t avx512_macs(int bits,
                                                                                  int64_t rounds) {
  constexpr int T = 12;
  if (bits == 32) {
    __m512 sums[T], a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
    for (auto& sum : sums) sum = _mm512_setzero_ps();
    for (int64_t r = 0; r < rounds; r++) {
      asm volatile("" : "+v"(a));
      for (auto& sum : sums) sum = _mm512_fmadd_ps(a, b, sum);
    }
    for (auto& sum : sums) asm volatile("" : : "v"(sum));
    return rounds * T * 16;
  }
  __m512i sums[T], w = _mm512_set1_epi8(7), x = _mm512_set1_epi8(3);
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+v"(w));
    for (auto& sum : sums) sum = _mm512_dpbusd_epi32(sum, w, x);
  }
  for (auto& sum : sums) asm volatile("" : : "v"(sum));
  return rounds * T * 64;
}
#elif defined(__aarch64__)
constexpr int kSums = 16;  // chains that run side by side

static int64_t neon_macs(int bits, int64_t rounds) {
  if (bits == 32) {
    float32x4_t sums[kSums], a = vdupq_n_f32(0.5f), b = vdupq_n_f32(0.25f);
    for (auto& sum : sums) sum = vdupq_n_f32(0.0f);
    for (int64_t r = 0; r < rounds; r++) {
      asm volatile("" : "+w"(a));
      for (auto& sum : sums) sum = vfmaq_f32(sum, a, b);
    }
    for (auto& sum : sums) asm volatile("" : : "w"(sum));
    return rounds * kSums * 4;
  }
  const int fits = bits <= 5 ? 8 : bits == 6 ? 4 : 2;  // products of eight bits in sixteen
  int8x8_t w = vdup_n_s8(7);
  const int8x8_t x = vdup_n_s8(3);
  int32x4_t sums[kSums / 2];
  for (auto& sum : sums) sum = vdupq_n_s32(0);
  for (int64_t r = 0; r < rounds; r++)
    for (int s = 0; s < 8; s += fits) {
      int16x8_t pairs[kSums / 2];
      for (auto& pair : pairs) pair = vdupq_n_s16(0);
      for (int i = 0; i < fits; i++)
        for (auto& pair : pairs) {
          asm volatile("" : "+w"(w));
          pair = vmlal_s8(pair, w, x);
        }
      for (int t = 0; t < kSums / 2; t++) sums[t] = vpadalq_s16(sums[t], pairs[t]);
    }
  for (auto& sum : sums) asm volatile("" : : "w"(sum));
  return rounds * 8 * (kSums / 2) * 8;
}

#if defined(SPEC_DOT)
SPEC_DOT static int64_t dotprod_macs(int64_t rounds) {
  int32x4_t sums[kSums];
  int8x16_t w = vdupq_n_s8(7), x = vdupq_n_s8(3);
  for (auto& sum : sums) sum = vdupq_n_s32(0);
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+w"(w));
    for (auto& sum : sums) sum = vdotq_s32(sum, w, x);
  }
  for (auto& sum : sums) asm volatile("" : : "w"(sum));
  return rounds * kSums * 16;
}
#endif

#if defined(SPEC_MATRIX)
SPEC_MATRIX static int64_t i8mm_macs(int64_t rounds) {
  int32x4_t sums[kSums];
  int8x16_t w = vdupq_n_s8(7), x = vdupq_n_s8(3);
  for (auto& sum : sums) sum = vdupq_n_s32(0);
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : "+w"(w));
    for (auto& sum : sums) sum = vmmlaq_s32(sum, w, x);
  }
  for (auto& sum : sums) asm volatile("" : : "w"(sum));
  return rounds * kSums * 32;
}
#endif
#endif

static int64_t some_macs(const char* isa, int bits, int64_t rounds) {
#if defined(__x86_64__)
  if (!std::strcmp(isa, "avx512")) return avx512_macs(bits, rounds);
  if (!std::strcmp(isa, "avx2")) return avx2_macs(bits, rounds);
#elif defined(__aarch64__)
#if defined(SPEC_MATRIX)
  if (bits < 32 && !std::strcmp(isa, "i8mm")) return i8mm_macs(rounds);
#endif
#if defined(SPEC_DOT)
  if (bits < 32 && !std::strcmp(isa, "dotprod")) return dotprod_macs(rounds);
#endif
  if (std::strcmp(isa, "generic")) return neon_macs(bits, rounds);
#endif
  return generic_macs(bits, rounds);
}

}  // namespace native

extern "C" {

#define EXPORT __attribute__((visibility("default")))

// Reads `bytes` once, each thread a part in a row; returns a sum that means nothing.
EXPORT uint64_t spec_native_stream(const uint8_t* data, int64_t bytes, void* pool) {
  native::Pool& threads = *(native::Pool*)pool;
  std::atomic<uint64_t> all{0};
  const int64_t part = bytes / threads.size() / 128 * 128;
  threads.run([&](int thread) { all += native::read_all(data + thread * part, part); });
  return all.load();
}

// Multiplies and adds in registers on all threads, `rounds` each; returns how many products that
// were, 0 for an instruction set that is not to be had. bits: of the weights, 32 = floats.
EXPORT int64_t spec_native_macs(const char* isa, int bits, int64_t rounds, void* pool) {
  const char* found = spec_native_isa(isa);
  if (!*found) return 0;
  native::Pool& threads = *(native::Pool*)pool;
  std::atomic<int64_t> all{0};
  threads.run([&](int) { all += native::some_macs(found, bits, rounds); });
  return all.load();
}
}
