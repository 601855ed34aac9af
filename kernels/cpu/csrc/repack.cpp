// From ggml's blocks to the interleaved layout of native.h, a group of sixteen rows at a time.
#include <cmath>
#include <cstring>

#include "half.h"
#include "native.h"
#include "pool.h"

namespace native {

// One block of 32 weights taken apart.
struct Block {
  uint8_t code[32];
  float scale[2];  // of each half
  float low;       // the minimum
};

static float half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

enum Type { kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14 };

static void nibbles(const uint8_t* p, uint8_t* code) {
  for (int i = 0; i < 16; i++) code[i] = p[i] & 15, code[i + 16] = p[i] >> 4;
}

static void fifth(const uint8_t* p, uint8_t* code) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  for (int i = 0; i < 32; i++) code[i] |= (bits >> i & 1) << 4;
}

static void k_scales(const uint8_t* s, int j, int* scale, int* low) {
  if (j < 4) {
    *scale = s[j] & 63, *low = s[j + 4] & 63;
  } else {
    *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    *low = s[j + 4] >> 4 | (s[j] >> 6) << 4;
  }
}

// Block `b` of a row; super-blocks of 256 hold eight.
static bool take(int type, const uint8_t* row, int64_t b, Block* out) {
  out->low = 0;
  switch (type) {
    case kQ4_0: {
      const uint8_t* p = row + b * 18;
      out->scale[0] = out->scale[1] = half(p);
      nibbles(p + 2, out->code);
      return true;
    }
    case kQ4_1: {
      const uint8_t* p = row + b * 20;
      out->scale[0] = out->scale[1] = half(p), out->low = half(p + 2);
      nibbles(p + 4, out->code);
      return true;
    }
    case kQ5_0: {
      const uint8_t* p = row + b * 22;
      out->scale[0] = out->scale[1] = half(p);
      nibbles(p + 6, out->code), fifth(p + 2, out->code);
      return true;
    }
    case kQ5_1: {
      const uint8_t* p = row + b * 24;
      out->scale[0] = out->scale[1] = half(p), out->low = half(p + 2);
      nibbles(p + 8, out->code), fifth(p + 4, out->code);
      return true;
    }
    case kQ8_0: {
      const uint8_t* p = row + b * 34;
      out->scale[0] = out->scale[1] = half(p);
      for (int i = 0; i < 32; i++) out->code[i] = p[2 + i] ^ 0x80;
      return true;
    }
    case kQ4_K:
    case kQ5_K: {
      const int j = (int)(b & 7);
      const uint8_t* p = row + (b >> 3) * (type == kQ4_K ? 144 : 176);
      int scale, low;
      k_scales(p + 4, j, &scale, &low);
      out->scale[0] = out->scale[1] = half(p) * (float)scale;
      out->low = -half(p + 2) * (float)low;
      const uint8_t* q = p + (type == kQ4_K ? 16 : 48) + (j >> 1) * 32;
      for (int i = 0; i < 32; i++) {
        out->code[i] = j & 1 ? q[i] >> 4 : q[i] & 15;
        if (type == kQ5_K) out->code[i] |= (p[16 + i] >> j & 1) << 4;
      }
      return true;
    }
    case kQ6_K: {
      const int j = (int)(b & 7), part = j >> 2, quarter = j & 3;
      const uint8_t* p = row + (b >> 3) * 210;
      const uint8_t *ql = p + part * 64 + (quarter & 1) * 32, *qh = p + 128 + part * 32;
      const int8_t* scales = (const int8_t*)(p + 192) + part * 8 + quarter * 2;
      const float d = half(p + 208);
      out->scale[0] = d * (float)scales[0], out->scale[1] = d * (float)scales[1];
      for (int i = 0; i < 32; i++) {
        const int low = quarter & 2 ? ql[i] >> 4 : ql[i] & 15;
        out->code[i] = (uint8_t)(low | (qh[i] >> (2 * quarter) & 3) << 4);
      }
      return true;
    }
  }
  return false;
}

static void put(const Matrix& m, int lane, const Block& block, uint8_t* p) {
  uint16_t* scales = (uint16_t*)p;
  for (int sub = 0; sub < m.subblocks; sub++) scales[kRows * sub + lane] = float_to_half(block.scale[sub]);
  if (m.minima) scales[kRows * m.subblocks + lane] = float_to_half(block.low);
  uint8_t* planes = p + 32 * m.subblocks + (m.minima ? 32 : 0);
  for (int step = 0; step < 8; step++)
    for (int j = 0; j < 4; j++) {
      const int at = lane * 4 + j, code = block.code[step * 4 + j];
      if (m.bits == 8) {
        planes[step * 64 + at] = (uint8_t)code;
        continue;
      }
      planes[(step & 3) * 64 + at] |= (uint8_t)((code & 15) << (step < 4 ? 0 : 4));
      if (m.bits == 5) planes[256 + at] |= (uint8_t)((code >> 4) << step);
      if (m.bits == 6)
        planes[256 + (step >> 2) * 64 + at] |= (uint8_t)((code >> 4) << (2 * (step & 3)));
    }
}

}  // namespace native

extern "C" {

// source: [outputs, row_bytes] blocks of a ggml type; rows: source row of each output row, or null.
// m.data must be zeroed. 0 = done, 1 = unknown type.
__attribute__((visibility("default"))) int spec_native_repack(
    const native::Matrix* m, int type, const uint8_t* source, int64_t row_bytes,
    const int32_t* rows, void* pool) {
  using namespace native;
  Block probe;
  if (!m->outputs || !m->inputs) return 1;
  if (!take(type, source, 0, &probe)) return 1;
  const int64_t blocks = m->inputs / kBlock;
  const size_t bytes = block_bytes(*m);
  Pool& threads = *(Pool*)pool;
  std::atomic<int> next{0};
  threads.run([&](int) {
    Block block;
    for (int g; (g = next.fetch_add(1)) < groups(*m);)
      for (int lane = 0; lane < kRows && g * kRows + lane < m->outputs; lane++) {
        const int row = g * kRows + lane;
        const uint8_t* from = source + (int64_t)(rows ? rows[row] : row) * row_bytes;
        uint8_t* to = const_cast<uint8_t*>(m->data) + (size_t)g * blocks * bytes;
        for (int64_t b = 0; b < blocks; b++, to += bytes) {
          take(type, from, b, &block);
          put(*m, lane, block, to);
        }
      }
  });
  return 0;
}
}
