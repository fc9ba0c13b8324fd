// The arithmetic of one attention item: an online softmax over chunks of its keys.
//
// Keys and values of a chunk are packed into working memory as the right-hand sides of two
// products, [features][keys] and [keys][features]. Where words hold two bfloat16, features of a
// key and keys of a feature are paired. Whatever the item must not see is read as zeros. For few
// query rows packing values would cost more than the product, which then pairs them in registers.
//
// Before the include: attention_vectors.h, and in namespace `paged`'s unnamed namespace
//   transpose(Words (&)[kLanes])   of a square of words
//   max_of(Floats)                 largest lane
#include "attention_vectors.h"

namespace paged {
namespace {

// Scores that count as unseen; not -inf, because -inf - -inf is NaN.
constexpr float kMasked = -0.7f * FLT_MAX;

// Where the keys and values of a chunk lie, by key.
struct Chunk {
  int64_t first;  // position, a multiple of kChunkKeys
  int64_t size;   // keys up to the end of the item
  const char* keys[kChunkKeys];
  const char* values[kChunkKeys];
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

void locate(const AttentionProblem& p, const AttentionItem& item, int64_t first, const char* zeros,
            Chunk& chunk) {
  const int64_t row_bytes = p.head_dim * element_bytes(p.kv_type);
  const int64_t head_bytes = p.block_size * row_bytes, kv_bytes = p.num_kv_heads * head_bytes;
  const char* cache = static_cast<const char*>(p.kv_cache) + item.kv_head * head_bytes;
  const int32_t* table = p.block_tables + item.seq * p.max_blocks;
  chunk.first = first;
  chunk.size = smaller(kChunkKeys, item.end_key - first);
  int64_t key = 0;
  for (; key < item.first_key - first; ++key) chunk.keys[key] = chunk.values[key] = zeros;
  while (key < chunk.size) {
    const int64_t block = (first + key) / p.block_size, offset = (first + key) % p.block_size;
    // A block that does not exist must not end the process.
    const int64_t id = larger_of(0, smaller(table[block], p.num_blocks - 1));
    const char* row = cache + id * p.num_planes * kv_bytes + offset * row_bytes;
    const int64_t end = smaller(chunk.size, key + p.block_size - offset);
    for (; key < end; ++key, row += row_bytes) {
      chunk.keys[key] = row;
      chunk.values[key] = row + value_plane(p) * kv_bytes;
    }
  }
  for (; key < kChunkKeys; ++key) chunk.keys[key] = chunk.values[key] = zeros;
}

// Asks for a line of each block of the keys of a chunk: blocks lie on pages of their own,
// whose addresses are then translated by the time that all of it is prefetched. Inlined by force:
// GCC drops calls of functions that only prefetch.
__attribute__((always_inline)) inline void touch_blocks(const AttentionProblem& p,
                                                        const AttentionItem& item, int64_t first) {
  const int64_t head_bytes = p.block_size * p.head_dim * element_bytes(p.kv_type);
  const int32_t* table = p.block_tables + item.seq * p.max_blocks;
  const int64_t end = smaller(first + kChunkKeys, item.end_key);
  for (int64_t key = first; key < end; key += p.block_size) {
    const int64_t id = larger_of(0, smaller(table[key / p.block_size], p.num_blocks - 1));
    const char* block = static_cast<const char*>(p.kv_cache) +
                        (id * p.num_planes * p.num_kv_heads + item.kv_head) * head_bytes;
    __builtin_prefetch(block, 0, 2);
    __builtin_prefetch(block + value_plane(p) * p.num_kv_heads * head_bytes, 0, 2);
  }
}

// The next chunk is prefetched in quarters, the first and second halves of its keys and values, while
// this one is packed and multiplied: in one go there would be more misses than a core can have
// open, and none for the rest of the time (Zen 4: 6.6 GB/s of random blocks on a core, spread 10).
inline Prefetch keys_of(const Chunk* next, int64_t begin, int64_t end) {
  return {next ? next->keys : nullptr, begin, end};
}

inline Prefetch values_of(const Chunk* next, int64_t begin, int64_t end) {
  return {next ? next->values : nullptr, begin, end};
}

// Packs keys as [ceil(head_dim / kPerWord)][kChunkKeys] words.
template <class Product, class Cache>
void pack_keys(const Chunk& chunk, Prefetch fetch, int64_t head_dim, uint32_t* out) {
  constexpr int64_t kGroup = kLanes * Product::kPerWord;
  for (int64_t key = 0; key < chunk.size; key += kLanes) {
    const char* const* rows = chunk.keys + key;
    fetch.rows(key, kLanes);
    if (head_dim < kGroup || head_dim % Product::kPerWord) {
      for (int64_t d = 0, word = 0; d < head_dim; d += Product::kPerWord, ++word)
        for (int i = 0; i < kLanes; ++i)
          out[word * kChunkKeys + key + i] =
              Product::template key_word<Cache>(rows[i], d, head_dim);
      continue;
    }
    // The last group may overlap the one before it.
    for (int64_t d = 0;; d = smaller(d + kGroup, head_dim - kGroup)) {
      Words square[kLanes];
      Product::template load_square<Cache>(rows, d, square);
      uint32_t* to = out + d / Product::kPerWord * kChunkKeys + key;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(square[i], to + i * kChunkKeys);
      if (d + kGroup == head_dim) break;
    }
  }
}

// Packs values as [ceil(keys / kPerWord)][width] words.
template <class Product, class Cache>
void pack_values(const Chunk& chunk, Prefetch fetch, int64_t head_dim, int64_t width,
                 uint32_t* out) {
  constexpr int64_t kGroup = kLanes * Product::kPerWord;
  for (int64_t key = 0; key < chunk.size; key += Product::kPerWord, out += width) {
    const char* const* rows = chunk.values + key;
    fetch.rows(key, Product::kPerWord);
    if (head_dim < kGroup) {
      for (int64_t d = 0; d < head_dim; ++d)
        out[d] = Product::template value_word<Cache>(rows, d);
      continue;
    }
    for (int64_t d = 0;; d = smaller(d + kGroup, head_dim - kGroup)) {
      Product::template store_values<Cache>(rows, d, out + d);
      if (d + kGroup == head_dim) break;
    }
  }
}

// Lays the queries of an item out as rows of words.
template <class Product, class Query>
void pack_queries(const AttentionProblem& p, const AttentionItem& item, int64_t width,
                  uint32_t* out) {
  const int64_t heads = heads_per_kv(p), element = sizeof(typename Query::Stored);
  for (int64_t row = 0; row < item.num_rows; ++row)
    for (int64_t head = 0; head < heads; ++head, out += width) {
      const char* q = static_cast<const char*>(p.q) +
                      ((item.first_row + row) * p.num_q_heads + item.kv_head * heads + head) *
                          p.head_dim * element;
      constexpr int64_t kGroup = kLanes * Product::kPerWord;
      if (p.head_dim % kGroup == 0) {
        for (int64_t d = 0; d < p.head_dim; d += kGroup)
          store(Product::template load_words<Query>(q, d), out + d / Product::kPerWord);
        continue;
      }
      for (int64_t d = 0, word = 0; d < p.head_dim; d += Product::kPerWord, ++word)
        out[word] = Product::template key_word<Query>(q, d, p.head_dim);
    }
}

// The rows of an item and how far their softmax is.
struct Rows {
  int64_t heads, width;  // rows of a token; floats or words between rows
  uint32_t* queries;     // [rows][width]
  float* sums;           // [rows][width] weighted sums of values
  float* totals;         // [rows][kLanes] sums of weights, by lane
  float* top;            // [rows] largest score
};

// Turns the scores of a row for a chunk into weights; key positions [low, high) are seen.
template <class Product>
inline void weigh(const AttentionProblem& p, float factor, const float* scores, int64_t low,
                  int64_t high, const Rows& rows, int64_t row, uint32_t* weights) {
  constexpr int kVectors = kChunkKeys / kLanes;
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const Ints first = Ints{} + static_cast<int32_t>(low), end = Ints{} + static_cast<int32_t>(high);
  const bool is_whole = low == 0 && high == kChunkKeys;
  Floats x[kVectors], top = broadcast(kMasked);
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    x[i] = load<Floats>(scores + i * kLanes) * factor;
    if (p.soft_cap != 0) x[i] = p.soft_cap * tanh_of(x[i] / p.soft_cap);
    if (!is_whole) {
      const Ints key = lane + i * kLanes;
      x[i] = ((key >= first) & (key < end)) ? x[i] : broadcast(kMasked);
    }
    top = larger(top, x[i]);
  }
  const float before = rows.top[row], chunk_top = max_of(top);
  Floats total = load<Floats>(rows.totals + row * kLanes);
  if (!(chunk_top <= before)) {
    const Floats decay = exp_of(broadcast(before - chunk_top));
    rows.top[row] = chunk_top;
    total *= decay;
    float* sums = rows.sums + row * rows.width;
    for (int64_t d = 0; d < rows.width; d += kLanes) store(load<Floats>(sums + d) * decay, sums + d);
  }
  const Floats shift = broadcast(rows.top[row]);
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    Floats weight = exp_of(x[i] - shift);
    if (!is_whole) {
      const Ints key = lane + i * kLanes;
      weight = ((key >= first) & (key < end)) ? weight : broadcast(0);
    }
    total += weight;
    Product::store_weights(weight, i * kLanes, weights);
  }
  store(total, rows.totals + row * kLanes);
}

// Lets all rows of an item that see the chunk attend to it. `values`: packed, or null to use them
// where they lie.
template <class Product, class Cache>
void attend_chunk(const AttentionProblem& p, const AttentionItem& item, const Chunk& chunk,
                  const Chunk* next, const uint32_t* keys, const uint32_t* values,
                  const Rows& rows, float* scores, uint32_t* weights) {
  const float key_scale = p.kv_scales ? p.kv_scales[item.kv_head] : 1.0f;
  const int64_t words = (p.head_dim + Product::kPerWord - 1) / Product::kPerWord;
  // Tokens at positions before the chunk do not see it yet, those far behind no more.
  const int64_t begin = larger_of(0, chunk.first - item.first_position);
  const int64_t end =
      smaller(item.num_rows, chunk.first + chunk.size + p.window - 1 - item.first_position);
  const int64_t end_row = end * rows.heads;
  const int64_t row_bytes = p.head_dim * element_bytes(p.kv_type);
  for (int64_t row = begin * rows.heads; row < end_row; row += kBlockRows) {
    const int64_t size = smaller(kBlockRows, end_row - row);
    const Chunk* to_fetch = row == begin * rows.heads ? next : nullptr;
    multiply<Product>(keys_of(to_fetch, row_bytes / 2, row_bytes), size, kChunkKeys,
                      rows.queries + row * rows.width, rows.width, keys, kChunkKeys, words, false,
                      scores, kChunkKeys);
    int64_t seen = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t position = item.first_position + (row + i) / rows.heads;
      const int64_t low = larger_of(0, position - p.window + 1 - chunk.first);
      const int64_t high = smaller(chunk.size, position + 1 - chunk.first);
      weigh<Product>(p, p.scale * key_scale, scores + i * kChunkKeys, low, high, rows, row + i,
                     weights + i * kChunkKeys);
      seen = larger_of(seen, high);
    }
    const int64_t steps = (seen + Product::kPerWord - 1) / Product::kPerWord;
    float* sums = rows.sums + row * rows.width;
    if (values)
      multiply<Product>(values_of(to_fetch, row_bytes / 2, row_bytes), size, rows.width, weights,
                        kChunkKeys, values, rows.width, steps, true, sums, rows.width);
    else
      multiply_values<Product, Cache>(values_of(to_fetch, 0, row_bytes), size, p.head_dim, weights,
                                      chunk.values, steps, sums, rows.width);
  }
}

