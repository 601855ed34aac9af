// The whole forward of a step in one call: every thread runs the same sequence of parts and they
// meet between them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "native.h"
#include "team.h"

namespace native {

class Runner {
 public:
  Runner(const Model& model, const Kernels& kernels, Pool& pool)
      : model_(model), kernels_(kernels), team_(kernels, pool) {}

  bool forward(const Step& step) {
    step_ = &step;
    if (!arrange()) return false;
    team_.run(step.threads == 1, [this](int thread) { part(thread); });
    return true;
  }

 private:
  struct Node {
    int64_t table_row, cached, first, total;
    int64_t own;  // where its own path's slots begin in own_
  };

  struct Best {
    int64_t token;
    float logit;
  };

  struct Batch {  // nodes of one row that are attended for together
    int64_t begin, end, common;
  };

  bool arrange() {
    const Step& s = *step_;
    const Model& m = model_;
    nodes_ = s.nodes;
    width_ = padded((int64_t)(m.heads + 2 * m.kv_heads) * m.head_dim);
    int64_t paths = 0, longest = 1;
    for (int64_t i = 0; i < s.nodes; i++) {
      const int64_t b = s.row_of[i], twig = s.twig_ptr[b + 1] - s.twig_ptr[b];
      paths += twig;
      const int64_t total = s.prefix[b] + twig;
      longest = total > longest ? total : longest;
    }
    segments_ = longest / kSegment + 2;
    part_ = (int64_t)(m.heads / m.kv_heads) * (m.head_dim + 2);
    Cut count(nullptr);
    lay(count, paths);
    scratch_.reserve(count.used());
    if (!scratch_.data()) return false;
    Cut cut(scratch_.data());
    lay(cut, paths);
    int64_t at = 0;
    for (int64_t i = 0; i < s.nodes; i++) at = trace(i, at);
    gather();
    return true;
  }

  // Batches as large as leaves every thread some.
  void gather() {
    const Step& s = *step_;
    const int64_t threads = s.threads == 1 ? 1 : team_.size();
    int64_t most = threads == 1 ? kTogether : s.nodes * model_.kv_heads / (threads * 4);
    most = most < 1 ? 1 : most > kTogether ? kTogether : most;
    batches_ = 0;
    for (int64_t b = 0; b < s.rows; b++)
      for (int64_t i = s.node_ptr[b]; i < s.node_ptr[b + 1]; i += most) {
        Batch& made = batch_[batches_++];
        made = {i, std::min(i + most, s.node_ptr[b + 1]), node_[i].total};
        const Keys first = keys_of(node_[i]);
        for (int64_t j = i + 1; j < made.end; j++)
          made.common = std::min(made.common, common_keys(first, keys_of(node_[j])));
      }
  }

  Keys keys_of(const Node& node) const {
    const int64_t* table = step_->table + node.table_row * step_->table_stride + node.first;
    return {table, own_ + node.own, node.first, node.cached, node.total};
  }

  void lay(Cut& cut, int64_t paths) {
    const Model& m = model_;
    const int64_t n = nodes_, q = (int64_t)m.heads * m.head_dim;
    x_ = cut.take<float>(n * m.hidden);
    y_ = cut.take<float>(n * (width_ > padded(m.hidden) ? width_ : padded(m.hidden)));
    z_ = cut.take<float>(n * padded(2 * (int64_t)m.intermediate));
    mixed_ = cut.take<float>(n * q);
    parts_ = cut.take<float>(n * m.kv_heads * segments_ * part_);
    const int64_t most = m.intermediate > q ? (m.intermediate > m.hidden ? m.intermediate : m.hidden)
                                            : (q > m.hidden ? q : m.hidden);
    q_ = cut.take<int8_t>(n * most * m.planes);
    scale_ = cut.take<float>(n * (most / kBlock));
    whole_ = cut.take<float>(n * (most / kBlock));
    half_ = cut.take<float>(n * (most / kBlock) * 2);
    node_ = cut.take<Node>(n);
    batch_ = cut.take<Batch>(n);
    own_ = cut.take<int64_t>(paths);
    if (!step_->logits_out) {
      const int64_t pieces = (groups(m.head.parts[0]) + kPiece - 1) / kPiece;
      piece_ = cut.take<float>(team_.size() * step_->logits * kPiece * kRows);
      best_ = cut.take<Best>(pieces * step_->logits);
    }
  }

