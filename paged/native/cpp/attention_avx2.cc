// Attention for AVX2 and FMA: sixteen registers of 32 bytes.
#if defined(__x86_64__)
namespace paged {
namespace {
constexpr int kVectorBytes = 32, kBlockColumns = 16, kBlockRows = 4;
}
}  // namespace paged

#include <immintrin.h>

#include "attention_vectors.h"

namespace paged {
namespace {

inline void transpose(Words (&square)[kLanes]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    const __m256 x = (__m256)square[i], y = (__m256)square[i + 1];
    a[i] = _mm256_unpacklo_ps(x, y);
    a[i + 1] = _mm256_unpackhi_ps(x, y);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
      b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    square[i] = (Words)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    square[i + 4] = (Words)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

inline float max_of(Floats x) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

}  // namespace
}  // namespace paged

#include "attention_kernel.h"

namespace paged {
AttentionKernel attention_avx2() { return {attend_any<Singles>, merge_any}; }
}  // namespace paged
#endif
