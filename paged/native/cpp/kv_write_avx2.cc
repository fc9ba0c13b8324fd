// Writes to the cache for AVX2.
#if defined(__x86_64__)
#include "kv_write_kernel.h"

namespace paged {
void kv_write_avx2(const KvWriteProblem& p, int64_t begin, int64_t end) {
  write_any(p, begin, end);
}
}  // namespace paged
#endif
