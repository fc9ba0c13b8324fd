// Vectors of a size that the including file sets, and single elements of either type.
//
// Before the include, define `kVectorBytes` in namespace `paged`'s unnamed namespace.
#pragma once

#include <cstdint>
#include <cstring>

namespace paged {
namespace {

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));

constexpr int kLanes = kVectorBytes / 4;

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline Floats load_floats(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline void store_floats(const Floats& values, float* to) {
  std::memcpy(to, &values, sizeof values);
}

inline float widen(float value) { return value; }
// A bfloat16 is the upper half of the float32 of equal value.
inline float widen(uint16_t value) { return as_float(uint32_t{value} << 16); }

inline void narrow(float value, float* out) { *out = value; }

// Rounds to nearest, ties to even, and keeps a NaN a NaN.
inline void narrow(float value, uint16_t* out) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  *out = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded);
}

// e^x to 2e-7 of its value, for any x that is no NaN; what would be beyond float32's normal numbers
// is the last of them. Cephes' polynomial.
inline Floats exponential(Floats x) {
  const Floats most = Floats{} + 88.0f, least = Floats{} - 87.0f;
  x = x > most ? most : x;
  x = x < least ? least : x;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const Floats shifted = x * 1.44269504f + 12582912.0f;
  const Floats n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats sum = r * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  sum = sum * r * r + r + 1.0f;
  const Words exponent = (Words)shifted << 23;  // the high bits of 1.5 * 2^23 fall off
  return (Floats)((Words)sum + exponent);
}

}  // namespace
}  // namespace paged
