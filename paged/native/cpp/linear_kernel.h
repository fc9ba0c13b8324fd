// The arithmetic of one tile, for a vector size and a register block that the including file sets.
//
// Before the include, define in namespace `paged`'s unnamed namespace:
//   kVectorBytes   size of a vector register
//   kBlockColumns  columns of a register block; 16 columns are one cache line of packed weights
//   kBlockRows     most rows of a register block
// The block's kBlockRows * kBlockColumns sums, and what feeds them, have to fit the registers.
#pragma once

#include "linear.h"
#include "linear_epilogue.h"
#include "linear_formats.h"
#include "vectors.h"

namespace paged {
namespace {

constexpr int kVectors = kBlockColumns / kLanes;
// More rows than a block has go through a tile by pieces of this many steps, 16 KiB, which stay in
// the first cache from block to block while the next piece is fetched behind them: products and
// memory take their time together instead of in turn.
constexpr int64_t kPieceSteps = 64;
// So many rows take a piece before the next one; their sums have to stay near, too.
constexpr int64_t kGroupRows = 16 * kBlockRows;

// Accumulates one step along K for a register block; x has rows of `stride` elements.
template <class Format, int kRows>
inline void add_step(Floats (&sums)[kRows][kVectors], const typename Format::Element* x,
                     int64_t stride, const char* weight) {
  Words words[kVectors];
  // One vector at a time: as a whole, GCC copies them through the stack.
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i)
    std::memcpy(&words[i], weight + i * kVectorBytes, kVectorBytes);
#pragma GCC unroll 8
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
constexpr int num_phases(int rows) {
  return 4 * rows <= kBlockRows ? 4 : 2 * rows <= kBlockRows ? 2 : 1;
}

// A piece of a tile that is multiplied by a block of rows.
struct Piece {
  const char* words;
  int64_t depth;         // elements of x along K
  int64_t row_stride;    // elements between rows of x
  bool is_first;         // else what is in `out` is added to
  const char* ahead;     // what to fetch meanwhile
  int64_t ahead_stride;  // bytes of that for each step
};

// Products of kRows rows with kBlockColumns columns; `out` has rows of kTileColumns.
template <class Format, int kRows>
void multiply_block(const Piece& piece, const typename Format::Element* x, int64_t column,
                    float* out) {
  constexpr int kPhases = num_phases(kRows);
  const int64_t steps = piece.depth / Format::kPerWord, stride = piece.row_stride;
  const char *words = piece.words + 4 * column, *ahead = piece.ahead + 4 * column;
  out += column;
  Floats sums[kPhases][kRows][kVectors] = {};
  int64_t step = 0;
  for (; step + kPhases <= steps; step += kPhases) {
#pragma GCC unroll 4
    for (int phase = 0; phase < kPhases; ++phase) {
#pragma GCC unroll 4
      for (int line = 0; line < kBlockColumns * 4; line += 64)
        // Into the second cache: the first has no room for what is asked for so early.
        __builtin_prefetch(ahead + (step + phase) * piece.ahead_stride + line, 0, 2);
      add_step<Format>(sums[phase], x + (step + phase) * Format::kPerWord, stride,
                       words + (step + phase) * kStepBytes);
    }
  }
  for (; step < steps; ++step)
    add_step<Format>(sums[0], x + step * Format::kPerWord, stride, words + step * kStepBytes);
  if (const int64_t rest = piece.depth % Format::kPerWord) {
    // The last elements have no neighbours in their rows; what follows in memory is not theirs.
    typename Format::Element last[kRows][Format::kPerWord] = {};
    for (int row = 0; row < kRows; ++row)
      std::memcpy(last[row], x + row * stride + steps * Format::kPerWord, rest * sizeof(*x));
    add_step<Format>(sums[0], last[0], Format::kPerWord, words + steps * kStepBytes);
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int phase = 1; phase < kPhases; ++phase) {
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) sums[0][row][i] += sums[phase][row][i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      float* at = out + row * kTileColumns + i * kLanes;
      store_floats(piece.is_first ? sums[0][row][i] : sums[0][row][i] + load_floats(at), at);
    }
  }
}

// `multiply_block` for all columns and a number of rows that is known at run time, at most kRows.
template <class Format, int kRows>
inline void multiply_rows(int64_t rows, const Piece& piece, const typename Format::Element* x,
                          int64_t columns, float* out) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_rows<Format, kRows - 1>(rows, piece, x, columns, out);
  }
  for (int64_t column = 0; column < columns; column += kBlockColumns)
    multiply_block<Format, kRows>(piece, x, column, out);
}

