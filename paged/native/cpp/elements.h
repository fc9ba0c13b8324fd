// Element types of activations and of the cache, one value at a time.
//
// Reaches files that are compiled for CPUs the program may not run on, see linear.h: nothing here
// has external linkage.
#pragma once

#include <cstdint>
#include <cstring>

namespace paged {

enum class ElementType { kFloat32, kBfloat16, kFloat8E4M3, kFloat8E5M2 };

static inline int64_t element_bytes(ElementType type) {
  return type == ElementType::kFloat32 ? 4 : type == ElementType::kBfloat16 ? 2 : 1;
}

namespace {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The bfloat16 bits of every value of an 8-bit float; all of them are exact. From a table, because
// XLA's threads flush subnormal numbers to zero, which half the tricks with shifts rely on.
template <int kMantissaBits, int kBias, bool kHasInfinity>
struct Float8Table {
  uint16_t bits[256];
  constexpr Float8Table() : bits() {
    for (int byte = 0; byte < 256; ++byte) {
      const int exponent = (byte & 0x7f) >> kMantissaBits;
      const int mantissa = byte & ((1 << kMantissaBits) - 1);
      int top = 0;  // highest bit of a subnormal's mantissa
      while (mantissa >> (top + 1)) ++top;
      int magnitude = 0;
      if (exponent)
        magnitude = ((exponent - kBias + 127) << 7) | (mantissa << (7 - kMantissaBits));
      else if (mantissa)
        magnitude = ((1 - kBias - kMantissaBits + top + 127) << 7) | ((mantissa << (7 - top)) & 127);
      if (kHasInfinity && exponent == (1 << (7 - kMantissaBits)) - 1)
        magnitude = mantissa ? 0x7fc0 : 0x7f80;
      if (!kHasInfinity && (byte & 0x7f) == 0x7f) magnitude = 0x7fc0;
      bits[byte] = static_cast<uint16_t>(magnitude | (byte & 0x80) << 8);
    }
  }
};

// Each type: `Stored` is what lies in memory, `widen` and `narrow` convert it from and to float.
struct Float32 {
  using Stored = float;
  static inline float widen(float value) { return value; }
  static inline float narrow(float value) { return value; }
};

struct Bfloat16 {
  using Stored = uint16_t;
  static inline float widen(uint16_t value) { return float_of_bits(uint32_t{value} << 16); }
  // Rounds to nearest, ties to even, and keeps a NaN a NaN.
  static inline uint16_t narrow(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded);
  }
};

template <int kMantissaBits, int kBias, bool kHasInfinity, uint32_t kLargest>
struct Float8 {
  using Stored = uint8_t;
  static constexpr Float8Table<kMantissaBits, kBias, kHasInfinity> kTable{};
  static inline float widen(uint8_t value) { return Bfloat16::widen(kTable.bits[value]); }
  // Rounds to nearest, ties to even; what is too large becomes the largest finite value. Without
  // branches, so that loops of it are vectorised.
  static inline uint8_t narrow(float value) {
    constexpr int kShift = 23 - kMantissaBits;
    // Adding a power of two whose last bit is the spacing of subnormal values rounds to it.
    constexpr uint32_t kSubnormal = static_cast<uint32_t>(127 + 24 - kBias - kMantissaBits) << 23;
    constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
    const uint32_t bits = bits_of_float(value), sign = (bits >> 24) & 0x80;
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t finite = magnitude < kLargest ? magnitude : kLargest;
    const uint32_t normal =
        ((finite + (1u << (kShift - 1)) - 1 + ((finite >> kShift) & 1)) >> kShift) -
        (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
    const uint32_t subnormal =
        bits_of_float(float_of_bits(finite) + float_of_bits(kSubnormal)) - kSubnormal;
    const uint32_t rounded = finite < kSmallestNormal ? subnormal : normal;
    return static_cast<uint8_t>(sign | (magnitude > 0x7f800000 ? 0x7f : rounded));
  }
};

// The fourth argument is the largest finite value, 448 and 57344, as float32 bits.
using Float8E4M3 = Float8<3, 7, false, 0x43e00000>;
using Float8E5M2 = Float8<2, 15, true, 0x47600000>;

template <class Type>
inline float element_at(const char* row, int64_t index) {
  typename Type::Stored stored;
  std::memcpy(&stored, row + index * static_cast<int64_t>(sizeof stored), sizeof stored);
  return Type::widen(stored);
}

}  // namespace
}  // namespace paged
