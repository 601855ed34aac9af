// Any processor: plain loops, in the order of sums that the other instruction sets keep.
#include <cmath>

#include "half.h"
#include "native.h"

namespace native {
namespace generic {

constexpr int kMaxGroup = 16;
typedef float f8 __attribute__((vector_size(32)));

static inline f8 from_half8(const uint16_t* p) {
  f8 v;
  for (int i = 0; i < 8; i++) v[i] = half_to_float(p[i]);
  return v;
}

static inline f8 fma8(f8 a, f8 b, f8 c) { return a * b + c; }

static inline void to_half8(f8 v, uint16_t* out) {
  for (int i = 0; i < 8; i++) out[i] = float_to_half(v[i]);
}

#include "parts.inl"

#include "pick.inl"

static inline int code_of(const Codes& x, const int8_t* q, int at) {
  return x.planes == 2 ? kPlane * q[at] + q[kBlock + at] : q[at];
}

static void linear(const Matrix& m, const Codes& x, int64_t tokens, float* out, int64_t stride,
                   bool add, int from, int to) {
  const int64_t blocks = m.inputs / kBlock;
  const size_t bytes = block_bytes(m);
  for (int g = from; g < to; g++) {
    const int rows = m.outputs - g * kRows < kRows ? m.outputs - g * kRows : kRows;
    for (int64_t t = 0; t < tokens; t++) {
      float acc[kRows] = {};
      const uint8_t* p = m.data + (size_t)g * blocks * bytes;
      for (int64_t b = 0; b < blocks; b++, p += bytes) {
        const uint16_t* scales = (const uint16_t*)p;
        const uint16_t* minima = scales + kRows * m.subblocks;
        const uint8_t* planes = p + 32 * m.subblocks + (m.minima ? 32 : 0);
        const int64_t at = b * x.tokens + t;
        const int8_t* q = x.q + at * kBlock * x.planes;
        for (int r = 0; r < kRows; r++) {
          int32_t sums[2] = {};
          for (int step = 0; step < 8; step++)
            for (int j = 0; j < 4; j++)
              sums[m.subblocks == 2 ? step / 4 : 0] +=
                  code_at(m, planes, step, r * 4 + j) * code_of(x, q, step * 4 + j);
          for (int s = 0; s < m.subblocks; s++) {
            const float scale = half_to_float(scales[kRows * s + r]);
            const float low =
                m.minima ? half_to_float(minima[r]) : scale * (float)-m.zero;
            const float dx = x.planes == 2 ? 1.0f : x.scale[at];
            const float weight = m.subblocks == 2 ? x.half[2 * at + s] : x.whole[at];
            acc[r] = fmaf((float)sums[s], scale * dx, acc[r]);
            acc[r] = fmaf(low * dx, weight, acc[r]);
          }
        }
      }
      const float scale = x.planes == 2 ? x.scale[t] : 1.0f;
      float* o = out + t * stride + g * kRows;
      for (int r = 0; r < rows; r++) {
        const float made = fmaf(acc[r], scale, m.bias ? m.bias[g * kRows + r] : 0.0f);
        o[r] = add ? o[r] + made : made;
      }
    }
  }
}

}  // namespace generic

const Kernels& generic_kernels() {
  using namespace generic;
  static const Kernels all = {linear, quantise, norm,  rotate, gate,
                              halves, eights, attend,   merge, dequantise_row, largest, pick};
  return all;
}

}  // namespace native
