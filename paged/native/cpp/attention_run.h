// Attention on a thread pool: which items there are, and which of them go together.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention.h"
#include "parallel_for.h"

namespace paged {

// Keys between the fixed positions at which a context is split over threads, if the rows of its
// sequence fit one tile: merging costs as much as a few keys.
constexpr int64_t kSplitKeys = 512;

// Items go together until they are this many keys: below it, waking a thread costs more.
constexpr int64_t kLeastKeysOfGroup = 256;

// Working memory of a call, kept by the thread that makes it.
struct AttentionWork {
  std::vector<AttentionItem> items;
  std::vector<int64_t> groups;  // first item of each, and the number of items
  std::vector<int64_t> merges;  // first of the items that are merged, and their number
  std::vector<float> partials;
};

inline char* aligned_scratch(int64_t bytes) {
  static thread_local std::vector<char> scratch;
  if (static_cast<int64_t>(scratch.size()) < bytes + 64) scratch.resize(bytes + 64);
  const uintptr_t address = reinterpret_cast<uintptr_t>(scratch.data());
  return scratch.data() + (round_up(static_cast<int64_t>(address), 64) -
                           static_cast<int64_t>(address));
}

// What an item costs, in key loads: 16 rows cost about as much as loading the keys.
inline int64_t cost(const AttentionProblem& p, const AttentionItem& item) {
  return (item.end_key - item.first_key) * (16 + item.num_rows * heads_per_kv(p)) / 16 + 1;
}

inline void clear_rows(const AttentionProblem& p, int64_t begin, int64_t end) {
  const int64_t row_bytes = p.num_q_heads * p.head_dim * element_bytes(p.q_type);
  if (begin < end)
    std::memset(static_cast<char*>(p.out) + begin * row_bytes, 0, (end - begin) * row_bytes);
}

// Adds the items of one tile: one per kv head, or several if its keys are split.
inline void add_tile(const AttentionProblem& p, AttentionItem item, bool may_split,
                     AttentionWork& work, int64_t& partial_floats) {
  const int64_t last = item.first_position + item.num_rows;
  item.first_key = std::max<int64_t>(0, item.first_position - p.window + 1);
  const int64_t first_split = item.first_key / kSplitKeys, end_split = (last - 1) / kSplitKeys + 1;
  const bool is_split = may_split && end_split - first_split > 1;
  for (item.kv_head = 0; item.kv_head < p.num_kv_heads; ++item.kv_head) {
    if (!is_split) {
      item.end_key = last;
      item.partial = -1;
      work.items.push_back(item);
      continue;
    }
    work.merges.push_back(static_cast<int64_t>(work.items.size()));
    work.merges.push_back(end_split - first_split);
    for (int64_t split = first_split; split < end_split; ++split) {
      AttentionItem part = item;
      part.first_key = std::max(item.first_key, split * kSplitKeys);
      part.end_key = std::min(last, (split + 1) * kSplitKeys);
      part.partial = partial_floats;
      partial_floats += item.num_rows * heads_per_kv(p) * partial_row_floats(p);
      work.items.push_back(part);
    }
  }
}

// Lists the items, those of long prompts first and of these the longest, and zeroes the rows that
// see nothing. Returns the size of the partial results.
inline int64_t list_items(const AttentionProblem& p, AttentionWork& work) {
  work.items.clear();
  work.merges.clear();
  int64_t partial_floats = 0, owned = 0;
  const int64_t tokens = tile_tokens(p);
  for (const bool is_long : {true, false}) {
    for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
      const int64_t length =
          std::clamp<int64_t>(p.seq_lens[seq], 0, p.max_blocks * p.block_size);
      const int64_t begin = std::clamp<int64_t>(p.query_start_loc[seq], 0, p.num_tokens);
      const int64_t end = std::clamp<int64_t>(p.query_start_loc[seq + 1], begin, p.num_tokens);
      owned = std::max(owned, end);
      if ((end - begin > tokens) != is_long) continue;
      // Rows before the first position, and so all rows of a sequence without a context.
      const int64_t first_seeing = std::max(begin, end - length);
      clear_rows(p, begin, first_seeing);
      for (int64_t row = first_seeing; row < end; row += tokens) {
        AttentionItem item{};
        item.seq = seq;
        item.first_row = row;
        item.num_rows = std::min(tokens, end - row);
        item.first_position = length - (end - row);
        add_tile(p, item, !is_long, work, partial_floats);
      }
    }
    if (is_long)
      std::sort(work.items.begin(), work.items.end(),
                [&p](const AttentionItem& a, const AttentionItem& b) {
                  return cost(p, a) > cost(p, b);
                });
  }
  clear_rows(p, owned, p.num_tokens);
  return partial_floats;
}

// Cuts the list into groups that a thread takes at once: small enough to even out, large enough to
// be worth it. Within a group the next item is prefetched.
inline void group_items(const AttentionProblem& p, int64_t threads, AttentionWork& work) {
  int64_t total = 0, sum = 0;
  for (const AttentionItem& item : work.items) total += cost(p, item);
  const int64_t size = std::max(kLeastKeysOfGroup, total / (8 * threads));
  work.groups.assign(1, 0);
  for (size_t i = 0; i < work.items.size(); ++i) {
    sum += cost(p, work.items[i]);
    if (sum >= size || i + 1 == work.items.size()) {
      work.groups.push_back(static_cast<int64_t>(i + 1));
      sum = 0;
    }
  }
}

template <class Pool>
void run_attention(Pool& pool, const AttentionProblem& p, const AttentionKernel& kernel) {
  static thread_local AttentionWork work;
  work.partials.resize(std::max<size_t>(work.partials.size(), list_items(p, work)));
  group_items(p, std::max<int64_t>(1, pool.num_threads()), work);
  const AttentionItem* items = work.items.data();
  const int64_t* groups = work.groups.data();
  float* partials = work.partials.data();
  parallel_for(pool, static_cast<int64_t>(work.groups.size()) - 1, [=](int64_t group) {
    char* scratch = aligned_scratch(attention_scratch_bytes(p));
    for (int64_t i = groups[group]; i < groups[group + 1]; ++i)
      kernel.attend(p, items[i], i + 1 < groups[group + 1] ? items + i + 1 : nullptr, partials,
                    scratch);
  });
  const int64_t* merges = work.merges.data();
  const int64_t num_merges = static_cast<int64_t>(work.merges.size()) / 2, per_task = 16;
  parallel_for(pool, (num_merges + per_task - 1) / per_task, [=](int64_t task) {
    const int64_t end = std::min(num_merges, (task + 1) * per_task);
    for (int64_t i = task * per_task; i < end; ++i)
      kernel.merge(p, items + merges[2 * i], merges[2 * i + 1], partials);
  });
}

}  // namespace paged
