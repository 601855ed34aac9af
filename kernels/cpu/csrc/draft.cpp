// A whole drafting phase in one call: K and V of what became certain, then a tree per row, level by
// level, as draft/grow.py grows it. Nothing is read from or told to Python in between.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "draft.h"
#include "team.h"

namespace native {

static uint64_t scattered64(uint64_t x) {  // splitmix64's, as in kernels/noise.py
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

static uint64_t noise_key(int64_t seed, int64_t position) {
  constexpr uint64_t kGamma = 0x9E3779B97F4A7C15ull;
  return scattered64(scattered64((uint64_t)seed + kGamma) + (uint64_t)position * kGamma);
}

class Grower {
 public:
  Grower(const Draft& draft, const Kernels& kernels, Pool& pool)
      : draft_(draft), kernels_(kernels), team_(kernels, pool) {}

  bool grow(const DraftStep& step) {
    step_ = &step;
    if (!arrange()) return false;
    team_.run(step.threads == 1, [this](int thread) { part(thread); });
    return true;
  }

 private:
  struct Candidate {
    int32_t token, parent;
    float score;
  };

  bool growing() const { return step_->kept > 0 && step_->depth > 0; }

  bool arrange() {
    const DraftStep& s = *step_;
    certain_ = 0;
    for (int64_t b = 0; b < s.rows; b++)
      for (int64_t i = s.node_ptr[b]; i <= s.last[b]; i++) certain_ += s.positions[i] > 0;
    int64_t longest = 1;
    for (int64_t b = 0; b < s.rows; b++) longest = std::max(longest, s.length[b] + s.depth);
    segments_ = longest / kSegment + 2;
    part_ = (int64_t)(draft_.heads / draft_.kv_heads) * (draft_.head_dim + 2);
    made_ = s.width + (s.depth > 1 ? (s.depth - 1) * s.width * s.width : 0);
    Cut count(nullptr);
    lay(count);
    scratch_.reserve(count.used());
    if (!scratch_.data()) return false;
    Cut cut(scratch_.data());
    lay(cut);
    // The rows' newest tokens first: they alone are run to the end.
    int64_t at = 0;
    for (int64_t b = 0; b < s.rows; b++)
      if (s.positions[s.last[b]] > 0) order_[at++] = s.last[b];
    for (int64_t b = 0; b < s.rows; b++)
      for (int64_t i = s.node_ptr[b]; i < s.last[b]; i++)
        if (s.positions[i] > 0) order_[at++] = i;
    return true;
  }

  void lay(Cut& cut) {
    const Draft& d = draft_;
    const DraftStep& s = *step_;
    const int64_t h = d.hidden, q = (int64_t)d.heads * d.head_dim;
    const int64_t few = std::max(s.rows, growing() ? s.rows * s.width : 0);  // run to the end
    const int64_t n = std::max(few, certain_), features = (int64_t)d.taps * d.tap_width;
    const int64_t most = std::max({features, 2 * h, q, (int64_t)d.intermediate});
    order_ = cut.take<int64_t>(n);
    normed_ = cut.take<float>(d.fuse_norm || d.fuse_norms ? n * features : 0);
    g_ = cut.take<float>(n * h);
    pair_ = cut.take<float>(n * 2 * h);
    kv_ = cut.take<float>(n * kv_width());
    heads_ = cut.take<float>(few * padded(q));
    x_ = cut.take<float>(few * h);
    for (auto& state : state_) state = cut.take<float>(few * h);
    mixed_ = cut.take<float>(few * q);
    z_ = cut.take<float>(few * padded(2 * (int64_t)d.intermediate));
    parts_ = cut.take<float>(few * d.kv_heads * segments_ * part_);
    logits_ = cut.take<float>(few * head_width());
    q_ = cut.take<int8_t>(n * most * d.planes);
    scale_ = cut.take<float>(n * (most / kBlock));
    whole_ = cut.take<float>(n * (most / kBlock));
    half_ = cut.take<float>(n * (most / kBlock) * 2);
    candidates_ = cut.take<Candidate>(s.rows * made_);
    front_ = cut.take<int32_t>(few);
    for (auto& path : path_) path = cut.take<int64_t>(few * std::max<int64_t>(s.depth, 1));
    picks_ = cut.take<int32_t>(few * s.width);
    scores_ = cut.take<float>(few * s.width);
    sorted_ = cut.take<int32_t>(s.rows * made_ * 2);
  }

  int64_t head_width() const {
    int64_t all = 0;
    for (int p = 0; p < draft_.head.count; p++) all += padded(draft_.head.parts[p].outputs);
    return all;
  }

  int64_t kv_width() const { return padded(2 * (int64_t)draft_.kv_heads * draft_.head_dim); }

  Codes codes(int64_t inputs, int64_t n) const {
    return Codes{q_, scale_, whole_, half_, inputs, n, draft_.planes};
  }

  void part(int thread) {
    const DraftStep& s = *step_;
    certain(thread);
    if (!growing()) return;
    run(thread, s.rows, 0);
    children(thread, s.rows, 0);
    const int64_t n = s.rows * s.width, h = draft_.hidden;
    for (int level = 1; level < s.depth; level++) {
      team_.shared(thread, s.rows, [&](int64_t b) { expand(b, level); });
      const float* fed = state_[(level + 1) & 1];
      const auto token = [&](int64_t i) { return candidates_[i / s.width * made_ + front_[i]].token; };
      const auto feature = [&](int64_t i) { return fed + above(i, level) * h; };
      enter(thread, n, n, token, feature);
      team_.shared(thread, n, [&](int64_t i) {
        const int64_t at = s.length[i / s.width] + level - 1;
        keep(i, at, path_[level & 1][i * s.depth + level - 1]);
        turn(i, at);
      });
      run(thread, n, level);
      children(thread, n, level);
    }
    team_.shared(thread, s.rows, [&](int64_t b) { rerank(b); });
  }

  // K and V of the chains; queries of the newest tokens where a tree is wanted.
  void certain(int thread) {
    const Draft& d = draft_;
    const DraftStep& s = *step_;
    const int64_t n = certain_, features = (int64_t)d.taps * d.tap_width;
    const int64_t on = growing() ? s.rows : 0;
    team_.shared(thread, n, [&](int64_t i) {
      const float* f = s.features + order_[i] * features;
      float* made = normed_ + i * features;
      if (d.fuse_norm) kernels_.norm(f, d.fuse_norm, d.eps, features, made), f = made;
      if (d.fuse_norms) {
        for (int64_t t = 0; t < d.taps; t++)
          kernels_.norm(f + t * d.tap_width, d.fuse_norms + t * d.tap_width, d.eps, d.tap_width,
                        made + t * d.tap_width);
        f = made;
      }
      if (d.fuse.count) {
        kernels_.quantise(f, codes(features, n), i);
      } else {
        std::memcpy(g_ + i * d.hidden, f, d.hidden * 4);
      }
    });
    if (d.fuse.count) team_.linear(thread, d.fuse, codes(features, n), n, g_, d.hidden, false);
    const auto token = [&](int64_t i) { return s.tokens[order_[i]]; };
    enter(thread, n, on, token, [&](int64_t i) { return g_ + i * d.hidden; });
    team_.shared(thread, n, [&](int64_t i) {
      keep(i, s.positions[order_[i]], s.slots[order_[i]]);
      if (i < on) turn(i, s.positions[order_[i]]);
    });
  }

  // Pairs into keys and values, and of the first `on` nodes into queries and residuals too.
  template <typename Token, typename Feature>
  void enter(int thread, int64_t n, int64_t on, const Token& token, const Feature& feature) {
    const Draft& d = draft_;
    const int64_t h = d.hidden, wide = d.join.count ? h : 2 * h;
    team_.shared(thread, n, [&](int64_t i) {
      float* pair = pair_ + i * 2 * h;
      float *e = pair + (d.hidden_first ? h : 0), *u = pair + (d.hidden_first ? 0 : h);
      const int64_t id = token(i);
      const float* f = feature(i);
      kernels_.dequantise_row(d.embedding, id < d.embedding.outputs ? id : 0, e);
      if (d.embed_norm) kernels_.norm(e, d.embed_norm, d.eps, h, e);
      if (d.feature_norm) {
        kernels_.norm(f, d.feature_norm, d.eps, h, u);
      } else {
        std::memcpy(u, f, h * 4);
      }
      if (!d.join.count && i < on) std::memcpy(x_ + i * h, d.normed_residual ? u : f, h * 4);
      kernels_.quantise(pair, codes(2 * h, n), i);
    });
    if (d.join.count) {
      team_.linear(thread, d.join, codes(2 * h, n), n, pair_, h, false);
      team_.shared(thread, n, [&](int64_t i) {
        float* x = pair_ + i * h;
        if (i < on) std::memcpy(x_ + i * h, x, h * 4);
        if (d.attention_norm) kernels_.norm(x, d.attention_norm, d.eps, h, x);
        kernels_.quantise(x, codes(h, n), i);
      });
    }
    team_.linear(thread, d.kv, codes(wide, n), n, kv_, kv_width(), false);
    if (on)
      team_.linear(thread, d.q, codes(wide, n), on, heads_, padded((int64_t)d.heads * d.head_dim),
                   false);
  }

  const float* rotation(int64_t position) const {
    return draft_.rope + position * draft_.head_dim;
  }

  void keep(int64_t i, int64_t position, int64_t slot) {
    const Draft& d = draft_;
    const int64_t dim = d.head_dim, kept = (int64_t)d.kv_heads * dim;
    float* k = kv_ + i * kv_width();
    for (int h = 0; h < d.kv_heads; h++) {
      if (d.k_norm) kernels_.norm(k + h * dim, d.k_norm, d.eps, dim, k + h * dim);
      kernels_.rotate(k + h * dim, rotation(position), dim);
    }
    kernels_.halves(k, kept, step_->k + slot * kept);
    kernels_.halves(k + kept, kept, step_->v + slot * kept);
  }

  void turn(int64_t i, int64_t position) {
    const Draft& d = draft_;
    const int64_t dim = d.head_dim;
    float* q = heads_ + i * padded(d.heads * dim);
    for (int h = 0; h < d.heads; h++, q += dim) {
      if (d.q_norm) kernels_.norm(q, d.q_norm, d.eps, dim, q);
      kernels_.rotate(q, rotation(position), dim);
      for (int64_t j = 0; j < dim; j++) q[j] *= d.attention_scale;
    }
  }

  // From queries to logits and the state that is fed back, for n nodes.
  void run(int thread, int64_t n, int level) {
    const Draft& d = draft_;
    const int64_t h = d.hidden, q = (int64_t)d.heads * d.head_dim, inner = d.intermediate;
    attention(thread, n, level);
    team_.linear(thread, d.out, codes(q, n), n, x_, h, true);
    float *state = state_[level & 1], *y = pair_;  // the pairs are no longer needed
    team_.shared(thread, n, [&](int64_t i) {
      kernels_.norm(x_ + i * h, d.mlp_norm, d.eps, h, y + i * h);
      kernels_.quantise(y + i * h, codes(h, n), i);
    });
    const int64_t wide = padded(2 * inner);
    team_.linear(thread, d.gate_up, codes(h, n), n, z_, wide, false);
    team_.shared(thread, n, [&](int64_t i) {
      float* gate = z_ + i * wide;
      kernels_.gate(gate, gate + inner, inner, d.activation);
      kernels_.quantise(gate, codes(inner, n), i);
    });
    team_.linear(thread, d.down, codes(inner, n), n, x_, h, true);
    team_.shared(thread, n, [&](int64_t i) {
      const float* last = x_ + i * h;
      if (d.norm) kernels_.norm(last, d.norm, d.eps, h, y + i * h), last = y + i * h;
      kernels_.quantise(last, codes(h, n), i);
      std::memcpy(state + i * h, d.normed_output ? last : x_ + i * h, h * 4);
    });
    team_.linear(thread, d.head, codes(h, n), n, logits_, head_width(), false);
  }

  // Position 0 has no pair, so keys begin at 1.
  void attention(int thread, int64_t n, int level) {
    const Draft& d = draft_;
    const DraftStep& s = *step_;
    const int64_t dim = d.head_dim, kept = (int64_t)d.kv_heads * dim, q = (int64_t)d.heads * dim;
    const int group = d.heads / d.kv_heads;
    const int64_t width = level ? s.width : 1, per = (width + kTogether - 1) / kTogether;
    const auto row_of = [&](int64_t i) { return i / width; };
    team_.taken(thread, s.rows * per * d.kv_heads * segments_, [&](int64_t task) {
      const int64_t segment = task % segments_, head = task / segments_ % d.kv_heads;
      const int64_t batch = task / segments_ / d.kv_heads, b = batch / per;
      const int64_t cached = s.length[b] - 1, total = cached + level;
      Heads heads = {s.k + head * dim, s.v + head * dim, kept, group, (int)dim, 0.0f};
      heads.from = std::max<int64_t>(segment * kSegment - 1, 0);
      heads.common = cached;
      const int64_t to = std::min((segment + 1) * kSegment - 1, total);
      const int64_t first = b * width + batch % per * kTogether;
      if (heads.from >= to) return;
      for (int64_t i = first; i < std::min(first + kTogether, (b + 1) * width); i++) {
        const int j = heads.nodes++;
        heads.q[j] = heads_ + i * padded(q) + head * group * dim;
        heads.keys[j] = {s.table + s.row_ids[b] * s.table_stride + 1,
                         path_[level & 1] + i * s.depth, 1, cached, total};
        heads.to[j] = to;
        heads.out[j] = parts_ + ((i * d.kv_heads + head) * segments_ + segment) * part_;
      }
      kernels_.attend(heads);
    });
    team_.shared(thread, n, [&](int64_t i) {
      const int64_t total = s.length[row_of(i)] - 1 + level;
      float* mixed = mixed_ + i * q;
      for (int64_t head = 0; head < d.kv_heads; head++) {
        float* out = mixed + head * group * dim;
        if (total > 0) {
          kernels_.merge(parts_ + (i * d.kv_heads + head) * segments_ * part_,
                         total / kSegment + 1, part_, group, (int)dim, out);
        } else {
          std::memset(out, 0, group * dim * 4);
        }
      }
      kernels_.quantise(mixed, codes(q, n), i);
    });
  }

  // Candidates below each of n nodes.
  void children(int thread, int64_t n, int level) {
    const Draft& d = draft_;
    const DraftStep& s = *step_;
    const int width = (int)s.width;
    team_.shared(thread, n, [&](int64_t i) {
      const int64_t b = level ? i / width : i, place = level ? i % width : 0;
      const uint64_t key = noise_key(s.seeds[b], s.length[b] + level);
      int32_t* ids = picks_ + i * width;
      float* scores = scores_ + i * width;
      float* logits = logits_ + i * head_width();
      if (d.logit_softcap > 0)
        for (int64_t j = 0; j < d.vocab; j++)
          logits[j] = std::tanh(logits[j] / d.logit_softcap) * d.logit_softcap;
      kernels_.pick(logits, d.vocab, Draw{(float)s.temperature[b], key, d.ids}, width, ids, scores);
      Candidate* row = candidates_ + b * made_;
      const int32_t above = level ? front_[i] : -1;
      const float so_far = level ? row[above].score : 0.0f;
      Candidate* to = row + first(level) + place * width;
      for (int j = 0; j < width; j++)
        to[j] = {d.ids ? d.ids[ids[j]] : ids[j], above, scores[j] + so_far};
    });
  }

  // The number of a level's first candidate.
  int64_t first(int level) const {
    const int64_t width = step_->width;
    return level ? width + (level - 1) * width * width : 0;
  }

  // The best candidates of the level before become the nodes of this one.
  void expand(int64_t b, int level) {
    const DraftStep& s = *step_;
    const int64_t width = s.width, begin = first(level - 1);
    const int64_t count = first(level) - begin;
    int32_t* order = sorted_ + b * made_ * 2;
    const Candidate* row = candidates_ + b * made_;
    best(row, begin, count, width, order);
    const int64_t *before = path_[(level + 1) & 1], stride = s.depth;
    int64_t* path = path_[level & 1];
    for (int64_t f = 0; f < width; f++) {
      const int64_t i = b * width + f, above = (order[f] - begin) / width;
      front_[i] = order[f];
      if (level > 1)
        std::memcpy(path + i * stride, before + (b * width + above) * stride, (level - 1) * 8);
      path[i * stride + level - 1] = s.grants[b * s.grants_stride + (level - 1) * width + f];
    }
  }

  // The node of the level before that a frontier node hangs below.
  int64_t above(int64_t i, int level) const {
    const int64_t b = i / step_->width;
    if (level == 1) return b;
    return b * step_->width + (front_[i] - first(level - 1)) / step_->width;
  }

  // The `count` best of candidates [begin, begin + size), the earlier of equals first.
  static void best(const Candidate* row, int64_t begin, int64_t size, int64_t count,
                   int32_t* order) {
    for (int64_t i = 0; i < size; i++) order[i] = (int32_t)(begin + i);
    std::partial_sort(order, order + count, order + size, [&](int32_t a, int32_t b) {
      return row[a].score > row[b].score || (row[a].score == row[b].score && a < b);
    });
  }

  // The best of all levels in order of creation; a parent never scores less than its child.
  void rerank(int64_t b) {
    const DraftStep& s = *step_;
    const Candidate* row = candidates_ + b * made_;
    int32_t *order = sorted_ + b * made_ * 2, *place = order + made_;
    const int64_t kept = std::min(s.kept, made_);
    best(row, 0, made_, kept, order);
    std::sort(order, order + kept);
    for (int64_t i = 0; i < kept; i++) {
      const Candidate& own = row[order[i]];
      place[order[i]] = (int32_t)i;
      s.tokens_out[b * s.kept + i] = own.token;
      s.parents_out[b * s.kept + i] = own.parent < 0 ? -1 : place[own.parent];
      s.scores_out[b * s.kept + i] = own.score;
    }
  }

  const Draft& draft_;
  const Kernels& kernels_;
  Team team_;
  const DraftStep* step_ = nullptr;
  Scratch scratch_;
  int64_t certain_ = 0, segments_ = 0, part_ = 0, made_ = 0;
  int64_t *order_ = nullptr, *path_[2] = {};
  float *normed_ = nullptr, *g_ = nullptr, *pair_ = nullptr, *kv_ = nullptr, *heads_ = nullptr;
  float *x_ = nullptr, *state_[2] = {}, *mixed_ = nullptr, *z_ = nullptr, *parts_ = nullptr;
  float *logits_ = nullptr, *scale_ = nullptr, *whole_ = nullptr, *half_ = nullptr;
  float* scores_ = nullptr;
  int8_t* q_ = nullptr;
  Candidate* candidates_ = nullptr;
  int32_t *front_ = nullptr, *picks_ = nullptr, *sorted_ = nullptr;
};

}  // namespace native

extern "C" {

#define EXPORT __attribute__((visibility("default")))

EXPORT void* spec_native_grower(const native::Draft* draft, const char* isa, void* pool) {
  const native::Kernels* kernels = native::kernels_of(isa);
  if (!kernels) return nullptr;
  return new native::Grower(*draft, *kernels, *(native::Pool*)pool);
}

EXPORT void spec_native_grower_free(void* grower) { delete (native::Grower*)grower; }

EXPORT int spec_native_grow(void* grower, const native::DraftStep* step) {
  return ((native::Grower*)grower)->grow(*step) ? 0 : 1;
}
}
