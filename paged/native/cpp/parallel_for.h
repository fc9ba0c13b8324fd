// A loop over a thread pool that belongs to somebody else.
//
// The caller may itself be a task of the pool, and all other threads of the pool may be waiting in
// loops of their own. So it never waits for a scheduled task: it takes items like everybody else,
// and when none is left waits only for items that another thread has begun, which always end.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

namespace paged {

// Calls body(i) for each i in [0, n) and returns when all calls have.
//
// Pool: num_threads(), the caller's included, and Schedule(f), which runs f() some time or never.
// body: copied; a task may wake after the loop has ended, when the caller's frame is gone.
template <class Pool, class Body>
void parallel_for(Pool& pool, int64_t n, Body body) {
  struct State {
    State(Body b, int64_t num_items) : body(std::move(b)), n(num_items) {}

    void take_items() {
      int64_t taken = 0;
      for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1), ++taken) body(i);
      // Released: what the items wrote is visible to the caller when it has counted them.
      if (taken) done.fetch_add(taken, std::memory_order_release);
    }

    std::atomic<int64_t> next{0}, done{0};
    Body body;
    const int64_t n;
  };

  const int64_t threads = pool.num_threads() < n ? pool.num_threads() : n;
  if (threads <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  auto state = std::make_shared<State>(std::move(body), n);
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([state] { state->take_items(); });
  state->take_items();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < n; ++spins) {
    // An item takes microseconds, unless its thread has lost its core.
    if (spins > 1000) std::this_thread::yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
  }
}

}  // namespace paged
