// The arithmetic of `kv_write.h`, in plain loops that the compiler vectorises for each level.
#include "kv_write.h"

namespace paged {
namespace {

// Converts to another type. A division, as other implementations do: a product with the inverse
// rounds differently. Dividing by 1 changes nothing.
template <class Type, class Cache>
inline typename Cache::Stored convert(float value, float scale) {
  return Cache::narrow(Type::widen(Type::narrow(value)) / scale);
}

template <class Type, class Cache>
inline void store(const typename Type::Stored* __restrict from, int64_t count, float scale,
                  typename Cache::Stored* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = Cache::narrow(Type::widen(from[i]) / scale);
}

// Rotates feature i of a head against feature i + half, in float, and rounds to `Type` first.
template <class Type, class Cache>
inline void rotate_pairs(const KvWriteProblem& p, int64_t token,
                         const typename Type::Stored* __restrict from, float scale,
                         typename Cache::Stored* __restrict to) {
  const int64_t half = p.half;
  const float* __restrict cosine = p.cosine + token * half;
  const float* __restrict sine = p.sine + token * half;
  for (int64_t i = 0; i < half; ++i) {
    const float first = Type::widen(from[i]), second = Type::widen(from[i + half]);
    to[i] = convert<Type, Cache>(first * cosine[i] - second * sine[i], scale);
    to[i + half] = convert<Type, Cache>(second * cosine[i] + first * sine[i], scale);
  }
}

template <class Type, class Cache>
void write_tokens(const KvWriteProblem& p, int64_t begin, int64_t end) {
  using Stored = typename Type::Stored;
  const int64_t head_dim = p.head_dim, head_slots = p.block_size * head_dim;
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t head = 0; p.q && head < p.num_q_heads; ++head) {
      const int64_t at = (token * p.num_q_heads + head) * head_dim;
      const Stored* from = static_cast<const Stored*>(p.q) + at;
      Stored* to = static_cast<Stored*>(p.q_out) + at;
      rotate_pairs<Type, Type>(p, token, from, 1, to);
      store<Type, Type>(from + 2 * p.half, head_dim - 2 * p.half, 1, to + 2 * p.half);
    }
    const int64_t slot = p.slots[token];
    if (slot < 0 || slot >= p.num_blocks * p.block_size) continue;
    auto* block = static_cast<typename Cache::Stored*>(p.kv_cache) +
                  slot / p.block_size * 2 * p.num_kv_heads * head_slots +
                  slot % p.block_size * head_dim;
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      const int64_t at = (token * p.num_kv_heads + head) * head_dim;
      const Stored* key = static_cast<const Stored*>(p.k) + at;
      const Stored* value = static_cast<const Stored*>(p.v) + at;
      const float* scales = p.kv_scales ? p.kv_scales + head : nullptr;
      const float key_scale = scales ? scales[0] : 1;
      const float value_scale = scales ? scales[p.num_kv_heads] : 1;
      auto* key_slot = block + head * head_slots;
      rotate_pairs<Type, Cache>(p, token, key, key_scale, key_slot);
      store<Type, Cache>(key + 2 * p.half, head_dim - 2 * p.half, key_scale, key_slot + 2 * p.half);
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
