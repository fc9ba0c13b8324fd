// Writes to the cache on a thread pool: which tokens go together.
#pragma once

#include <algorithm>

#include "kv_write.h"
#include "parallel_for.h"

namespace paged {

template <class Pool>
void run_kv_write(Pool& pool, const KvWriteProblem& p, KvWriteFunction write) {
  // Tasks of 32 Ki elements take some microseconds, as long as waking a thread.
  const int64_t token_elements = (p.q ? p.num_q_heads : 0) * p.head_dim +
                                 p.num_planes * p.num_kv_heads * p.head_dim;
  const int64_t per_task = std::max<int64_t>(1, (int64_t{32} << 10) / std::max<int64_t>(1, token_elements));
  // Padding tokens share slots of the null block, which nobody reads; two threads may still not
  // write one place at once. They come last, so one task has them.
  int64_t end = p.num_tokens;
  while (end > 0 && p.slots[end - 1] < p.block_size) --end;
  const int64_t tasks = (end + per_task - 1) / per_task;
  parallel_for(pool, tasks, [=](int64_t task) {
    const bool is_last = task == tasks - 1;
    write(p, task * per_task, is_last ? p.num_tokens : (task + 1) * per_task);
  });
  if (!tasks) write(p, 0, p.num_tokens);
}

}  // namespace paged
