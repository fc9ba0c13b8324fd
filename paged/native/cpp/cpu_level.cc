#include "cpu_level.h"

namespace paged {

int best_level() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kPortable;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_avx512 && __builtin_cpu_supports("avx512bf16") ? kAvx512Bf16 : kAvx2;
#else
  return kPortable;
#endif
}

TileFunction tile_function(int level) {
  if (level < kPortable || level > best_level()) return nullptr;
#if defined(__x86_64__)
  if (level == kAvx512Bf16) return linear_tile_avx512_bf16;
  if (level == kAvx2) return linear_tile_avx2;
#endif
  return linear_tile_portable;
}

AttentionKernel attention_kernel(int level) {
  if (level < kPortable || level > best_level()) return {};
#if defined(__x86_64__)
  if (level == kAvx512Bf16) return attention_avx512_bf16();
  if (level == kAvx2) return attention_avx2();
#endif
  return attention_portable();
}

KvWriteFunction kv_write_function(int level) {
  if (level < kPortable || level > best_level()) return nullptr;
#if defined(__x86_64__)
  if (level == kAvx512Bf16) return kv_write_avx512_bf16;
  if (level == kAvx2) return kv_write_avx2;
#endif
  return kv_write_portable;
}

}  // namespace paged
