// The kernels for AVX2 and FMA: sixteen registers of 32 bytes.
#if defined(__x86_64__)
namespace paged {
namespace {
constexpr int kVectorBytes = 32, kBlockColumns = 16, kBlockRows = 4;
}  // namespace
}  // namespace paged

#include "linear_kernel.h"
#include "rms_norm.h"

namespace paged {
const LinearKernels kLinearAvx2 = {
    compute_typed_tile<WidenedPairs, WidenedQuads<uint16_t>, WidenedFloat8s<uint16_t>,
                       WidenedNibbles<uint16_t>>,
    normalize, kGroupRows};
}  // namespace paged
#endif
