// New keys and values into their slots of the paged cache, and the rotation of queries and keys.
//
// This header reaches files that are compiled for CPUs the program may not run on, see linear.h.
#pragma once

#include "elements.h"

namespace paged {

struct KvWriteProblem {
  const void* q;        // [num_tokens, num_q_heads, head_dim], or null: only keys and values
  const void* k;        // [num_tokens, num_kv_heads, head_dim]
  const void* v;        // as k; not read where there is one plane
  const float* cosine;  // [num_tokens, half]; with `sine` rotates the first 2 * half features
  const float* sine;
  const int32_t* slots;    // [num_tokens]; those outside the cache write nothing
  const float* kv_scales;  // [num_planes, num_kv_heads], or null
  void* q_out;             // as q
  void* kv_cache;          // [num_blocks, num_planes, num_kv_heads, block_size, head_dim]
  int64_t num_tokens, num_q_heads, num_kv_heads, head_dim, half, num_blocks, block_size;
  int64_t num_planes;  // 2: keys, and values; 1: keys that are their own values
  ElementType type;     // of q, k and v: kFloat32 or kBfloat16
  ElementType kv_type;  // of the cache
};

// Writes tokens [begin, end).
using KvWriteFunction = void (*)(const KvWriteProblem&, int64_t begin, int64_t end);

void kv_write_portable(const KvWriteProblem&, int64_t begin, int64_t end);
#if defined(__x86_64__)
void kv_write_avx2(const KvWriteProblem&, int64_t begin, int64_t end);
void kv_write_avx512_bf16(const KvWriteProblem&, int64_t begin, int64_t end);
#endif

}  // namespace paged