// Converts steps of int8 or e4m3 to words of the format `To`, in `out`.
template <class Quads, class To>
void convert_steps(int64_t steps, const char* words, char* out) {
  constexpr int kPerStep = Quads::kPerWord / To::kPerWord;
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

// Bytes between asking for a word and reading it, where one block has all rows: the best of a few
// on Zen 4, with 10 to 40 % between them.
template <class Format>
constexpr int64_t prefetch_bytes(int64_t rows) {
  return Format::kPerWord >= 4 ? 8192 : rows <= 4 ? 2048 : 16384;
}

// Products of a group of rows, at most kGroupRows, with a tile in `Format`. Where that are several
// blocks, each piece is converted first, if `Used` is another format.
template <class Format, class Used>
void multiply_group(int64_t rows, const typename Format::Element* x, int64_t depth,
                    const char* words, int64_t columns, float* out) {
  if (rows <= kBlockRows) {
    const Piece all{words, depth, depth, true, words + prefetch_bytes<Format>(rows), kStepBytes};
    return multiply_rows<Format, kBlockRows>(rows, all, x, columns, out);
  }
  constexpr bool kConverts = Format::kPerWord != Used::kPerWord;
  constexpr int64_t kPieceDepth = kPieceSteps * Used::kPerWord;
  constexpr int64_t kPieceBytes = kPieceDepth / Format::kPerWord * kStepBytes;
  alignas(64) char converted[kConverts ? kPieceSteps * kStepBytes : 1];
  const int64_t block_rows = equal_parts(rows, kBlockRows);
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
  int64_t first = 0;
  do {
    const int64_t rest = depth - first, piece_depth = rest < kPieceDepth ? rest : kPieceDepth;
    Piece piece{words, piece_depth, depth, first == 0, words + kPieceBytes,
                kPieceBytes / kPieceSteps / blocks};
    if constexpr (kConverts) {
      const int64_t steps = (piece_depth + Format::kPerWord - 1) / Format::kPerWord;
      convert_steps<Format, Used>(steps, words, converted);
      piece.words = converted;
    }
    for (int64_t row = 0; row < rows; row += block_rows) {
      const int64_t block = rows - row < block_rows ? rows - row : block_rows;
      multiply_rows<Used, kBlockRows>(block, piece, x + row * depth + first, columns,
                                      out + row * kTileColumns);
      piece.ahead += kPieceSteps * piece.ahead_stride;  // the blocks share what is next
    }
    first += kPieceDepth;
    words += kPieceBytes;
  } while (first < depth);  // once at least: no inputs give zeros
}

// The sum of `size` elements, a multiple of 8.
inline float sum_of(const float* x, int64_t size) {
  Floats sums = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sums += load_floats(x + i);
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  for (; i < size; ++i) sum += x[i];
  return sum;
}

inline float sum_of(const uint16_t* x, int64_t size) {
  Floats sums = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    Words pairs;
    std::memcpy(&pairs, x + i, sizeof pairs);
    sums += (Floats)(pairs << 16) + (Floats)(pairs & 0xffff0000u);
  }
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  for (; i < size; ++i) sum += widen(x[i]);
  return sum;
}

