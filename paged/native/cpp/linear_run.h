// A linear layer on a thread pool: which tiles go together.
#pragma once

#include <algorithm>

#include "linear.h"
#include "parallel_for.h"

namespace paged {

template <class Pool>
void run_linear(Pool& pool, const LinearProblem& p, TileFunction compute_tile) {
  // Items of up to 256 KiB of weights keep the counter quiet, and eight per layer or more even out
  // threads that start late.
  const int64_t tiles = num_tiles(p);
  const int64_t tile_bytes = std::max<int64_t>(1, num_steps(p) * kTileColumns * 4);
  const int64_t per_item =
      std::max<int64_t>(1, std::min<int64_t>(tiles / 8, (int64_t{256} << 10) / tile_bytes));
  parallel_for(pool, (tiles + per_item - 1) / per_item, [=](int64_t item) {
    const int64_t end = std::min(tiles, (item + 1) * per_item);
    for (int64_t tile = item * per_item; tile < end; ++tile) compute_tile(p, tile);
  });
}

}  // namespace paged
