// Half precision in plain integers, to nearest and ties to even, as the processors do it.
#pragma once
#include <cstdint>
#include <cstring>

namespace native {

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  uint32_t bits;
  float value;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
  } else if (rest >= 0x400) {
    bits = sign | ((rest << 13) + 0x38000000);
  } else {
    value = (float)rest * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest >= 0x47800000) return (uint16_t)(sign | 0x7c00 | (rest > 0x7f800000 ? 0x200 : 0));
  if (rest >= 0x38800000)
    return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
  float small;
  std::memcpy(&small, &rest, 4);
  small += 0.5f;  // the last bit of the sum is 2^-24, a half's smallest step
  std::memcpy(&bits, &small, 4);
  return (uint16_t)(sign | (bits - 0x3f000000));
}

}  // namespace native
