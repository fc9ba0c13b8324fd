// The native linear layer without XLA or Python, to be run under sanitizers.
//
// Every array is a heap block of its own of exactly the size it should have, so that reading or
// writing one element beyond it is seen. Prints what differs from a plain loop in double.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu_level.h"
#include "linear_run.h"
#include "pool.h"

namespace {

float from_bf16(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Multiples of 1/8, exact in bfloat16, with sums that are exact in float32.
template <class T>
T make(int eighths) {
  const float value = static_cast<float>(eighths) / 8;
  if constexpr (sizeof(T) == 4) return value;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<T>(bits >> 16);
}

float value_of(float value) { return value; }
float value_of(uint16_t value) { return from_bf16(value); }

template <class T>
bool check(Pool& pool, int level, int64_t m, int64_t n, int64_t k, bool with_bias) {
  std::mt19937 random(static_cast<unsigned>(m * 131 + n * 17 + k));
  auto fill = [&](size_t size) {
    std::vector<T> values(size);
    for (auto& value : values) value = make<T>(static_cast<int>(random() % 17) - 8);
    values.shrink_to_fit();
    return values;
  };
  const std::vector<T> x = fill(m * k), w = fill(n * k), bias = fill(n);
  std::vector<float> y(m * n, NAN);
  paged::LinearProblem p{x.data(), nullptr, with_bias ? bias.data() : nullptr, y.data(), m, k, n,
                         sizeof(T) == 2, false};
  const int64_t per_word = 4 / sizeof(T), steps = paged::num_steps(p);
  std::vector<T> packed(paged::num_tiles(p) * steps * paged::kTileColumns * per_word, T{});
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < k; ++j)
      packed[(((i / 64) * steps + j / per_word) * 64 + i % 64) * per_word + j % per_word] =
          w[i * k + j];
  p.weight = packed.data();
  paged::run_linear(pool, p, paged::tile_function(level));
  for (int64_t row = 0; row < m; ++row)
    for (int64_t i = 0; i < n; ++i) {
      double expected = with_bias ? value_of(bias[i]) : 0;
      for (int64_t j = 0; j < k; ++j)
        expected += double{value_of(x[row * k + j])} * double{value_of(w[i * k + j])};
      if (y[row * n + i] != static_cast<float>(expected)) {
        std::printf("level %d: [%ld, %ld] of %ld x %ld x %ld is %g, not %g\n", level,
                    static_cast<long>(row), static_cast<long>(i), static_cast<long>(m),
                    static_cast<long>(n), static_cast<long>(k), y[row * n + i], expected);
        return false;
      }
    }
  return true;
}

}  // namespace

int main() {
  int failures = 0, checks = 0;
  for (int threads : {1, 4}) {
    Pool pool(threads);
    for (int level = 0; level <= paged::best_level(); ++level)
      for (int64_t m : {1, 2, 3, 5, 6, 7, 13})
        for (int64_t n : {1, 63, 64, 200, 1300})
          for (int64_t k : {1, 2, 9, 66})
            for (bool with_bias : {false, true}) {
              failures += !check<float>(pool, level, m, n, k, with_bias);
              failures += !check<uint16_t>(pool, level, m, n, k, with_bias);
              checks += 2;
            }
    // Loops inside tasks of the same pool, all of whose threads wait in such loops.
    std::atomic<int> inner{0};
    paged::parallel_for(pool, 64, [&](int64_t) {
      paged::parallel_for(pool, 16, [&inner](int64_t) { ++inner; });
    });
    failures += inner != 64 * 16;
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures != 0;
}
