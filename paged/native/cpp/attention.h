// Ragged paged attention, cut into items: some query rows of one sequence, the query heads of one
// kv head, and a range of keys.
//
// The rows of an item meet its keys in chunks of kChunkKeys. Chunks and splits lie at fixed
// positions of a context, so that the result of a row depends neither on other sequences nor on
// the rows computed with it.
//
// This header reaches files that are compiled for CPUs the program may not run on, see linear.h.
#pragma once

#include <cstdint>

#include "elements.h"

namespace paged {

// Keys per step of the online softmax: K and V of 64 keys and 64 features of bfloat16 are 16 KiB,
// which leaves room for the next chunk in a first-level cache.
static constexpr int64_t kChunkKeys = 64;

// Query rows (tokens times query heads of a kv head) that share the keys of an item.
static constexpr int64_t kTileRows = 96;

struct AttentionProblem {
  const void* q;                   // [num_tokens, num_q_heads, head_dim]
  const void* kv_cache;            // [num_blocks, num_planes, num_kv_heads, block_size, head_dim]
  const int32_t* block_tables;     // [num_seqs, max_blocks]
  const int32_t* seq_lens;         // [num_seqs]
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const float* kv_scales;          // [num_planes, num_kv_heads], or null
  const float* sinks;              // [num_q_heads], or null
  void* out;                       // as q
  int64_t num_tokens, num_q_heads, num_blocks, num_kv_heads, block_size, head_dim;
  int64_t num_planes;  // 2: keys, and values; 1: keys that are their own values
  int64_t num_seqs, max_blocks;
  int64_t window;  // keys that a query sees at most
  float scale;
  float soft_cap;       // 0: none
  ElementType q_type;   // kFloat32 or kBfloat16; of out, too
  ElementType kv_type;
};

struct AttentionItem {
  int64_t seq, kv_head;
  int64_t first_row, num_rows;  // of q
  int64_t first_position;       // of first_row in its sequence
  int64_t first_key, end_key;   // which keys the item looks at, if its rows see them
  int64_t partial;              // where its partial result begins, or -1: it has all keys
};

// Index of the plane of the values.
static inline int64_t value_plane(const AttentionProblem& p) { return p.num_planes - 1; }

static inline int64_t heads_per_kv(const AttentionProblem& p) {
  return p.num_q_heads / p.num_kv_heads;
}

// Tokens whose query heads make a tile.
static inline int64_t tile_tokens(const AttentionProblem& p) {
  const int64_t tokens = kTileRows / heads_per_kv(p);
  return tokens > 1 ? tokens : 1;
}

static inline int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// A partial result holds for each row the weighted sum of values, the largest score and the sum of
// the weights.
static inline int64_t partial_row_floats(const AttentionProblem& p) { return p.head_dim + 2; }

// Bytes of working memory, aligned to 64, that an item needs.
static inline int64_t attention_scratch_bytes(const AttentionProblem& p) {
  const int64_t rows = tile_tokens(p) * heads_per_kv(p), width = round_up(p.head_dim, 16);
  // Queries, sums and a zero row; keys and values; two blocks of scores; softmax state.
  const int64_t words = (2 * rows + 1) * width + 2 * kChunkKeys * width + 16 * kChunkKeys;
  return 4 * (words + rows * 32) + 1024;
}

struct AttentionKernel {
  // Computes an item. `next` is the item that this thread takes next, or null.
  void (*attend)(const AttentionProblem&, const AttentionItem& item, const AttentionItem* next,
                 float* partials, char* scratch);
  // Joins the partial results of `count` items that have the same rows, in order of their keys.
  void (*merge)(const AttentionProblem&, const AttentionItem* items, int64_t count,
                const float* partials);
};

AttentionKernel attention_portable();
#if defined(__x86_64__)
AttentionKernel attention_avx2();
AttentionKernel attention_avx512_bf16();
#endif

}  // namespace paged