// Divides by the sum of the weights and stores a row of the result.
template <class Query>
void store_row(const AttentionProblem& p, int64_t row, int64_t head, const float* sums, float top,
               float total) {
  float factor = 1;
  if (p.sinks) {
    // One more key with this score and the value zero.
    const float sink = p.sinks[head], most = top > sink ? top : sink;
    factor = exp_of(broadcast(top - most))[0];
    total = total * factor + exp_of(broadcast(sink - most))[0];
  }
  factor /= total;
  if (p.kv_scales)
    factor *= p.kv_scales[value_plane(p) * p.num_kv_heads + head / heads_per_kv(p)];
  auto* out = static_cast<typename Query::Stored*>(p.out) + (row * p.num_q_heads + head) * p.head_dim;
  for (int64_t d = 0; d < p.head_dim; ++d) out[d] = Query::narrow(sums[d] * factor);
}

template <class Query>
void finish(const AttentionProblem& p, const AttentionItem& item, const Rows& rows,
            float* partials) {
  float* partial = item.partial < 0 ? nullptr : partials + item.partial;
  for (int64_t row = 0; row < item.num_rows * rows.heads; ++row) {
    const float* sums = rows.sums + row * rows.width;
    float total = 0;
    for (int i = 0; i < kLanes; ++i) total += rows.totals[row * kLanes + i];
    if (!partial) {
      store_row<Query>(p, item.first_row + row / rows.heads,
                       item.kv_head * rows.heads + row % rows.heads, sums, rows.top[row], total);
      continue;
    }
    for (int64_t d = 0; d < p.head_dim; ++d) partial[d] = sums[d];
    partial[p.head_dim] = rows.top[row];
    partial[p.head_dim + 1] = total;
    partial += partial_row_floats(p);
  }
}

