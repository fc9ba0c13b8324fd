// Numbers whose sums of products are exact, whatever their type and order.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

inline double value_of(float value) { return value; }
inline double value_of(int8_t value) { return value; }
inline double value_of(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Multiples of 1/8, exact in bfloat16, with sums that are exact in float32; eighths of an int8 are
// its scale.
template <class T>
T make(int eighths) {
  if constexpr (sizeof(T) == 1) return static_cast<T>(eighths);
  const float value = static_cast<float>(eighths) / 8;
  if constexpr (sizeof(T) == 4) return value;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<T>(bits >> 16);
}

template <class T>
std::vector<T> fill(std::mt19937& random, int64_t size) {
  std::vector<T> values(size);
  for (auto& value : values) value = make<T>(static_cast<int>(random() % 17) - 8);
  values.shrink_to_fit();
  return values;
}
