// Writes to the cache for any CPU.
#include "kv_write_kernel.h"

namespace paged {
void kv_write_portable(const KvWriteProblem& p, int64_t begin, int64_t end) {
  write_any(p, begin, end);
}
}  // namespace paged