  // The slots of a node's own path, in order of position.
  int64_t trace(int64_t i, int64_t at) {
    const Step& s = *step_;
    const int64_t b = s.row_of[i], begin = s.twig_ptr[b];
    Node& node = node_[i];
    node.table_row = s.row_ids[b];
    node.own = at;
    node.first = s.first;
    node.cached = s.prefix[b] > s.first ? s.prefix[b] - s.first : 0;
    if (s.chain[b]) {
      for (int64_t j = s.node_ptr[b]; j <= i; j++)
        own_[at++] = s.twig_slots[begin + j - s.node_ptr[b]];
    } else {
      for (int64_t word = 0; word < s.words; word++) {
        uint64_t bits = (uint64_t)s.ancestors[i * s.words + word];
        for (; bits; bits &= bits - 1)
          own_[at++] = s.twig_slots[begin + word * 64 + __builtin_ctzll(bits)];
      }
    }
    node.total = node.cached + (at - node.own);
    return at;
  }

  Codes codes(int64_t inputs) const {
    return Codes{q_, scale_, whole_, half_, inputs, nodes_, model_.planes};
  }

  void part(int thread) {
    const Step& s = *step_;
    const Model& m = model_;
    const int64_t n = s.nodes, hidden = m.hidden;
    team_.shared(thread, n, [&](int64_t i) {
      float* x = x_ + i * hidden;
      kernels_.dequantise_row(m.embedding, s.tokens[i], x);
      if (m.embed_scale != 1.0f)
        for (int64_t j = 0; j < hidden; j++) x[j] *= m.embed_scale;
      tap(0, i);
    });
    for (int layer = 0; layer < m.count; layer++) block(thread, layer);
    // Only where logits are wanted: the final norm, and the head.
    team_.shared(thread, s.logits, [&](int64_t i) {
      float* h = s.hidden_out + i * hidden;
      kernels_.norm(x_ + s.logits_at[i] * hidden, m.norm, m.eps, hidden, h);
      kernels_.quantise(h, codes(hidden), i);
    });
    if (!s.logits) return;
    if (!s.logits_out) return choose(thread);
    const int64_t stride = padded(m.vocab);
    team_.linear(thread, m.head, codes(hidden), s.logits, s.logits_out, stride, false);
    if (m.logit_softcap > 0)
      team_.shared(thread, s.logits, [&](int64_t i) { cap(s.logits_out + i * stride, m.vocab); });
  }

  void cap(float* logits, int64_t size) const {
    const float most = model_.logit_softcap;
    for (int64_t j = 0; j < size; j++) logits[j] = __builtin_tanhf(logits[j] / most) * most;
  }

  // The likeliest token of each place: of every piece of the head only the best is kept.
  void choose(int thread) {
    const Step& s = *step_;
    const Matrix& m = model_.head.parts[0];
    constexpr int64_t wide = kPiece * kRows;
    float* logits = piece_ + thread * s.logits * wide;
    team_.pieces(thread, groups(m), kPiece, [&](int64_t from, int64_t to) {
      const int64_t size = std::min(s.limit - from * kRows, wide), n = s.logits;
      if (size <= 0) return;
      kernels_.linear(m, codes(model_.hidden), n, logits - from * kRows, wide, false, (int)from,
                      (int)to);
      for (int64_t i = 0; i < n; i++) {
        if (model_.logit_softcap > 0) cap(logits + i * wide, size);
        int32_t at;
        Best& best = best_[from / kPiece * n + i];
        kernels_.largest(logits + i * wide, size, 1, &at, &best.logit);
        best.token = from * kRows + at;
      }
    });
    team_.shared(thread, s.logits, [&](int64_t i) {
      Best best = best_[i];
      for (int64_t at = wide, p = 1; at < s.limit; at += wide, p++)
        if (best_[p * s.logits + i].logit > best.logit) best = best_[p * s.logits + i];
      s.chosen_out[i] = best.token;
    });
  }

  void tap(int boundary, int64_t i) {
    const Step& s = *step_;
    const int64_t hidden = model_.hidden;
    for (int64_t t = 0; t < s.tap_count; t++)
      if (s.taps[t] == boundary)
        std::memcpy(s.tapped + (i * s.tap_count + t) * hidden, x_ + i * hidden, hidden * 4);
  }

  void normed(int64_t i, const float* weight) {
    float* y = y_ + i * padded(model_.hidden);
    kernels_.norm(x_ + i * model_.hidden, weight, model_.eps, model_.hidden, y);
    kernels_.quantise(y, codes(model_.hidden), i);
  }

