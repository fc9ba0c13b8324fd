#include "cpu_level.h"

namespace paged {

int best_level() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kPortable;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool has_both =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  return has_avx512 && has_both ? kAvx512Bf16 : kAvx2;
#else
  return kPortable;
#endif
}

const LinearKernels* linear_kernels(int level) {
  if (level < kPortable || level > best_level()) return nullptr;
#if defined(__x86_64__)
  if (level == kAvx512Bf16) return &kLinearAvx512Bf16;
  if (level == kAvx2) return &kLinearAvx2;
#endif
  return &kLinearPortable;
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
