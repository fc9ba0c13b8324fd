// Linear layers on a thread pool: which tiles go together, what comes before and after them.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "linear.h"
#include "parallel_for.h"

namespace paged {

// How many of a call's tiles a thread takes at a time. Items of up to 256 KiB of weights keep the
// counter quiet, and eight per call or more even out threads that start late.
inline int64_t tiles_per_item(const LinearProblem& p, int64_t tiles) {
  const int64_t tile_bytes = std::max<int64_t>(1, num_steps(p) * kStepBytes);
  return std::max<int64_t>(1, std::min<int64_t>(tiles / 8, (int64_t{256} << 10) / tile_bytes));
}

template <class Pool>
void run_linear(Pool& pool, const LinearProblem& p, const LinearKernels& kernels) {
  const int64_t tiles = num_tiles(p), per_item = tiles_per_item(p, tiles);
  const auto compute_tile = kernels.compute_tile;
  parallel_for(pool, (tiles + per_item - 1) / per_item, [=](int64_t item) {
    const int64_t end = std::min(tiles, (item + 1) * per_item);
    for (int64_t tile = item * per_item; tile < end; ++tile) compute_tile(p, tile);
  });
}

// Groups of rows, each with weights of its own, of which all but the number of rows is the same.
template <class Pool>
void run_groups(Pool& pool, std::vector<LinearProblem> groups, const LinearKernels& kernels) {
  if (groups.empty()) return;
  const int64_t tiles = num_tiles(groups[0]), total = tiles * static_cast<int64_t>(groups.size());
  const int64_t per_item = tiles_per_item(groups[0], total);
  const auto compute_tile = kernels.compute_tile;
  const auto shared = std::make_shared<const std::vector<LinearProblem>>(std::move(groups));
  parallel_for(pool, (total + per_item - 1) / per_item, [=](int64_t item) {
    const int64_t end = std::min(total, (item + 1) * per_item);
    for (int64_t tile = item * per_item; tile < end; ++tile)
      compute_tile((*shared)[static_cast<size_t>(tile / tiles)], tile % tiles);
  });
}

template <class Pool>
void run_norm(Pool& pool, const NormProblem& p, const LinearKernels& kernels) {
  // An item of 16 Ki elements takes microseconds, about what waking a thread does.
  const int64_t rows = std::max<int64_t>(1, (int64_t{16} << 10) / std::max<int64_t>(1, p.size));
  const auto normalize = kernels.normalize;
  parallel_for(pool, (p.num_rows + rows - 1) / rows, [=](int64_t item) {
    normalize(p, item * rows, std::min(p.num_rows, (item + 1) * rows));
  });
}

// Rows of a packed weight, as they were before it was packed.
struct RowsProblem {
  const uint32_t* words;  // [tiles, steps, 64]
  const int32_t* rows;    // [num_rows]; clamped to those that there are
  char* y;                // [num_rows, row_bytes]
  int64_t num_rows, num_tiles, num_steps, row_bytes;
};

template <class Pool>
void gather_rows(Pool& pool, const RowsProblem& p) {
  // A row's words are 64 words apart, so each is a cache line of its own; 8 rows take microseconds.
  constexpr int64_t kRowsPerItem = 8;
  parallel_for(pool, (p.num_rows + kRowsPerItem - 1) / kRowsPerItem, [=](int64_t item) {
    const int64_t end = std::min(p.num_rows, (item + 1) * kRowsPerItem);
    for (int64_t i = item * kRowsPerItem; i < end; ++i) {
      const int64_t last = p.num_tiles * kTileColumns - 1;
      const int64_t row = std::max<int64_t>(0, std::min<int64_t>(last, p.rows[i]));
      const uint32_t* word =
          p.words + row / kTileColumns * p.num_steps * kTileColumns + row % kTileColumns;
      char* y = p.y + i * p.row_bytes;
      int64_t left = p.row_bytes;
      for (; left >= 4; left -= 4, y += 4, word += kTileColumns) std::memcpy(y, word, 4);
      // The last word may be padded.
      if (left > 0) std::memcpy(y, word, static_cast<size_t>(left));
    }
  });
}

// From the best of each tile to the best of each row, [num_rows]: the first that is largest, or the
// last column if there is a NaN.
inline void choose_best(const LinearProblem& p, int32_t* columns) {
  const int64_t rows = p.num_rows;
  // The values of tile 0 become the largest so far.
  float* most = p.best_values;
  std::copy(p.best_columns, p.best_columns + rows, columns);
  for (int64_t tile = 1; tile < num_tiles(p); ++tile)
    for (int64_t row = 0; row < rows; ++row) {
      const float value = p.best_values[tile * rows + row];
      // False for a NaN that is kept; a new one replaces it, which makes no difference.
      if (value > most[row] || value != value) {
        most[row] = value;
        columns[row] = p.best_columns[tile * rows + row];
      }
    }
  for (int64_t row = 0; row < rows; ++row)
    if (most[row] != most[row]) columns[row] = static_cast<int32_t>(p.weights[0].num_columns - 1);
}

}  // namespace paged
