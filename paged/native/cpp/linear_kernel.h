// The arithmetic of one tile, for a vector size and a register block that the including file sets.
//
// Before the include, define in namespace `paged`'s unnamed namespace:
//   kVectorBytes   size of a vector register
//   kBlockColumns  columns of a register block; 16 columns are one cache line of packed weights
//   kBlockRows     most rows of a register block
// The block's kBlockRows * kBlockColumns sums, and what feeds them, have to fit the registers.
#include <cstring>

#include "linear.h"

namespace paged {
namespace {

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));

constexpr int kLanes = kVectorBytes / 4;
constexpr int kVectors = kBlockColumns / kLanes;
constexpr int64_t kStepBytes = kTileColumns * 4;
// Bytes between reading a word and asking for it: hides the latency of memory at one row.
constexpr int64_t kPrefetchBytes = 4096;

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

inline float widen(float value) { return value; }
inline float widen(uint16_t value) { return as_float(uint32_t{value} << 16); }

inline void narrow(float value, float* out) { *out = value; }

// Rounds to nearest, ties to even, and keeps a NaN a NaN.
inline void narrow(float value, uint16_t* out) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  *out = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded);
}

// How one 32-bit word of x and a vector of words of w are multiplied: float32.
struct Singles {
  using Element = float;
  static constexpr int kPerWord = 1;
  static inline void add(Floats& sum, uint32_t x, Words w) {
    sum += (Floats)w * as_float(x);
  }
};

// The same for two bfloat16 at once, where no instruction does it: a bfloat16 is the upper half of
// the float32 of equal value.
struct WidenedPairs {
  using Element = uint16_t;
  static constexpr int kPerWord = 2;
  static inline void add(Floats& sum, uint32_t x, Words w) {
    sum += (Floats)(w << 16) * as_float(x << 16);
    sum += (Floats)(w & 0xffff0000u) * as_float(x & 0xffff0000u);
  }
};

// Accumulates one step along K for a register block.
template <class Pairs, int kRows>
inline void add_step(Floats (&sums)[kRows][kVectors], const uint32_t (&x)[kRows],
                     const char* weight) {
  Words columns[kVectors];
  // One vector at a time: as a whole, GCC copies them through the stack.
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i)
    std::memcpy(&columns[i], weight + i * kVectorBytes, kVectorBytes);
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) Pairs::add(sums[row][i], x[row], columns[i]);
  }
}

template <int kRows>
inline void load_words(const char* x, int64_t row_bytes, int64_t step, uint32_t (&words)[kRows]) {
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) std::memcpy(&words[row], x + row * row_bytes + 4 * step, 4);
}

// Few rows leave registers free: further sets of sums, for the steps that follow, shorten the
// chains of dependent additions.
constexpr int num_phases(int rows) {
  const int most = kBlockRows * kVectors, sums = rows * kVectors;
  return 4 * sums <= most ? 4 : 2 * sums <= most ? 2 : 1;
}

// Products of kRows rows of x [.., depth] with kBlockColumns columns of a tile; `out` has rows of
// kTileColumns.
template <class Pairs, int kRows>
void multiply_block(const typename Pairs::Element* x, int64_t depth, const char* weight,
                    float* out) {
  constexpr int kPhases = num_phases(kRows);
  const char* bytes = reinterpret_cast<const char*>(x);
  const int64_t row_bytes = depth * static_cast<int64_t>(sizeof(typename Pairs::Element));
  const int64_t steps = depth / Pairs::kPerWord;
  Floats sums[kPhases][kRows][kVectors] = {};
  uint32_t words[kRows];
  int64_t step = 0;
  for (; step + kPhases <= steps; step += kPhases) {
#pragma GCC unroll 4
    for (int phase = 0; phase < kPhases; ++phase) {
      const char* at = weight + (step + phase) * kStepBytes;
#pragma GCC unroll 4
      for (int line = 0; line < kBlockColumns * 4; line += 64)
        __builtin_prefetch(at + kPrefetchBytes + line);
      load_words<kRows>(bytes, row_bytes, step + phase, words);
      add_step<Pairs, kRows>(sums[phase], words, at);
    }
  }
  for (; step < steps; ++step) {
    load_words<kRows>(bytes, row_bytes, step, words);
    add_step<Pairs, kRows>(sums[0], words, weight + step * kStepBytes);
  }
  if (depth % Pairs::kPerWord) {
    // The last element has no neighbour in its row; what follows in memory is not part of it.
    for (int row = 0; row < kRows; ++row) {
      words[row] = 0;
      std::memcpy(&words[row], bytes + row * row_bytes + 4 * steps, sizeof(*x));
    }
    add_step<Pairs, kRows>(sums[0], words, weight + steps * kStepBytes);
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int phase = 1; phase < kPhases; ++phase) {
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) sums[0][row][i] += sums[phase][row][i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i)
      std::memcpy(out + row * kTileColumns + i * kLanes, &sums[0][row][i], kVectorBytes);
  }
}

// `multiply_block` for a number of rows that is known at run time, at most kRows.
template <class Pairs, int kRows>
inline void multiply_rows(int64_t rows, const typename Pairs::Element* x, int64_t depth,
                          const char* weight, float* out) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<Pairs, kRows - 1>(rows, x, depth, weight, out);
  }
  multiply_block<Pairs, kRows>(x, depth, weight, out);
}

// Adds the bias and stores one row of a tile.
template <class Element, class Output>
inline void store_row(const float* sums, const Element* bias, int64_t columns, Output* out) {
  for (int64_t i = 0; i < columns; ++i) narrow(sums[i] + (bias ? widen(bias[i]) : 0.0f), out + i);
}

template <class Pairs, class Output>
void multiply_tile(const LinearProblem& p, int64_t tile) {
  using Element = typename Pairs::Element;
  const int64_t first = tile * kTileColumns, rest = p.num_columns - first;
  const int64_t columns = rest < kTileColumns ? rest : kTileColumns;
  const char* weight = static_cast<const char*>(p.weight) + tile * num_steps(p) * kStepBytes;
  const Element* bias = p.bias ? static_cast<const Element*>(p.bias) + first : nullptr;
  alignas(64) float sums[kBlockRows * kTileColumns];
  for (int64_t row = 0; row < p.num_rows; row += kBlockRows) {
    const int64_t rows = p.num_rows - row < kBlockRows ? p.num_rows - row : kBlockRows;
    const Element* x = static_cast<const Element*>(p.x) + row * p.depth;
    for (int64_t column = 0; column < columns; column += kBlockColumns)
      multiply_rows<Pairs, kBlockRows>(rows, x, p.depth, weight + 4 * column, sums + column);
    for (int64_t i = 0; i < rows; ++i) {
      Output* out = static_cast<Output*>(p.y) + (row + i) * p.num_columns + first;
      store_row(sums + i * kTileColumns, bias, columns, out);
    }
  }
}

template <class Pairs>
inline void multiply_typed_tile(const LinearProblem& p, int64_t tile) {
  if (!p.is_bf16) return multiply_tile<Singles, float>(p, tile);
  if (p.output_is_bf16) return multiply_tile<Pairs, uint16_t>(p, tile);
  multiply_tile<Pairs, float>(p, tile);
}

}  // namespace
}  // namespace paged
