// A one-layer head that guesses from a target's tapped features (EAGLE, EAGLE-3, NEXTN), and one
// drafting phase. draft/head.py says what is computed.
#pragma once
#include "native.h"

namespace native {

// Stacks may be empty, norms null: what a format has not. Widths: features = taps * tap_width,
// everything else `hidden`; q and kv read the pair of embedding and feature, or what `join` makes.
struct Draft {
  Stack fuse, join, q, kv, out, gate_up, down, head;
  const float *fuse_norm;   // [features], over all taps
  const float *fuse_norms;  // [features], each tap by itself
  const float *embed_norm, *feature_norm, *attention_norm, *mlp_norm, *norm;
  const float *q_norm, *k_norm;  // [head_dim]
  Matrix embedding;
  const float* rope;   // as the model's
  const int32_t* ids;  // [vocab, padded to 16] the target's number of each token, or null
  int32_t taps, tap_width, hidden, intermediate, heads, kv_heads, head_dim, vocab;
  int32_t planes, activation;
  int32_t hidden_first;     // of a pair
  int32_t normed_residual;  // without join: the residual is the feature behind its norm
  int32_t normed_output;    // what is fed back is the output behind the last norm
  float eps, attention_scale, logit_softcap;
};

// What became certain, as chains, and how large a tree is to be grown below each row's last node.
struct DraftStep {
  int64_t nodes, rows, threads, table_stride;
  const int64_t *tokens, *positions, *slots, *node_ptr;
  const float* features;  // [nodes, taps * tap_width] of each node's predecessor
  const int64_t *last, *length, *row_ids;
  const int64_t* table;
  uint16_t *k, *v;             // [slots, kv_heads, head_dim] halves
  int64_t depth, width, kept;  // kept nodes; 0: only K and V are wanted
  int64_t grants_stride;
  const int64_t* grants;              // [rows, grants_stride] slots of expanded nodes
  const int64_t* seeds;               // [rows]
  const double* temperature;          // [rows], 0 = greedy
  int64_t *tokens_out, *parents_out;  // [rows, kept]
  float* scores_out;                  // [rows, kept]
};

}  // namespace native
