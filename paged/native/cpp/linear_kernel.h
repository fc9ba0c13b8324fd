// The arithmetic of one tile, for a vector size and register blocks that the including file sets.
//
// Before the include, define in namespace `paged`'s unnamed namespace:
//   kVectorBytes              size of a vector register
//   kWideRows, kWideColumns   the register block for few rows: most rows, and columns
//   kTallRows, kTallColumns   the one for more rows, with fewer columns or as many
// A block's sums, and what feeds them, have to fit the registers.
#pragma once

#include "linear.h"
#include "linear_epilogue.h"
#include "linear_formats.h"
#include "vectors.h"

namespace paged {
namespace {

constexpr int kMaxSums = kWideRows * kWideColumns > kTallRows * kTallColumns
                             ? kWideRows * kWideColumns / kLanes
                             : kTallRows * kTallColumns / kLanes;
// Bytes between reading a word and asking for it: hides the latency of memory at one row.
constexpr int64_t kPrefetchBytes = 4096;

// Accumulates one step along K for a register block; x has rows of `stride` elements.
template <class Format, int kRows, int kVectors>
inline void add_step(Floats (&sums)[kRows][kVectors], const typename Format::Element* x,
                     int64_t stride, const char* weight) {
  Words words[kVectors];
  // One vector at a time: as a whole, GCC copies them through the stack.
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i)
    std::memcpy(&words[i], weight + i * kVectorBytes, kVectorBytes);
#pragma GCC unroll 4
  for (int set = 0; set < Format::kSets; ++set) {
    Words factors[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) factors[i] = Format::expand(words[i], set);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const uint32_t factor = Format::factor(x + row * stride, set);
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) Format::add(sums[row][i], factor, factors[i]);
    }
  }
}

// Few rows leave registers free: further sets of sums, for the steps that follow, shorten the
// chains of dependent additions.
constexpr int num_phases(int sums) { return 4 * sums <= kMaxSums ? 4 : 2 * sums <= kMaxSums ? 2 : 1; }

// Products of kRows rows of x [.., depth] with kColumns columns of a tile; `out` has rows of
// kTileColumns.
template <class Format, int kRows, int kColumns>
void multiply_block(const typename Format::Element* x, int64_t depth, const char* weight,
                    float* out) {
  constexpr int kVectors = kColumns / kLanes, kPhases = num_phases(kRows * kVectors);
  const int64_t steps = depth / Format::kPerWord;
  Floats sums[kPhases][kRows][kVectors] = {};
  int64_t step = 0;
  for (; step + kPhases <= steps; step += kPhases) {
#pragma GCC unroll 4
    for (int phase = 0; phase < kPhases; ++phase) {
      const char* at = weight + (step + phase) * kStepBytes;
#pragma GCC unroll 4
      for (int line = 0; line < kColumns * 4; line += 64)
        __builtin_prefetch(at + kPrefetchBytes + line);
      add_step<Format>(sums[phase], x + (step + phase) * Format::kPerWord, depth, at);
    }
  }
  for (; step < steps; ++step)
    add_step<Format>(sums[0], x + step * Format::kPerWord, depth, weight + step * kStepBytes);
  if (const int64_t rest = depth % Format::kPerWord) {
    // The last elements have no neighbours in their rows; what follows in memory is not theirs.
    typename Format::Element last[kRows][Format::kPerWord] = {};
    for (int row = 0; row < kRows; ++row)
      std::memcpy(last[row], x + row * depth + steps * Format::kPerWord, rest * sizeof(*x));
    add_step<Format>(sums[0], last[0], Format::kPerWord, weight + steps * kStepBytes);
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
      store_floats(sums[0][row][i], out + row * kTileColumns + i * kLanes);
  }
}

// `multiply_block` for all columns and a number of rows that is known at run time, at most kRows.
template <class Format, int kRows>
inline void multiply_rows(int64_t rows, const typename Format::Element* x, int64_t depth,
                          const char* weight, int64_t columns, float* out) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<Format, kRows - 1>(rows, x, depth, weight, columns, out);
  }
  constexpr int kColumns = kRows <= kWideRows ? kWideColumns : kTallColumns;
  for (int64_t column = 0; column < columns; column += kColumns)
    multiply_block<Format, kRows, kColumns>(x, depth, weight + 4 * column, out + column);
}

// A tile of one weight: where its columns begin, and its words.
struct Tile {
  const LinearWeight* weight;
  int64_t index, first, columns;
};

inline Tile locate(const LinearWeight& weight, int64_t tile) {
  const int64_t first = tile * kTileColumns, rest = weight.num_columns - first;
  return {&weight, tile, first, rest < kTileColumns ? rest : kTileColumns};
}

inline const char* words_of(const LinearProblem& p, const Tile& tile) {
  return static_cast<const char*>(tile.weight->words) + tile.index * num_steps(p) * kStepBytes;
}

// Rows of a block, such that all blocks have about as many.
inline int64_t rows_of_block(int64_t num_rows) {
  const int64_t blocks = (num_rows + kTallRows - 1) / kTallRows;
  return blocks ? (num_rows + blocks - 1) / blocks : 1;
}

