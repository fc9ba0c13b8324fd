// The tile for AVX512 with BF16: 32 registers of 64 bytes, and a dot product of pairs.
#if defined(__x86_64__)
namespace paged {
namespace {
constexpr int kVectorBytes = 64, kBlockColumns = 64, kBlockRows = 6;
}
}  // namespace paged

#include <immintrin.h>

#include "linear_kernel.h"

namespace paged {
namespace {

struct DotPairs {
  using Element = uint16_t;
  static constexpr int kPerWord = 2;
  static inline void add(Floats& sum, uint32_t x, Words w) {
    const __m512i pair = _mm512_set1_epi32(static_cast<int>(x));
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)w);
  }
};

}  // namespace

void linear_tile_avx512_bf16(const LinearProblem& p, int64_t tile) {
  multiply_typed_tile<DotPairs>(p, tile);
}
}  // namespace paged
#endif