// Gives out aligned pieces of the working memory.
template <class T>
inline T* take(char*& memory, int64_t count) {
  T* piece = reinterpret_cast<T*>(memory);
  memory += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  return piece;
}

template <class Product, class Cache, class Query>
void attend(const AttentionProblem& p, const AttentionItem& item, const AttentionItem* next,
            float* partials, char* memory) {
  const int64_t width = round_up(p.head_dim, 16);
  const int64_t half_row = p.head_dim * element_bytes(p.kv_type) / 2;
  Rows rows{heads_per_kv(p), width, nullptr, nullptr, nullptr, nullptr};
  const int64_t num_rows = item.num_rows * rows.heads;
  char* zeros = take<char>(memory, 4 * width);
  rows.queries = take<uint32_t>(memory, num_rows * width);
  uint32_t* keys = take<uint32_t>(memory, kChunkKeys * width);
  // Packing values is worth it for the rows of several blocks.
  const bool packs_values =
      num_rows > 2 * kBlockRows || p.head_dim % (kLanes * Product::kPerWord) != 0;
  uint32_t* values = packs_values ? take<uint32_t>(memory, kChunkKeys * width) : nullptr;
  float* scores = take<float>(memory, kBlockRows * kChunkKeys);
  uint32_t* weights = take<uint32_t>(memory, kBlockRows * kChunkKeys);
  rows.sums = take<float>(memory, num_rows * width);
  rows.totals = take<float>(memory, num_rows * kLanes);
  rows.top = take<float>(memory, num_rows);
  std::memset(zeros, 0, 4 * width);
  std::memset(rows.sums, 0, 4 * num_rows * width);
  std::memset(rows.totals, 0, 4 * num_rows * kLanes);
  for (int64_t row = 0; row < num_rows; ++row) rows.top[row] = kMasked;
  pack_queries<Product, Query>(p, item, width, rows.queries);

  Chunk chunks[2];
  const int64_t first = item.first_key / kChunkKeys * kChunkKeys;
  locate(p, item, first, zeros, chunks[0]);
  int current = 0;
  for (int64_t at = first; at < item.end_key; at += kChunkKeys, current ^= 1) {
    const Chunk& chunk = chunks[current];
    Chunk* following = &chunks[current ^ 1];
    if (at + kChunkKeys < item.end_key)
      locate(p, item, at + kChunkKeys, zeros, *following);
    else if (next)
      locate(p, *next, next->first_key / kChunkKeys * kChunkKeys, zeros, *following);
    else
      following = nullptr;
    touch_blocks(p, item, at + 2 * kChunkKeys);
    pack_keys<Product, Cache>(chunk, keys_of(following, 0, half_row), p.head_dim, keys);
    if (packs_values)
      pack_values<Product, Cache>(chunk, values_of(following, 0, half_row), p.head_dim, width,
                                  values);
    attend_chunk<Product, Cache>(p, item, chunk, following, keys, values, rows, scores, weights);
  }
  finish<Query>(p, item, rows, partials);
}