// Computes and stores a tile whose words are `words`; with a gate, `value` and `value_words` are the
// tile that it scales.
template <class Format, class Output>
void run_tile(const LinearProblem& p, const Tile& tile, const char* words, const Tile& value,
              const char* value_words) {
  using Element = typename Format::Element;
  const LinearWeight& weight = *tile.weight;
  const int64_t first = tile.first, columns = tile.columns;
  const bool is_gate = p.activation != Activation::kNone;
  alignas(64) float sums[kTallRows * kTileColumns], values[kTallRows * kTileColumns];
  const int64_t block_rows = rows_of_block(p.num_rows);
  for (int64_t row = 0; row < p.num_rows; row += block_rows) {
    const int64_t rows = p.num_rows - row < block_rows ? p.num_rows - row : block_rows;
    const Element* x = static_cast<const Element*>(p.x) + row * p.depth;
    multiply_rows<Format, kTallRows>(rows, x, p.depth, words, columns, sums);
    if (is_gate) multiply_rows<Format, kTallRows>(rows, x, p.depth, value_words, columns, values);
    for (int64_t i = 0; i < rows; ++i) {
      float* products = sums + i * kTileColumns;
      finish_products<Element>(weight, first, columns, products);
      if (is_gate) {
        finish_products<Element>(*value.weight, first, columns, values + i * kTileColumns);
        apply_gates(p.activation, values + i * kTileColumns, products);
      }
      if (p.best_values) {
        const int64_t at = tile.index * p.num_rows + row + i;
        find_best(products, columns, p.best_values + at, p.best_columns + at);
        p.best_columns[at] += static_cast<int32_t>(first);
        continue;
      }
      const int64_t at = (row + i) * weight.num_columns + first;
      const Element* residual = p.residual ? static_cast<const Element*>(p.residual) + at : nullptr;
      store_row(products, residual, columns, static_cast<Output*>(weight.y) + at);
    }
  }
}

// Converts a tile of int8 to words of the format `To`, in `out`.
template <class Quads, class To>
void convert_tile(int64_t steps, const char* words, char* out) {
  constexpr int kPerStep = 4 / To::kPerWord;
  for (int64_t at = 0; at < steps * kStepBytes; at += kVectorBytes) {
    const int64_t step = at / kStepBytes, column = at % kStepBytes;
    Words quads;
    std::memcpy(&quads, words + at, sizeof quads);
#pragma GCC unroll 4
    for (int i = 0; i < kPerStep; ++i) {
      Words converted;
      if constexpr (Quads::kSets == kPerStep)
        converted = Quads::expand(quads, i);
      else  // pairs of bfloat16 from float32, whose lower halves are zero
        converted = Quads::expand(quads, 2 * i) >> 16 | Quads::expand(quads, 2 * i + 1);
      std::memcpy(out + (step * kPerStep + i) * kStepBytes + column, &converted, kVectorBytes);
    }
  }
}

template <class Format>
inline void run_tile(const LinearProblem& p, const Tile& tile, const char* words, const Tile& value,
                     const char* value_words) {
  if (sizeof(typename Format::Element) == 2 && p.output_is_bf16)
    run_tile<Format, uint16_t>(p, tile, words, value, value_words);
  else
    run_tile<Format, float>(p, tile, words, value, value_words);
}

// Computes the tile with the given number, counted through all weights, in `Format`; or, given
// scratch memory, in `Converted`.
template <class Format, class Converted = Format>
void compute_tile(const LinearProblem& p, int64_t number, void* scratch) {
  const bool is_gate = p.activation != Activation::kNone;
  const LinearWeight* weight = p.weights;
  if (!is_gate)
    for (; number >= num_tiles(weight->num_columns); ++weight)
      number -= num_tiles(weight->num_columns);
  const Tile tile = locate(*weight, number), value = locate(p.weights[is_gate], number);
  const char *words = words_of(p, tile), *value_words = words_of(p, value);
  if constexpr (Format::kPerWord != Converted::kPerWord) {
    if (scratch) {
      char *converted = static_cast<char*>(scratch), *second = converted + converted_bytes(p);
      convert_tile<Format, Converted>(num_steps(p), words, converted);
      if (is_gate) convert_tile<Format, Converted>(num_steps(p), value_words, second);
      return run_tile<Converted>(p, tile, converted, value, second);
    }
  }
  run_tile<Format>(p, tile, words, value, value_words);
}

// The tile function of an instruction set: `Pairs` multiplies bfloat16, `Quads` bfloat16 by int8.
template <class Pairs, class Quads>
void compute_typed_tile(const LinearProblem& p, int64_t number, void* scratch) {
  if (p.weight_type == WeightType::kFloat32)
    compute_tile<Singles>(p, number, scratch);
  else if (p.weight_type == WeightType::kBfloat16)
    compute_tile<Pairs>(p, number, scratch);
  else if (p.is_bf16)
    compute_tile<Quads, Pairs>(p, number, scratch);
  else
    compute_tile<WidenedQuads<float>, Singles>(p, number, scratch);
}

}  // namespace
}  // namespace paged
