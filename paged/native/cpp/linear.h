// One linear layer, y = x w^T + bias, cut into tiles of 64 output columns.
//
// The weight w [N, K] is packed, output columns innermost, so that a tile is one contiguous range
// of memory that is read once and in order:
//   bfloat16: [ceil(N / 64)][ceil(K / 2)][64][2]    float32: [ceil(N / 64)][K][64][1]
// Both are 32-bit words [tiles][steps][64]; a bfloat16 word holds two neighbours along K, as the
// dot-product instruction of AVX512-BF16 wants them. What pads N and K is zero.
//
// This header reaches files that are compiled for CPUs the program may not run on. The linker keeps
// one copy of each inline function, from any of them, so nothing here may have external linkage but
// the declarations, and no such file may include a header of the C++ library that has templates.
#pragma once

#include <cstdint>

namespace paged {

static constexpr int64_t kTileColumns = 64;

struct LinearProblem {
  const void* x;       // [num_rows, depth]
  const void* weight;  // packed
  const void* bias;    // [num_columns], or null
  void* y;             // [num_rows, num_columns]
  int64_t num_rows;
  int64_t depth;
  int64_t num_columns;
  bool is_bf16;         // type of x, weight and bias; else float32
  bool output_is_bf16;  // type of y; else float32
};

// Words along K of a packed tile.
static inline int64_t num_steps(const LinearProblem& p) {
  return p.is_bf16 ? (p.depth + 1) / 2 : p.depth;
}

static inline int64_t num_tiles(const LinearProblem& p) {
  return (p.num_columns + kTileColumns - 1) / kTileColumns;
}

// Computes the columns of one tile for all rows.
using TileFunction = void (*)(const LinearProblem&, int64_t tile);

void linear_tile_portable(const LinearProblem&, int64_t tile);
#if defined(__x86_64__)
void linear_tile_avx2(const LinearProblem&, int64_t tile);
void linear_tile_avx512_bf16(const LinearProblem&, int64_t tile);
#endif

}  // namespace paged
