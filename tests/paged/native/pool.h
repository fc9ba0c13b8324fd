// Threads that run what is scheduled, as XLA's pool does; for programs without XLA.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <queue>
#include <thread>
#include <utility>
#include <vector>

// How many threads to check with. One races with nobody: the thread sanitizer need not watch it.
#if defined(__SANITIZE_THREAD__)
inline constexpr int kPoolSizes[] = {4};
#else
inline constexpr int kPoolSizes[] = {1, 4};
#endif

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }
  template <class F>
  void Schedule(F f) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push(f);
    }
    wake_.notify_one();
  }

 private:
  void Work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop();
      lock.unlock();
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::queue<std::function<void()>> tasks_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};
