// The arithmetic of `kv_write.h`, in plain loops that the compiler vectorises for each level.
#include "kv_write.h"

namespace paged {
namespace {

// Converts a row to the cache's type. A division, as other implementations do: a product with the
// inverse rounds differently. Not inlined, which would compile it anew for every use.
template <class Type, class Cache>
__attribute__((noinline)) void store(const typename Type::Stored* __restrict from, int64_t count,
                                     float scale, typename Cache::Stored* __restrict to) {
  if (scale == 1)
    for (int64_t i = 0; i < count; ++i) to[i] = Cache::narrow(Type::widen(from[i]));
  else
    for (int64_t i = 0; i < count; ++i) to[i] = Cache::narrow(Type::widen(from[i]) / scale);
}

// Pairs of features that are rotated in one go.
constexpr int64_t kPairs = 64;

// Rotates pairs of features in float and rounds them to their type.
template <class Type>
__attribute__((noinline)) void rotate(const typename Type::Stored* __restrict first,
                                      const typename Type::Stored* __restrict second,
                                      const float* __restrict cosine, const float* __restrict sine,
                                      int64_t count, typename Type::Stored* __restrict first_out,
                                      typename Type::Stored* __restrict second_out) {
  for (int64_t i = 0; i < count; ++i) {
    const float a = Type::widen(first[i]), b = Type::widen(second[i]);
    first_out[i] = Type::narrow(a * cosine[i] - b * sine[i]);
    second_out[i] = Type::narrow(b * cosine[i] + a * sine[i]);
  }
}

// Rotates feature i of a head against feature i + half, and stores the head in the cache's type.
template <class Type, class Cache>
inline void rotate_and_store(const KvWriteProblem& p, int64_t token,
                             const typename Type::Stored* from, float scale,
                             typename Cache::Stored* to) {
  const float *cosine = p.cosine + token * p.half, *sine = p.sine + token * p.half;
  typename Type::Stored first[kPairs], second[kPairs];
  for (int64_t i = 0; i < p.half; i += kPairs) {
    const int64_t count = p.half - i < kPairs ? p.half - i : kPairs;
    rotate<Type>(from + i, from + p.half + i, cosine + i, sine + i, count, first, second);
    store<Type, Cache>(first, count, scale, to + i);
    store<Type, Cache>(second, count, scale, to + p.half + i);
  }
  store<Type, Cache>(from + 2 * p.half, p.head_dim - 2 * p.half, scale, to + 2 * p.half);
}

template <class Type, class Cache>
void write_tokens(const KvWriteProblem& p, int64_t begin, int64_t end) {
  using Stored = typename Type::Stored;
  const int64_t head_dim = p.head_dim, head_slots = p.block_size * head_dim;
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t head = 0; p.q && head < p.num_q_heads; ++head) {
      const int64_t at = (token * p.num_q_heads + head) * head_dim;
      rotate_and_store<Type, Type>(p, token, static_cast<const Stored*>(p.q) + at, 1,
                                   static_cast<Stored*>(p.q_out) + at);
    }
    const int64_t slot = p.slots[token];
    if (slot < 0 || slot >= p.num_blocks * p.block_size) continue;
    auto* block = static_cast<typename Cache::Stored*>(p.kv_cache) +
                  slot / p.block_size * p.num_planes * p.num_kv_heads * head_slots +
                  slot % p.block_size * head_dim;
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      const int64_t at = (token * p.num_kv_heads + head) * head_dim;
      const Stored* key = static_cast<const Stored*>(p.k) + at;
      const Stored* value = static_cast<const Stored*>(p.v) + at;
      const float* scales = p.kv_scales ? p.kv_scales + head : nullptr;
      const float key_scale = scales ? scales[0] : 1;
      rotate_and_store<Type, Cache>(p, token, key, key_scale, block + head * head_slots);
      if (p.num_planes == 1) continue;
      const float value_scale = scales ? scales[p.num_kv_heads] : 1;
      store<Type, Cache>(value, head_dim, value_scale,
                         block + (p.num_kv_heads + head) * head_slots);
    }
  }
}

template <class Type>
void write_any_cache(const KvWriteProblem& p, int64_t begin, int64_t end) {
  switch (p.kv_type) {
    case ElementType::kFloat32: return write_tokens<Type, Float32>(p, begin, end);
    case ElementType::kBfloat16: return write_tokens<Type, Bfloat16>(p, begin, end);
    case ElementType::kFloat8E4M3: return write_tokens<Type, Float8E4M3>(p, begin, end);
    case ElementType::kFloat8E5M2: return write_tokens<Type, Float8E5M2>(p, begin, end);
  }
}

inline void write_any(const KvWriteProblem& p, int64_t begin, int64_t end) {
  if (p.type == ElementType::kFloat32) return write_any_cache<Float32>(p, begin, end);
  write_any_cache<Bfloat16>(p, begin, end);
}

}  // namespace
}  // namespace paged
