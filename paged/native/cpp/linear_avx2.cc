// The tile for AVX2 and FMA: sixteen registers of 32 bytes.
#if defined(__x86_64__)
namespace paged {
namespace {
constexpr int kVectorBytes = 32, kBlockColumns = 16, kBlockRows = 4;
}
}  // namespace paged

#include "linear_kernel.h"

namespace paged {
void linear_tile_avx2(const LinearProblem& p, int64_t tile) {
  multiply_typed_tile<WidenedPairs>(p, tile);
}
}  // namespace paged
#endif
