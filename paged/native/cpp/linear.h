// Linear layers of one input, y = x w^T + bias, cut into tiles of 64 output columns.
//
// A weight w [N, K] is packed, output columns innermost, so that a tile is one contiguous range of
// memory that is read once and in order: 32-bit words [ceil(N / 64)][steps][64], where a word holds
// neighbours along K of one column: one float32, two bfloat16 (as the dot-product instruction of
// AVX512-BF16 wants them), four int8 or e4m3, or eight codes of 4 bits: those of inputs 0, 2, 4, 6,
// then of 1, 3, 5, 7, low bits first. What pads N and K is zero.
//
// This header reaches files that are compiled for CPUs the program may not run on. The linker keeps
// one copy of each inline function, from any of them, so nothing here may have external linkage but
// the declarations, and no such file may include a header of the C++ library that has templates.
#pragma once

#include <cstdint>

namespace paged {

static constexpr int64_t kTileColumns = 64;
static constexpr int64_t kStepBytes = kTileColumns * 4;
static constexpr int kMaxWeights = 4;

enum class WeightType : int32_t { kFloat32, kBfloat16, kInt8, kFloat8, kInt4 };

// What a gate's product goes through before it scales another product.
// The last clamps both, and adds 1 to what is scaled.
enum class Activation : int32_t { kNone, kSilu, kGeluTanh, kClampedSwiglu };

struct LinearWeight {
  const void* words;    // packed
  // Of int8 and e4m3 [num_columns], multiply the products; of 4 bits [groups, num_columns], multiply
  // the products of a group of inputs; null for other types.
  const float* scales;
  const void* bias;     // [num_columns] of x's type, or null
  void* y;              // [num_rows, num_columns], or null
  int64_t num_columns;
  // Of 4 bits:
  const uint8_t* zeros = nullptr;  // as the scales, what codes are less by; null: 8
  int64_t group_size = 0;          // inputs of a group, a multiple of 8
};

struct LinearProblem {
  const void* x;  // [num_rows, depth]
  int64_t num_rows;
  int64_t depth;
  LinearWeight weights[kMaxWeights];
  int num_weights;
  WeightType weight_type;
  bool is_bf16;           // type of x and the biases; else float32
  bool output_is_bf16;    // type of the results; else float32
  Activation activation;  // if there is one, y of weight 0 is activation(product 0) * product 1
  const void* residual;   // as y of weight 0 and of its type, added to it; or null
  // The largest product of each row among a tile's columns, and the first column that has it:
  // [tiles, num_rows] each, written instead of y; null elsewhere. A NaN among them is the largest.
  float* best_values;
  int32_t* best_columns;
  // Of kClampedSwiglu: gates go to at most the limit, what they scale from -limit to limit, and
  // the sigmoid is of slope * gate.
  float gate_slope;
  float gate_limit;
};

// Root-mean-square normalisation of rows, computed in float32: y = x / rms(x) * weight. What is
// bfloat16 otherwise is float32; if y is float32, all is.
struct NormProblem {
  const void* x;       // [num_rows, size]
  const void* weight;  // [size]
  void* y;             // [num_rows, size]
  int64_t num_rows;
  int64_t size;
  float epsilon;  // added to the mean square
  bool x_is_bf16;
  bool weight_is_bf16;
  bool y_is_bf16;
};

static inline int64_t elements_per_word(WeightType type) {
  switch (type) {
    case WeightType::kFloat32: return 1;
    case WeightType::kBfloat16: return 2;
    case WeightType::kInt4: return 8;
    default: return 4;
  }
}

// Words along K of a packed tile.
static inline int64_t num_steps(const LinearProblem& p) {
  const int64_t elements = elements_per_word(p.weight_type);
  return (p.depth + elements - 1) / elements;
}

static inline int64_t num_tiles(int64_t num_columns) {
  return (num_columns + kTileColumns - 1) / kTileColumns;
}

// Tiles of all weights; a gate and what it scales are computed together.
static inline int64_t num_tiles(const LinearProblem& p) {
  if (p.activation != Activation::kNone) return num_tiles(p.weights[0].num_columns);
  int64_t tiles = 0;
  for (int i = 0; i < p.num_weights; ++i) tiles += num_tiles(p.weights[i].num_columns);
  return tiles;
}

// The whole of `total` in equal parts of at most `most`: the size of a part.
static inline int64_t equal_parts(int64_t total, int64_t most) {
  const int64_t parts = (total + most - 1) / most;
  return parts ? (total + parts - 1) / parts : 1;
}

// Rows [first, last) of x.
struct Rows {
  int64_t first, last;
};

// The code for one instruction set.
struct LinearKernels {
  // Computes the columns of one tile for some rows.
  void (*compute_tile)(const LinearProblem&, int64_t tile, const Rows&);
  // Normalises rows [first, last).
  void (*normalize)(const NormProblem&, int64_t first, int64_t last);
  // So many rows go through a tile together; more are other calls' business.
  int64_t group_rows;
};

extern const LinearKernels kLinearPortable;
#if defined(__x86_64__)
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512Bf16;
#endif

}  // namespace paged
