// Threads that compute one forward together, and the memory it needs. How work is split among
// threads changes no bit: each value is made by one thread in one order.
#pragma once
#include <atomic>
#include <cstdlib>

#include "native.h"
#include "pool.h"

namespace native {

// Grows and never shrinks, aligned for vectors; a step allocates nothing once it was as large.
class Scratch {
 public:
  ~Scratch() { std::free(held_); }
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    std::free(held_);
    size_ = (bytes + (bytes >> 2) + 4095) & ~(size_t)4095;
    held_ = std::aligned_alloc(64, size_);
    if (!held_) size_ = 0;
  }
  char* data() const { return (char*)held_; }

 private:
  void* held_ = nullptr;
  size_t size_ = 0;
};

class Cut {  // hands out pieces of a scratch; the first pass only counts
 public:
  explicit Cut(char* base) : base_(base) {}
  template <typename T>
  T* take(int64_t count) {
    T* made = base_ ? (T*)(base_ + used_) : nullptr;
    used_ += ((size_t)count * sizeof(T) + 63) & ~(size_t)63;
    return made;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

static inline int64_t padded(int64_t n) { return (n + kRows - 1) / kRows * kRows; }

// What all threads of a forward call in the same order.
class Team {
 public:
  Team(const Kernels& kernels, Pool& pool) : kernels_(kernels), pool_(pool) {}

  // job(thread) on the caller alone, or on every thread of the pool.
  template <typename F>
  void run(bool alone, const F& job) {
    active_ = alone ? 1 : pool_.size();
    for (auto& ticket : tickets_) ticket.store(0);
    const auto begin = [&](int thread) {
      turns_[thread].value = 0;
      job(thread);
    };
    if (active_ == 1) return begin(0);
    pool_.run(begin);
  }

  void meet() {
    if (active_ > 1) pool_.meet();
  }

  // f(i) for i of [0, count), shared among the threads by turns.
  template <typename F>
  void shared(int thread, int64_t count, const F& f) {
    for (int64_t i = thread; i < count; i += active_) f(i);
    meet();
  }

  int size() const { return pool_.size(); }

  // f(i) for i of [0, count), taken as they come: pieces differ, and another program may hold one of
  // the cores.
  template <typename F>
  void taken(int thread, int64_t count, const F& f) {
    pieces(thread, count, 1, [&](int64_t from, int64_t) { f(from); });
  }

  // out [tokens, stride] (+)= the stack's rows times x.
  void linear(int thread, const Stack& stack, const Codes& x, int64_t tokens, float* out,
              int64_t stride, bool add) {
    int all = 0;
    for (int p = 0; p < stack.count; p++) all += groups(stack.parts[p]);
    const int piece = active_ == 1 ? all : all / (active_ * 8) > 1 ? all / (active_ * 8) : 1;
    pieces(thread, all, piece, [&](int64_t from, int64_t to) {
      int begin = 0;
      for (int p = 0; p < stack.count; p++) {
        const Matrix& m = stack.parts[p];
        const int size = groups(m);
        const int low = from > begin ? (int)from - begin : 0;
        const int high = to - begin < size ? (int)to - begin : size;
        if (low < high)
          kernels_.linear(m, x, tokens, out + (int64_t)begin * kRows, stride, add, low, high);
        begin += size;
      }
    });
  }

  // f(from, to) for pieces of [0, count).
  template <typename F>
  void pieces(int thread, int64_t count, int64_t piece, const F& f) {
    std::atomic<int64_t>& ticket = tickets_[turns_[thread].value++ & 1];
    for (;;) {
      const int64_t from = ticket.fetch_add(piece, std::memory_order_relaxed);
      if (from >= count) break;
      f(from, from + piece < count ? from + piece : count);
    }
    meet();
    if (thread == 0) ticket.store(0, std::memory_order_relaxed);
  }

 private:
  struct alignas(64) Turn {
    int value = 0;
  };

  const Kernels& kernels_;
  Pool& pool_;
  int active_ = 1;
  std::atomic<int64_t> tickets_[2] = {{0}, {0}};  // one is set back while the other is in use
  Turn turns_[256];
};

}  // namespace native
