// How a word of x and a vector of packed words are multiplied, by types and by instructions.
//
// A format has
//   Element           the type of x
//   kPerWord          neighbours along K in a packed word
//   kSets             products that a word takes
//   expand(words, i)  the factors of product i, lanes in place
//   factor(x, i)      the factor from x that goes with them, as bits; x points to kPerWord elements
//   add(sum, f, w)    adds a product to float32 sums
#pragma once

#include "vectors.h"

namespace paged {
namespace {

struct Singles {
  using Element = float;
  static constexpr int kPerWord = 1, kSets = 1;
  static inline Words expand(Words words, int) { return words; }
  static inline uint32_t factor(const float* x, int) { return as_bits(*x); }
  static inline void add(Floats& sum, uint32_t x, Words w) { sum += (Floats)w * as_float(x); }
};

// Two bfloat16 where no instruction multiplies them.
struct WidenedPairs {
  using Element = uint16_t;
  static constexpr int kPerWord = 2, kSets = 2;
  static inline Words expand(Words words, int set) {
    return set == 0 ? words << 16 : words & 0xffff0000u;
  }
  static inline uint32_t factor(const uint16_t* x, int set) { return uint32_t{x[set]} << 16; }
  static inline void add(Floats& sum, uint32_t x, Words w) { sum += (Floats)w * as_float(x); }
};

// Four int8, widened to float32.
template <class T>
struct WidenedQuads {
  using Element = T;
  static constexpr int kPerWord = 4, kSets = 4;
  static inline Words expand(Words words, int set) {
    const Ints integers = (Ints)(words << (24 - 8 * set)) >> 24;
    return (Words)__builtin_convertvector(integers, Floats);
  }
  static inline uint32_t factor(const T* x, int set) { return as_bits(widen(x[set])); }
  static inline void add(Floats& sum, uint32_t x, Words w) { sum += (Floats)w * as_float(x); }
};

// Four e4m3, widened to float32.
template <class T>
struct WidenedFloat8s {
  using Element = T;
  static constexpr int kPerWord = 4, kSets = 4;
  static inline Words expand(Words words, int set) {
    const Words byte = words >> (8 * set) & 0xffu;
    const Ints bits = (Ints)(byte & 0x7fu), exponent = bits >> 3;
    // Subnormals have no leading one, and the exponent of the smallest normal numbers. By integers:
    // threads may have been told to take float32's subnormals for zero.
    const Ints is_subnormal = exponent == 0;
    const Ints mantissa = (bits & 7) + (~is_subnormal & 8);
    const Ints power = (exponent - is_subnormal + 117) << 23;
    const Words size = (Words)(__builtin_convertvector(mantissa, Floats) * (Floats)power);
    const Words nan = (Words)(bits == 0x7f) & 0x7fc00000u;
    return size | nan | (byte & 0x80u) << 24;
  }
  static inline uint32_t factor(const T* x, int set) { return as_bits(widen(x[set])); }
  static inline void add(Floats& sum, uint32_t x, Words w) { sum += (Floats)w * as_float(x); }
};

// Eight codes of 4 bits, widened to float32. Of such formats kOffset is what factors are more by
// than the codes.
template <class T>
struct WidenedNibbles {
  using Element = T;
  static constexpr int kPerWord = 8, kSets = 8;
  static constexpr float kOffset = 0;
  static inline Words expand(Words words, int set) {
    const Ints codes = (Ints)(words >> (4 * (set / 2) + 16 * (set % 2)) & 15u);
    return (Words)__builtin_convertvector(codes, Floats);
  }
  static inline uint32_t factor(const T* x, int set) { return as_bits(widen(x[set])); }
  static inline void add(Floats& sum, uint32_t x, Words w) { sum += (Floats)w * as_float(x); }
};

}  // namespace
}  // namespace paged
