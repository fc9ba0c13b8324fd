// The tile for any CPU: vectors of 16 bytes, which SSE2 and NEON have.
namespace paged {
namespace {
constexpr int kVectorBytes = 16, kBlockColumns = 16, kBlockRows = 2;
}
}  // namespace paged

#include "linear_kernel.h"

namespace paged {
void linear_tile_portable(const LinearProblem& p, int64_t tile) {
  multiply_typed_tile<WidenedPairs>(p, tile);
}
}  // namespace paged