  void block(int thread, int index) {
    const Step& s = *step_;
    const Model& m = model_;
    const Layer& layer = m.layers[index];
    const int64_t n = s.nodes, hidden = m.hidden, q = (int64_t)m.heads * m.head_dim;
    if (index == 0) team_.shared(thread, n, [&](int64_t i) { normed(i, layer.attention_norm); });
    team_.linear(thread, layer.qkv, codes(hidden), n, y_, width_, false);
    team_.shared(thread, n, [&](int64_t i) { place(index, i); });
    attention(thread, index);
    team_.shared(thread, n, [&](int64_t i) { kernels_.quantise(mixed_ + i * q, codes(q), i); });
    join(thread, layer.out, codes(q), layer.after_attention,
         [&](int64_t i) { normed(i, layer.mlp_norm); });
    const int64_t inner = m.intermediate, wide = padded(2 * inner);
    team_.linear(thread, layer.gate_up, codes(hidden), n, z_, wide, false);
    team_.shared(thread, n, [&](int64_t i) {
      float* gate = z_ + i * wide;
      kernels_.gate(gate, gate + inner, inner, m.activation);
      kernels_.quantise(gate, codes(inner), i);
    });
    const float* next = index + 1 < m.count ? m.layers[index + 1].attention_norm : nullptr;
    join(thread, layer.down, codes(inner), layer.after_mlp, [&](int64_t i) {
      tap(index + 1, i);
      if (next) normed(i, next);
    });
  }

  // x += W codes, through a norm of its own in families that have one; then `after` per node.
  template <typename F>
  void join(int thread, const Stack& m, const Codes& x, const float* norm, const F& after) {
    const int64_t n = nodes_, hidden = model_.hidden, wide = padded(hidden);
    if (norm) {
      team_.linear(thread, m, x, n, y_, wide, false);
    } else {
      team_.linear(thread, m, x, n, x_, hidden, true);
    }
    team_.shared(thread, n, [&](int64_t i) {
      if (norm) {
        float *y = y_ + i * wide, *to = x_ + i * hidden;
        kernels_.norm(y, norm, model_.eps, hidden, y);
        for (int64_t j = 0; j < hidden; j++) to[j] += y[j];
      }
      after(i);
    });
  }

  // Norms of q and k, rotation, K and V into the pool; q is left scaled in y_.
  void place(int index, int64_t i) {
    const Step& s = *step_;
    const Model& m = model_;
    const Layer& layer = m.layers[index];
    const int64_t dim = m.head_dim, kept = (int64_t)m.kv_heads * dim;
    float* y = y_ + i * width_;
    const float* table = layer.local && m.local_rope ? m.local_rope : m.rope;
    const float* rotation = table + s.positions[i] * dim;
    for (int h = 0; h < m.heads + m.kv_heads; h++) {
      float* head = y + h * dim;
      const float* norm = h < m.heads ? layer.q_norm : layer.k_norm;
      if (norm) kernels_.norm(head, norm, m.eps, dim, head);
      kernels_.rotate(head, rotation, dim);
      if (h < m.heads)
        for (int64_t d = 0; d < dim; d++) head[d] *= m.attention_scale;
    }
    const float* k = y + m.heads * dim;
    if (!m.kv_eight) {
      kernels_.halves(k, kept, s.k[index] + s.slots[i] * kept);
      kernels_.halves(k + kept, kept, s.v[index] + s.slots[i] * kept);
      return;
    }
    for (int h = 0; h < m.kv_heads; h++) {
      const int64_t at = (s.slots[i] * m.kv_heads + h) * held();
      kernels_.eights(k + h * dim, dim, (int8_t*)(s.k[index] + at));
      kernels_.eights(k + kept + h * dim, dim, (int8_t*)(s.v[index] + at));
    }
  }

  // Halves that a slot's K or V of one head take.
  int64_t held() const {
    return model_.kv_eight ? (model_.head_dim + 4) / 2 : (int64_t)model_.head_dim;
  }

