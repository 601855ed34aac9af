// Threads that run one function together and meet at barriers. They spin for some microseconds
// before they sleep, since a forward has hundreds of meetings a few microseconds apart.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace native {

class Pool {
 public:
  explicit Pool(int threads) : size_(threads < 1 ? 1 : threads) {
    for (int i = 1; i < size_; i++) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      ending_ = true;
      round_.fetch_add(1);
    }
    begin_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  // job(thread) on every thread, the caller's among them; returns when all are done.
  void run(const std::function<void(int)>& job) {
    if (size_ == 1) return job(0);
    job_ = &job;
    left_.store(size_ - 1);
    {
      std::lock_guard<std::mutex> hold(mutex_);
      round_.fetch_add(1);
    }
    begin_.notify_all();
    job(0);
    for (int spins = 0; left_.load(std::memory_order_acquire) != 0;) pause(spins);
  }

  // All threads of a run wait here for each other; what was written before is seen behind it.
  void meet() {
    if (size_ == 1) return;
    const int turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
    } else {
      for (int spins = 0; turn_.load(std::memory_order_acquire) == turn;) pause(spins);
    }
  }

 private:
  // Spin first; where another program has the core that is waited for, let go of this one.
  static void pause(int& spins) {
    if (++spins < 4000) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else {
      std::this_thread::yield();
    }
  }

  void work(int index) {
    unsigned seen = 0;
    for (;;) {
      int spins = 0;
      while (round_.load(std::memory_order_acquire) == seen && spins < 2000) pause(spins);
      if (round_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> hold(mutex_);
        begin_.wait(hold, [&] { return round_.load() != seen; });
      }
      seen = round_.load(std::memory_order_acquire);
      if (ending_) return;
      (*job_)(index);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable begin_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<unsigned> round_{0};
  std::atomic<int> left_{0}, arrived_{0}, turn_{0};
  bool ending_ = false;
};

}  // namespace native
