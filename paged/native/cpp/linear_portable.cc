// The kernels for any CPU: vectors of 16 bytes, which SSE2 and NEON have.
namespace paged {
namespace {
constexpr int kVectorBytes = 16, kBlockColumns = 16, kBlockRows = 2;
}  // namespace
}  // namespace paged

#include "linear_kernel.h"
#include "rms_norm.h"

namespace paged {
const LinearKernels kLinearPortable = {
    compute_typed_tile<WidenedPairs, WidenedQuads<uint16_t>, WidenedFloat8s<uint16_t>,
                       WidenedNibbles<uint16_t>>,
    normalize, kGroupRows};
}  // namespace paged
