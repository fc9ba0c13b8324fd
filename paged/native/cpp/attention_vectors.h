// Vectors of float for attention: element functions, and the product of a register block.
//
// Before the include, define in namespace `paged`'s unnamed namespace kVectorBytes, kBlockColumns
// and kBlockRows, see linear_kernel.h.
#pragma once

#include <cfloat>
#include <cstring>

#include "attention.h"

namespace paged {
namespace {

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));

constexpr int kLanes = kVectorBytes / 4;

inline Floats broadcast(float value) { return Floats{} + value; }

template <class Vector, class Element>
inline Vector load(const Element* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector, class Element>
inline void store(Vector vector, Element* to) {
  std::memcpy(to, &vector, sizeof vector);
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// exp(x) for x <= 0, below which exp(-87) counts as the smallest result. Source: Cephes, expf.
inline Floats exp_of(Floats x) {
  x = x < broadcast(-87.0f) ? broadcast(-87.0f) : x;
  // Adding 1.5 * 2^23 rounds to an integer, which the low bits of the sum then hold.
  const Floats shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Words power = ((Words)shifted - 0x4b400000u + 127u) << 23;
  return p * (Floats)power;
}

// Source: Cephes, tanhf.
inline Floats tanh_of(Floats x) {
  const Floats size = x < broadcast(0.0f) ? -x : x, z = x * x;
  const Floats e = exp_of(-2.0f * size), large = (1.0f - e) / (1.0f + e);
  Floats p = -5.70498872745e-3f * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Floats small = p * z * x + x;
  return size < broadcast(0.625f) ? small : x < broadcast(0.0f) ? -large : large;
}

// Products take 32-bit words: a float32, as here, or two bfloat16, where an instruction does that.
struct Singles {
  static constexpr int kPerWord = 1;

  static inline void add(Floats& sum, uint32_t x, Words w) {
    sum += (Floats)w * float_of_bits(x);
  }

  template <class Cache>
  static inline Words load_words(const char* row, int64_t element) {
    Floats values;
    for (int i = 0; i < kLanes; ++i) values[i] = element_at<Cache>(row, element + i);
    return (Words)values;
  }

  // One word of one key: features from `element` on.
  template <class Cache>
  static inline uint32_t key_word(const char* row, int64_t element, int64_t) {
    return bits_of_float(element_at<Cache>(row, element));
  }

  // One word of the values of kPerWord keys.
  template <class Cache>
  static inline uint32_t value_word(const char* const* rows, int64_t element) {
    return bits_of_float(element_at<Cache>(rows[0], element));
  }

  template <class Cache>
  static inline void store_values(const char* const* rows, int64_t element, uint32_t* to) {
    store(load_words<Cache>(rows[0], element), to);
  }

  static inline void store_weights(Floats weights, int64_t first, uint32_t* to) {
    store(weights, to + first);
  }
};

template <>
inline Words Singles::load_words<Float32>(const char* row, int64_t element) {
  return load<Words>(row + 4 * element);
}

template <>
inline Words Singles::load_words<Bfloat16>(const char* row, int64_t element) {
  typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
  return __builtin_convertvector(load<Halves>(row + 2 * element), Words) << 16;
}

// Rows of memory to ask for beside other work: bytes [begin, end) of each of kChunkKeys.
struct Prefetch {
  const char* const* starts;  // or null: none
  int64_t begin, end;

  inline void rows(int64_t first, int64_t count) const {
    if (!starts) return;
    for (int64_t row = first; row < first + count && row < kChunkKeys; ++row)
      // Into the second level: the first is full of what is being multiplied.
      for (int64_t at = begin; at < end; at += 64) __builtin_prefetch(starts[row] + at, 0, 2);
  }
};

// Rows x of words, times columns w [steps][w_stride] of words, onto `out`.
template <class Product, int kRows, int kVectors>
inline void multiply_block(Prefetch fetch, const uint32_t* x, int64_t x_stride, const uint32_t* w,
                           int64_t w_stride, int64_t steps, bool accumulate, float* out,
                           int64_t out_stride) {
  Floats sums[kRows][kVectors] = {};
  if (accumulate) {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i)
        sums[row][i] = load<Floats>(out + row * out_stride + i * kLanes);
    }
  }
  const int64_t rows_per_step = (kChunkKeys + steps - 1) / (steps > 1 ? steps : 1);
  for (int64_t step = 0; step < steps; ++step) {
    fetch.rows(step * rows_per_step, rows_per_step);
    Words columns[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) columns[i] = load<Words>(w + step * w_stride + i * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i)
        Product::add(sums[row][i], x[row * x_stride + step], columns[i]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) store(sums[row][i], out + row * out_stride + i * kLanes);
  }
}

// The same for a number of rows known at run time, at most kRows.
template <class Product, int kRows, int kVectors, class... Rest>
inline void multiply_rows(int64_t rows, Rest... rest) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<Product, kRows - 1, kVectors>(rows, rest...);
  }
  multiply_block<Product, kRows, kVectors>(rest...);
}

// At most kBlockRows rows, and `columns` columns, a multiple of kLanes.
template <class Product>
void multiply(Prefetch fetch, int64_t rows, int64_t columns, const uint32_t* x, int64_t x_stride,
              const uint32_t* w, int64_t w_stride, int64_t steps, bool accumulate, float* out,
              int64_t out_stride) {
  int64_t c = 0;
  for (; c + kBlockColumns <= columns; c += kBlockColumns)
    multiply_rows<Product, kBlockRows, kBlockColumns / kLanes>(
        rows, fetch, x, x_stride, w + c, w_stride, steps, accumulate, out + c, out_stride);
  for (; c < columns; c += kLanes)
    multiply_rows<Product, kBlockRows, 1>(rows, fetch, x, x_stride, w + c, w_stride, steps, accumulate,
                                          out + c, out_stride);
}

}  // namespace
}  // namespace paged
