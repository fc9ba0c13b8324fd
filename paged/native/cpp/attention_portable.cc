// Attention for any CPU: vectors of 16 bytes, which SSE2 and NEON have.
namespace paged {
namespace {
constexpr int kVectorBytes = 16, kBlockColumns = 16, kBlockRows = 2;
}
}  // namespace paged

#include "attention_vectors.h"

namespace paged {
namespace {

inline void transpose(Words (&square)[kLanes]) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < i; ++j) {
      const uint32_t word = square[i][j];
      square[i][j] = square[j][i];
      square[j][i] = word;
    }
}

inline float max_of(Floats x) {
  const float low = x[0] > x[1] ? x[0] : x[1], high = x[2] > x[3] ? x[2] : x[3];
  return low > high ? low : high;
}

}  // namespace
}  // namespace paged

#include "attention_kernel.h"

namespace paged {
AttentionKernel attention_portable() { return {attend_any<Singles>, merge_any}; }
}  // namespace paged
