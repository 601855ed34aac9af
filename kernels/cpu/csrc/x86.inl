// What parts.inl asks of a processor, for those with AVX2: halves and joined products.

constexpr int kMaxGroup = 16;
typedef float f8 __attribute__((vector_size(32)));

static inline f8 from_half8(const uint16_t* p) {
  return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}

static inline f8 fma8(f8 a, f8 b, f8 c) {
  return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

static inline void to_half8(f8 v, uint16_t* out) {
  _mm_storeu_si128((__m128i*)out, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
