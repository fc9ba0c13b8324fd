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

}  // namespace
}  // namespace paged