// Products of a group of rows, at most kGroupRows, with a tile of codes in 4 bits that begins at
// column `first`. Codes are multiplied as they are; zero points and scales go on the sums of a group
// of inputs: sum(x (code - zero)) = sum(x code) - zero sum(x).
template <class Format>
void multiply_codes(int64_t rows, const typename Format::Element* x, int64_t depth,
                    const LinearWeight& weight, int64_t first, const char* words, int64_t columns,
                    float* out) {
  alignas(64) float sums[kBlockRows * kTileColumns];
  const int64_t size = weight.group_size, block_rows = equal_parts(rows, kBlockRows);
  const int64_t group_bytes = size / Format::kPerWord * kStepBytes;
  for (int64_t row = 0; row < rows; row += block_rows) {
    const int64_t block = rows - row < block_rows ? rows - row : block_rows;
    for (int64_t group = 0; group * size < depth; ++group) {
      const char* at = words + group * group_bytes;
      const typename Format::Element* from = x + row * depth + group * size;
      const Piece piece{at, size, depth, true, at + prefetch_bytes<Format>(rows), kStepBytes};
      multiply_rows<Format, kBlockRows>(block, piece, from, columns, sums);
      const float* scales = weight.scales + group * weight.num_columns + first;
      const uint8_t* zeros =
          weight.zeros ? weight.zeros + group * weight.num_columns + first : nullptr;
      alignas(64) float zero[kTileColumns];
      for (int64_t i = 0; i < columns; ++i)
        zero[i] = Format::kOffset + (zeros ? static_cast<float>(zeros[i]) : 8.0f);
      for (int64_t i = 0; i < block; ++i) {
        const float total = sum_of(from + i * depth, size);
        const float* of_group = sums + i * kTileColumns;
        float* y = out + (row + i) * kTileColumns;
        for (int64_t j = 0; j < columns; ++j)
          y[j] = (group ? y[j] : 0.0f) + scales[j] * (of_group[j] - zero[j] * total);
      }
    }
    if (depth == 0) std::memset(out + row * kTileColumns, 0, block * kTileColumns * sizeof *out);
  }
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

// Products of a group of rows, at most kGroupRows, with a tile.
template <class Format, class Used>
void multiply_tile(const LinearProblem& p, const Tile& tile, int64_t rows,
                   const typename Format::Element* x, float* out) {
  const char* words = words_of(p, tile);
  if constexpr (Format::kPerWord == 8)
    multiply_codes<Format>(rows, x, p.depth, *tile.weight, tile.first, words, tile.columns, out);
  else
    multiply_group<Format, Used>(rows, x, p.depth, words, tile.columns, out);
}

// Computes and stores some rows of a tile; with a gate, `value` is the tile that it scales.
template <class Format, class Used, class Output>
void run_tile(const LinearProblem& p, const Rows& range, const Tile& tile, const Tile& value) {
  using Element = typename Format::Element;
  const LinearWeight& weight = *tile.weight;
  const int64_t first = tile.first, columns = tile.columns;
  const bool is_gate = p.activation != Activation::kNone;
  alignas(64) float sums[kGroupRows * kTileColumns], values[kGroupRows * kTileColumns];
  const int64_t group_rows = equal_parts(range.last - range.first, kGroupRows);
  for (int64_t row = range.first; row < range.last; row += group_rows) {
    const int64_t rows = range.last - row < group_rows ? range.last - row : group_rows;
    const Element* x = static_cast<const Element*>(p.x) + row * p.depth;
    multiply_tile<Format, Used>(p, tile, rows, x, sums);
    if (is_gate) multiply_tile<Format, Used>(p, value, rows, x, values);
    for (int64_t i = 0; i < rows; ++i) {
      float* products = sums + i * kTileColumns;
      finish_products<Element>(weight, first, columns, products);
      if (is_gate) {
        finish_products<Element>(*value.weight, first, columns, values + i * kTileColumns);
        apply_gates(p, values + i * kTileColumns, products);
      }
      if (p.best_values) {
        const int64_t at = tile.index * p.num_rows + row + i;
        find_best(products, columns, p.best_values + at, p.best_columns + at);
        p.best_columns[at] += static_cast<int32_t>(first);
        continue;
      }
      const int64_t at = (row + i) * weight.num_columns + first;
      const bool has_residual = p.residual && &weight == p.weights;
      const Output* residual = has_residual ? static_cast<const Output*>(p.residual) + at : nullptr;
      store_row(products, residual, columns, static_cast<Output*>(weight.y) + at);
    }
  }
}

// Computes rows of the tile with the given number, counted through all weights, in `Format`; many
// rows in `Used`.
template <class Format, class Used = Format>
void compute_tile(const LinearProblem& p, int64_t number, const Rows& rows) {
  const bool is_gate = p.activation != Activation::kNone;
  const LinearWeight* weight = p.weights;
  if (!is_gate)
    for (; number >= num_tiles(weight->num_columns); ++weight)
      number -= num_tiles(weight->num_columns);
  const Tile tile = locate(*weight, number), value = locate(p.weights[is_gate], number);
  if (sizeof(typename Format::Element) == 2 && p.output_is_bf16)
    run_tile<Format, Used, uint16_t>(p, rows, tile, value);
  else
    run_tile<Format, Used, float>(p, rows, tile, value);
}

// The tile function of an instruction set: `Pairs` multiplies bfloat16 by bfloat16, `Quads` by int8,
// `Float8s` by e4m3, `Nibbles` by codes of 4 bits.
template <class Pairs, class Quads, class Float8s, class Nibbles>
void compute_typed_tile(const LinearProblem& p, int64_t number, const Rows& rows) {
  switch (p.weight_type) {
    case WeightType::kFloat32: return compute_tile<Singles>(p, number, rows);
    case WeightType::kBfloat16: return compute_tile<Pairs>(p, number, rows);
    case WeightType::kInt8:
      return p.is_bf16 ? compute_tile<Quads, Pairs>(p, number, rows)
                       : compute_tile<WidenedQuads<float>, Singles>(p, number, rows);
    case WeightType::kFloat8:
      return p.is_bf16 ? compute_tile<Float8s, Pairs>(p, number, rows)
                       : compute_tile<WidenedFloat8s<float>, Singles>(p, number, rows);
    case WeightType::kInt4:
      return p.is_bf16 ? compute_tile<Nibbles>(p, number, rows)
                       : compute_tile<WidenedNibbles<float>>(p, number, rows);
  }
}

}  // namespace
}  // namespace paged