template <class Query>
void merge(const AttentionProblem& p, const AttentionItem* items, int64_t count,
           const float* partials) {
  const int64_t heads = heads_per_kv(p), stride = partial_row_floats(p);
  const AttentionItem& item = items[0];
  for (int64_t row = 0; row < item.num_rows * heads; ++row) {
    float* sums = const_cast<float*>(partials) + item.partial + row * stride;
    float top = sums[p.head_dim], total = sums[p.head_dim + 1];
    for (int64_t i = 1; i < count; ++i) {
      const float* other = partials + items[i].partial + row * stride;
      const float other_top = other[p.head_dim], most = top > other_top ? top : other_top;
      const float decay = exp_of(broadcast(top - most))[0];
      const float weight = exp_of(broadcast(other_top - most))[0];
      for (int64_t d = 0; d < p.head_dim; ++d) sums[d] = sums[d] * decay + other[d] * weight;
      total = total * decay + other[p.head_dim + 1] * weight;
      top = most;
    }
    store_row<Query>(p, item.first_row + row / heads, item.kv_head * heads + row % heads, sums, top,
                     total);
  }
}

template <class Product, class Query>
void attend_any_cache(const AttentionProblem& p, const AttentionItem& item,
                      const AttentionItem* next, float* partials, char* memory) {
  switch (p.kv_type) {
    case ElementType::kFloat32:
      return attend<Singles, Float32, Query>(p, item, next, partials, memory);
    case ElementType::kBfloat16:
      return attend<Product, Bfloat16, Query>(p, item, next, partials, memory);
    case ElementType::kFloat8E4M3:
      return attend<Product, Float8E4M3, Query>(p, item, next, partials, memory);
    case ElementType::kFloat8E5M2:
      return attend<Product, Float8E5M2, Query>(p, item, next, partials, memory);
  }
}

// `Product` multiplies bfloat16 queries with anything narrower than float32.
template <class Product>
void attend_any(const AttentionProblem& p, const AttentionItem& item, const AttentionItem* next,
                float* partials, char* memory) {
  if (p.q_type == ElementType::kFloat32)
    attend_any_cache<Singles, Float32>(p, item, next, partials, memory);
  else
    attend_any_cache<Product, Bfloat16>(p, item, next, partials, memory);
}

inline void merge_any(const AttentionProblem& p, const AttentionItem* items, int64_t count,
                      const float* partials) {
  if (p.q_type == ElementType::kFloat32)
    merge<Float32>(p, items, count, partials);
  else
    merge<Bfloat16>(p, items, count, partials);
}

}  // namespace
}  // namespace paged
