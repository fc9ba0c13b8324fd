// Attention for AVX512 with BF16: 32 registers of 64 bytes, and a dot product of pairs.
#if defined(__x86_64__)
namespace paged {
namespace {
constexpr int kVectorBytes = 64, kBlockColumns = 64, kBlockRows = 6;
}
}  // namespace paged

#if !defined(__clang__)
// GCC 12 takes the placeholders in its own <immintrin.h> for variables that were forgotten.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "attention_vectors.h"

namespace paged {
namespace {

inline void transpose(Words (&square)[kLanes]) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)square[i], (__m512i)square[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)square[i], (__m512i)square[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    square[i] = (Words)_mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    square[i + 8] = (Words)_mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
  }
}

inline float max_of(Floats x) { return _mm512_reduce_max_ps((__m512)x); }

// Words of two bfloat16: neighbours along the features of a key, or along the keys of a feature.
struct DotPairs {
  static constexpr int kPerWord = 2;

  static inline void add(Floats& sum, uint32_t x, Words w) {
    const __m512i pair = _mm512_set1_epi32(static_cast<int>(x));
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)w);
  }

  // 32 elements as bfloat16. `Cache` is an 8-bit float unless it is Bfloat16.
  template <class Cache>
  static inline Words load_words(const char* row, int64_t element) {
    const __m512i bytes = _mm512_cvtepu8_epi16(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + element)));
    const uint16_t* table = Cache::kTable.bits;
    // The low half of the table, by magnitude; an index takes six bits, the seventh selects.
    const __m512i low = _mm512_permutex2var_epi16(_mm512_loadu_si512(table), bytes,
                                                  _mm512_loadu_si512(table + 32));
    const __m512i high = _mm512_permutex2var_epi16(_mm512_loadu_si512(table + 64), bytes,
                                                   _mm512_loadu_si512(table + 96));
    const __mmask32 is_high = _mm512_test_epi16_mask(bytes, _mm512_set1_epi16(0x40));
    const __m512i sign =
        _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
    return (Words)_mm512_or_si512(_mm512_mask_blend_epi16(is_high, low, high), sign);
  }

  template <class Cache>
  static inline uint16_t half(const char* row, int64_t element) {
    return Bfloat16::narrow(element_at<Cache>(row, element));
  }

  template <class Cache>
  static inline uint32_t key_word(const char* row, int64_t element, int64_t head_dim) {
    const bool has_second = element + 1 < head_dim;
    return half<Cache>(row, element) |
           (has_second ? uint32_t{half<Cache>(row, element + 1)} << 16 : 0);
  }

  template <class Cache>
  static inline uint32_t value_word(const char* const* rows, int64_t element) {
    return half<Cache>(rows[0], element) | uint32_t{half<Cache>(rows[1], element)} << 16;
  }

  template <class Cache>
  static inline void store_values(const char* const* rows, int64_t element, uint32_t* to) {
    const __m512i a = (__m512i)load_words<Cache>(rows[0], element);
    const __m512i b = (__m512i)load_words<Cache>(rows[1], element);
    // a0 b0 a1 b1 ...: interleaved within each 16 bytes, whose order is then put right.
    const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi64(low, first, high));
    _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi64(low, second, high));
  }

  static inline void store_weights(Floats weights, int64_t first, uint32_t* to) {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)weights);
    std::memcpy(reinterpret_cast<char*>(to) + 2 * first, &narrow, sizeof narrow);
  }
};

template <>
inline Words DotPairs::load_words<Bfloat16>(const char* row, int64_t element) {
  return load<Words>(row + 2 * element);
}

}  // namespace
}  // namespace paged

#include "attention_kernel.h"

namespace paged {
AttentionKernel attention_avx512_bf16() { return {attend_any<DotPairs>, merge_any}; }
}  // namespace paged
#endif
