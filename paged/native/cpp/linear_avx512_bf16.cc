// The kernels for AVX512 with BF16 and VBMI: 32 registers of 64 bytes, a dot product of pairs, and
// a permutation of bytes, which serves as a table.
#if defined(__x86_64__)
namespace paged {
namespace {
constexpr int kVectorBytes = 64, kBlockColumns = 64, kBlockRows = 6;
}  // namespace
}  // namespace paged

#include <immintrin.h>

#include "linear_kernel.h"
#include "rms_norm.h"

namespace paged {
namespace {

inline void add_pairs(Floats& sum, uint32_t x, Words w) {
  const __m512i pair = _mm512_set1_epi32(static_cast<int>(x));
  sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)w);
}

inline uint32_t pair_at(const uint16_t* x) {
  uint32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return pair;
}

struct DotPairs {
  using Element = uint16_t;
  static constexpr int kPerWord = 2, kSets = 1;
  static inline Words expand(Words words, int) { return words; }
  static inline uint32_t factor(const uint16_t* x, int) { return pair_at(x); }
  static inline void add(Floats& sum, uint32_t x, Words w) { add_pairs(sum, x, w); }
};

// The two bytes of the bfloat16 of each integer up to 127.
struct Bfloat16Bytes {
  alignas(64) uint8_t low[128], high[128];
};

constexpr Bfloat16Bytes make_bfloat16_bytes() {
  Bfloat16Bytes bytes{};
  for (int value = 1; value < 128; ++value) {
    int exponent = 0;
    while (value >> (exponent + 1)) ++exponent;
    const int mantissa = (value << (7 - exponent)) & 0x7f, bits = (127 + exponent) << 7 | mantissa;
    bytes.low[value] = static_cast<uint8_t>(bits & 0xff);
    bytes.high[value] = static_cast<uint8_t>(bits >> 8);
  }
  return bytes;
}

constexpr Bfloat16Bytes kBfloat16Bytes = make_bfloat16_bytes();

// The two bytes of the bfloat16 of each e4m3 that is not negative.
constexpr Bfloat16Bytes make_float8_bytes() {
  Bfloat16Bytes bytes{};
  for (int code = 1; code < 128; ++code) {
    int exponent = code >> 3, mantissa = code & 7;
    if (exponent == 0) {  // subnormal: shift until there is a leading one
      exponent = 1;
      while (!(mantissa & 8)) mantissa <<= 1, --exponent;
      mantissa &= 7;
    }
    const int bits = code == 127 ? 0x7fc0 : (exponent + 120) << 7 | mantissa << 4;
    bytes.low[code] = static_cast<uint8_t>(bits & 0xff);
    bytes.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return bytes;
}

constexpr Bfloat16Bytes kFloat8Bytes = make_float8_bytes();

// The entries for the lower seven bits of each byte.
inline __m512i look_up(const uint8_t* table, __m512i index) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
}

// In each group of four columns of quads: first elements 0 and 1 of all, then 2 and 3.
inline __m512i in_pairs(Words words) {
  const __m512i order = _mm512_setr4_epi32(0x05040100, 0x0d0c0908, 0x07060302, 0x0f0e0b0a);
  return _mm512_shuffle_epi8((__m512i)words, order);
}

// Four int8, each looked up as a bfloat16 of equal value.
struct DotQuads {
  using Element = uint16_t;
  static constexpr int kPerWord = 4, kSets = 2;
  static inline Words expand(Words words, int set) {
    const __m512i quads = in_pairs(words);
    const __m512i size = _mm512_abs_epi8(quads);
    const __m512i low = look_up(kBfloat16Bytes.low, size);
    const __m512i sign = _mm512_and_si512(quads, _mm512_set1_epi8(static_cast<char>(0x80)));
    // -128 has no positive counterpart: its size is the only one with the highest bit.
    const __m512i high = _mm512_mask_mov_epi8(
        _mm512_or_si512(look_up(kBfloat16Bytes.high, size), sign), _mm512_movepi8_mask(size),
        _mm512_set1_epi8(static_cast<char>(0xc3)));
    return (Words)(set == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high));
  }
  static inline uint32_t factor(const uint16_t* x, int set) { return pair_at(x + 2 * set); }
  static inline void add(Floats& sum, uint32_t x, Words w) { add_pairs(sum, x, w); }

};

// Four e4m3, each looked up as a bfloat16 of equal value.
struct DotFloat8s {
  using Element = uint16_t;
  static constexpr int kPerWord = 4, kSets = 2;
  static inline Words expand(Words words, int set) {
    const __m512i quads = in_pairs(words);
    const __m512i low = look_up(kFloat8Bytes.low, quads);
    const __m512i sign = _mm512_and_si512(quads, _mm512_set1_epi8(static_cast<char>(0x80)));
    const __m512i high = _mm512_or_si512(look_up(kFloat8Bytes.high, quads), sign);
    return (Words)(set == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high));
  }
  static inline uint32_t factor(const uint16_t* x, int set) { return pair_at(x + 2 * set); }
  static inline void add(Floats& sum, uint32_t x, Words w) { add_pairs(sum, x, w); }
};

// Eight codes of 4 bits: the last bits of the bfloat16 of 128, so that a pair takes two instructions.
struct DotNibbles {
  using Element = uint16_t;
  static constexpr int kPerWord = 8, kSets = 4;
  static constexpr float kOffset = 128;
  static inline Words expand(Words words, int set) {
    return (words >> (4 * set) & 0x000f000fu) | 0x43004300u;
  }
  static inline uint32_t factor(const uint16_t* x, int set) { return pair_at(x + 2 * set); }
  static inline void add(Floats& sum, uint32_t x, Words w) { add_pairs(sum, x, w); }
};

}  // namespace

const LinearKernels kLinearAvx512Bf16 = {
    compute_typed_tile<DotPairs, DotQuads, DotFloat8s, DotNibbles>, normalize, kGroupRows};
}  // namespace paged
#endif