  void attention(int thread, int index) {
    const Step& s = *step_;
    const Model& m = model_;
    const Layer& layer = m.layers[index];
    const int64_t dim = m.head_dim, kept = m.kv_heads * held();
    const int group = m.heads / m.kv_heads;
    const int64_t q = (int64_t)m.heads * dim;
    // Segment k of a node: its positions k * kSegment .. + kSegment.
    team_.taken(thread, batches_ * m.kv_heads * segments_, [&](int64_t task) {
      const int64_t segment = task % segments_, kv = task / segments_ % m.kv_heads;
      const Batch& batch = batch_[task / segments_ / m.kv_heads];
      Heads heads = {s.k[index] + kv * held(), s.v[index] + kv * held(), kept, group, (int)dim,
                     m.attention_softcap};
      heads.eight = m.kv_eight;
      heads.from = std::max(segment * kSegment - node_[batch.begin].first,
                            seen_from(layer, node_[batch.begin]));
      heads.common = batch.common;
      int64_t most = 0;
      for (int64_t i = batch.begin; i < batch.end; i++) {
        if (layer.window && i > batch.begin) {  // what they see begins elsewhere
          if (most > heads.from) kernels_.attend(heads);
          heads.nodes = 0, heads.common = most = 0;
          heads.from = std::max(segment * kSegment - node_[i].first, seen_from(layer, node_[i]));
        }
        const Node& node = node_[i];
        const int n = heads.nodes++;
        heads.q[n] = y_ + i * width_ + kv * group * dim;
        heads.keys[n] = keys_of(node);
        heads.to[n] = std::min((segment + 1) * kSegment - node.first, node.total);
        heads.out[n] = parts_ + ((i * m.kv_heads + kv) * segments_ + segment) * part_;
        most = std::max(most, heads.to[n]);
      }
      if (most > heads.from) kernels_.attend(heads);
    });
    team_.shared(thread, nodes_ * m.kv_heads, [&](int64_t task) {
      const int64_t i = task / m.kv_heads, kv = task % m.kv_heads;
      const Node& node = node_[i];
      const int64_t first = (node.first + seen_from(layer, node)) / kSegment;
      const int64_t last = (node.first + node.total - 1) / kSegment;
      kernels_.merge(parts_ + (task * segments_ + first) * part_, last - first + 1, part_, group,
                     (int)dim, mixed_ + i * q + kv * group * dim);
    });
  }

  // The first key a node sees: all, or the last `window`.
  static int64_t seen_from(const Layer& layer, const Node& node) {
    const int64_t hidden = layer.window ? node.total - layer.window : 0;
    return hidden > 0 ? hidden : 0;
  }

  static constexpr int64_t kPiece = 16;  // groups of the head whose logits are held at a time

  const Model& model_;
  const Kernels& kernels_;
  Team team_;
  const Step* step_ = nullptr;
  Scratch scratch_;
  int64_t nodes_ = 0, width_ = 0, segments_ = 0, part_ = 0;
  float *x_ = nullptr, *y_ = nullptr, *z_ = nullptr, *mixed_ = nullptr, *parts_ = nullptr;
  float *scale_ = nullptr, *whole_ = nullptr, *half_ = nullptr;
  int8_t* q_ = nullptr;
  float* piece_ = nullptr;
  Best* best_ = nullptr;
  Node* node_ = nullptr;
  Batch* batch_ = nullptr;
  int64_t batches_ = 0;
  int64_t* own_ = nullptr;
};

}  // namespace native

// The C interface, for ctypes. Pointers stay the caller's.
extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT int spec_native_version() { return 6; }

EXPORT const char* spec_native_isa(const char* wanted) { return native::name_of(wanted); }

EXPORT void* spec_native_pool(int threads) { return new native::Pool(threads > 256 ? 256 : threads); }

EXPORT void spec_native_pool_free(void* pool) { delete (native::Pool*)pool; }

EXPORT void* spec_native_runner(const native::Model* model, const char* isa, void* pool) {
  const native::Kernels* kernels = native::kernels_of(isa);
  if (!kernels) return nullptr;
  return new native::Runner(*model, *kernels, *(native::Pool*)pool);
}

EXPORT void spec_native_runner_free(void* runner) { delete (native::Runner*)runner; }

EXPORT int spec_native_forward(void* runner, const native::Step* step) {
  return ((native::Runner*)runner)->forward(*step) ? 0 : 1;
}

// y [tokens, padded outputs] = W x, x [tokens, inputs] floats: for tests and benches.
EXPORT int spec_native_linear(const native::Matrix* m, const float* x, int64_t tokens, float* y,
                              int planes, const char* isa, void* pool) {
  const native::Kernels* kernels = native::kernels_of(isa);
  if (!kernels) return 1;
  const int64_t blocks = m->inputs / native::kBlock;
  std::vector<int8_t> q(tokens * m->inputs * planes);
  std::vector<float> scale(tokens * blocks), whole(tokens * blocks), half(tokens * blocks * 2);
  const native::Codes codes = {q.data(),  scale.data(), whole.data(), half.data(),
                               m->inputs, tokens,       planes};
  for (int64_t t = 0; t < tokens; t++) kernels->quantise(x + t * m->inputs, codes, t);
  native::Pool& threads = *(native::Pool*)pool;
  const int all = native::groups(*m), size = threads.size();
  threads.run([&](int thread) {
    kernels->linear(*m, codes, tokens, y, native::padded(m->outputs), false, all * thread / size,
                    all * (thread + 1) / size);
  });
  return 0;
}

EXPORT void spec_native_row(const native::Matrix* m, int64_t row, float* out) {
  native::generic_kernels().dequantise_row(*m, row, out);
}
}
