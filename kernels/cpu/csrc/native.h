// What the parts of the native forward share: weights as they lie in memory, one step's inputs, and
// the table of functions that each instruction set fills. Plain C++17, no torch, no Python.
#pragma once
#include <cstddef>
#include <cstdint>

namespace native {

constexpr int kRows = 16;      // output rows interleaved in a group
constexpr int kBlock = 32;     // inputs that share an activation scale
constexpr int kPlaneBits = 7;
constexpr int kPlane = 1 << kPlaneBits;  // what the high plane of activations counts
constexpr int kSegment = 256;  // positions attended to as one task
constexpr int kMaxDim = 256;   // of a head
constexpr int kChunk = 64;     // positions per update of the running softmax
constexpr int kTogether = 8;   // nodes attended for at once

// A quantised matrix [outputs, inputs]. Groups of 16 rows, then blocks of 32 inputs; of each the
// scales (16 halves per sub-block), the minima (16 halves, if any), and the codes in planes:
// low nibbles (steps s and s + 4 of four inputs share a byte), then for 5 and 6 bits what is above.
// A weight is scale * (code - zero), plus the minimum if there are minima.
struct Matrix {
  const uint8_t* data;
  const float* bias;  // [outputs] or null
  int32_t outputs, inputs;
  int32_t bits;        // 4, 5, 6, 8
  int32_t subblocks;   // scales per block of 32: 1 or 2
  int32_t minima;      // 0 or 1
  int32_t zero;        // code of the weight 0; with minima it is 0
};

inline size_t block_bytes(const Matrix& m) {
  const size_t codes = m.bits == 8 ? 512 : m.bits == 6 ? 384 : m.bits == 5 ? 320 : 256;
  return codes + 32u * m.subblocks + (m.minima ? 32u : 0u);
}

template <int N>
struct Count {  // a number known to the compiler
  static constexpr int value = N;
};

inline int groups(const Matrix& m) { return (m.outputs + kRows - 1) / kRows; }

// Activations of n tokens as whole numbers. Two planes: 15 bits, kPlane * high + low, and one
// scale per token. One plane: 8 bits and a scale per block of 32. Codes lie within -127..127, so
// that a sign can be taken off. `whole` and `half`: the sums of the codes of each block and half
// block; they are what a minimum or the code of zero is multiplied by. All tokens of a block lie
// together: a weight meets them one after the other.
struct Codes {
  int8_t* q;      // [blocks, n, planes, 32]
  float* scale;   // [n], or [blocks, n] for one plane
  float* whole;   // [blocks, n]
  float* half;    // [blocks, n, 2]
  int64_t inputs, tokens;
  int32_t planes;  // 1 or 2
};

// Matrices one below the other, each of its own quantisation; all but the last have a multiple of 16
// outputs.
struct Stack {
  const Matrix* parts;
  int32_t count;
};

struct Layer {
  Stack qkv, out, gate_up, down;
  const float *attention_norm, *mlp_norm;        // [hidden]; already 1 + w where the family says so
  const float *after_attention, *after_mlp;      // [hidden] or null
  const float *q_norm, *k_norm;                  // [head_dim] or null
  int32_t window;                                // 0 = sees everything
  int32_t local;                                 // takes the second rotation
};

struct Model {
  const Layer* layers;
  int32_t count, hidden, intermediate, heads, kv_heads, head_dim, vocab;
  int32_t planes;      // of activation codes, 1 or 2
  int32_t activation;  // 0 silu, 1 gelu, 2 gelu by tanh
  int32_t kv_eight;    // K and V are kept as Heads::eight says
  float eps, attention_scale, attention_softcap, logit_softcap, embed_scale;
  const float* norm;
  Matrix embedding;
  Stack head;
  const float *rope, *local_rope;  // [positions, head_dim]: cosines of the half, then sines
};

// One forward. Everything is on the host; indices are int64 as in cache/batch.py.
struct Step {
  int64_t nodes, rows, logits, words, table_stride, first;
  int64_t threads;  // 1 = the caller alone, else all of the pool
  const int64_t *tokens, *positions, *slots, *row_of, *ancestors, *logits_at;
  const int64_t *node_ptr, *twig_ptr, *twig_slots, *row_ids, *prefix, *chain;
  const int64_t* table;
  uint16_t* const* k;  // per layer [slots, kv_heads, head_dim] halves, or codes (Model::kv_eight)
  uint16_t* const* v;
  const int32_t* taps;  // boundaries wanted
  int64_t tap_count;
  float* tapped;        // [nodes, tap_count * hidden]
  float* logits_out;    // [logits, vocab], or null: only the likeliest token is wanted
  int64_t* chosen_out;  // [logits] then: its id, the lowest of equals, below `limit`
  int64_t limit;
  float* hidden_out;    // [logits, hidden]
};

// One node's keys in order of their positions: `cached` slots of the table from `first` on, then
// the slots of its own path.
struct Keys {
  const int64_t* table;
  const int64_t* own;
  int64_t first, cached, total;  // positions first.. of `total` keys in all
};

// Attention of some nodes of one row and one K/V head over one segment. Keys that the nodes share are
// read once; a node's sums are the same as if it were alone.
struct Heads {
  const uint16_t *k, *v;  // of this head; `stride` halves from slot to slot
  int64_t stride;
  int32_t group, dim;
  float softcap;
  int32_t nodes;               // 1..kTogether
  int64_t common;              // so many first keys are the same for all
  int64_t from;                // first key of the segment
  const float* q[kTogether];   // [group, dim], scaled
  Keys keys[kTogether];
  int64_t to[kTogether];       // end of the segment, or of the node's keys
  float* out[kTogether];       // [group][dim] sums, then [group] maxima, then [group] denominators
  int32_t eight;  // not halves: codes of eight bits [dim] and their scale as a float, per slot and head
};

static inline int64_t slot_at(const Keys& keys, int64_t i) {
  return i < keys.cached ? keys.table[i] : keys.own[i - keys.cached];
}

// How many first keys of two nodes of a row are the same; they share the cached ones.
static inline int64_t common_keys(const Keys& a, const Keys& b) {
  const int64_t total = a.total < b.total ? a.total : b.total;
  int64_t i = a.cached;
  while (i < total && a.own[i - a.cached] == b.own[i - a.cached]) i++;
  return i;
}

// How the next token of one place is drawn: temperature 0 = the largest logit; else noise that is
// a hash of `key` and the token's id is added, as kernels/noise.py does.
struct Draw {
  float temperature;
  uint64_t key;
  const int32_t* ids;  // of the logits' tokens; null = 0, 1, 2, ...
};

// Filled once per instruction set; bits do not depend on how many tokens are passed.
struct Kernels {
  // out[t * out_stride + row] (+)= W x, for groups [from, to)
  void (*linear)(const Matrix&, const Codes&, int64_t tokens, float* out, int64_t out_stride,
                 bool add, int from, int to);
  void (*quantise)(const float* x, const Codes&, int64_t token);
  void (*norm)(const float* x, const float* weight, float eps, int64_t size, float* out);
  void (*rotate)(float* x, const float* rotation, int64_t dim);
  void (*gate)(float* gate, const float* up, int64_t size, int activation);
  void (*halves)(const float* x, int64_t size, uint16_t* out);
  void (*eights)(const float* x, int64_t size, int8_t* out);  // [size] codes, then the scale
  void (*attend)(const Heads&);
  void (*merge)(const float* parts, int64_t count, int64_t stride, int group, int dim, float* out);
  void (*dequantise_row)(const Matrix&, int64_t row, float* out);
  // The `count` largest of x [size], the first of equals first: places and values.
  void (*largest)(const float* x, int64_t size, int count, int32_t* chosen, float* values);
  // The `count` likeliest of x [size, padded to 16], which is used up: places and log-probabilities.
  void (*pick)(float* x, int64_t size, const Draw&, int count, int32_t* chosen, float* scores);
};

// By name ("auto": the best there is), null if this processor lacks it; and what it is called, then
// "".
const Kernels* kernels_of(const char* name);
const char* name_of(const char* name);

const Kernels& generic_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#elif defined(__aarch64__)
const Kernels& neon_kernels();
const Kernels* dotprod_kernels();  // null: not in this build
const Kernels* i8mm_kernels();
#endif

}  // namespace native
