// The native products with weights of 4 bits and of e4m3, to be run under sanitizers.
//
// As linear_driver.cc: heap blocks of exactly the size they should have, against a plain loop.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "cpu_level.h"
#include "eighths.h"
#include "linear_run.h"
#include "pool.h"

namespace {

using paged::WeightType;

// e4m3 of 0 to 8 eighths; with the sign bit, of minus as many.
constexpr uint8_t kFloat8Eighths[] = {0x00, 0x20, 0x28, 0x2c, 0x30, 0x32, 0x34, 0x36, 0x38};
constexpr int kInputOfNibble[] = {0, 2, 4, 6, 1, 3, 5, 7};

// A weight [n, k], what it stands for and how it is packed; scales are 1/8.
template <class T>
struct Weight {
  Weight(std::mt19937& random, WeightType type, int64_t n, int64_t k, int64_t group, bool has_zeros)
      : values(n * k), bias(fill<T>(random, n)) {
    const int64_t per_word = type == WeightType::kInt4 ? 8 : 4, steps = (k + per_word - 1) / per_word;
    const int64_t groups = group ? k / group : 1;
    words.assign(paged::num_tiles(n) * steps * 64, 0);
    scales.assign(groups * n, 0.125f);
    if (has_zeros) zeros.resize(groups * n);
    for (auto& zero : zeros) zero = static_cast<uint8_t>(random() % 16);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < k; ++j) {
        uint32_t& word = words[((i / 64) * steps + j / per_word) * 64 + i % 64];
        if (type == WeightType::kInt4) {
          const uint32_t code = random() % 16;
          int nibble = 0;
          while (kInputOfNibble[nibble] != j % 8) ++nibble;
          word |= code << (4 * nibble);
          const int zero = has_zeros ? zeros[j / group * n + i] : 8;
          values[i * k + j] = (static_cast<int>(code) - zero) / 8.0;
        } else {
          const int eighths = static_cast<int>(random() % 17) - 8;
          const uint32_t byte = kFloat8Eighths[std::abs(eighths)] | (eighths < 0 ? 0x80u : 0u);
          word |= byte << (8 * (j % 4));
          values[i * k + j] = eighths / 64.0;
        }
      }
  }

  double product(const T* x, int64_t column, int64_t k) const {
    double sum = value_of(bias[column]);
    for (int64_t j = 0; j < k; ++j) sum += value_of(x[j]) * values[column * k + j];
    return sum;
  }

  paged::LinearWeight packed(int64_t n, int64_t group, float* y) const {
    return {words.data(), scales.data(), bias.data(), y, n,
            zeros.empty() ? nullptr : zeros.data(), group};
  }

  std::vector<double> values;
  std::vector<T> bias;
  std::vector<uint32_t> words;
  std::vector<float> scales;
  std::vector<uint8_t> zeros;
};

template <class T>
bool check(Pool& pool, int level, WeightType type, int64_t m, int64_t n, int64_t k, int64_t group,
           bool has_zeros) {
  std::mt19937 random(static_cast<unsigned>(m * 131 + n * 17 + k));
  const std::vector<T> x = fill<T>(random, m * k);
  const Weight<T> first(random, type, n, k, group, has_zeros), second(random, type, n, k, group, has_zeros);
  std::vector<float> y(m * n, NAN), y2(m * n, NAN);
  paged::LinearProblem p{};
  p.x = x.data();
  p.num_rows = m;
  p.depth = k;
  p.num_weights = 2;
  p.weights[0] = first.packed(n, group, y.data());
  p.weights[1] = second.packed(n, group, y2.data());
  p.weight_type = type;
  p.is_bf16 = sizeof(T) == 2;
  paged::run_linear(pool, p, *paged::linear_kernels(level));
  for (int64_t row = 0; row < m; ++row)
    for (int64_t i = 0; i < n; ++i)
      if (y[row * n + i] != first.product(&x[row * k], i, k) ||
          y2[row * n + i] != second.product(&x[row * k], i, k)) {
        std::printf("level %d, type %d, x of %zu bytes: %ld x %ld x %ld in groups of %ld differs\n",
                    level, static_cast<int>(type), sizeof(T), static_cast<long>(m),
                    static_cast<long>(n), static_cast<long>(k), static_cast<long>(group));
        return false;
      }
  return true;
}

}  // namespace

int main() {
  int failures = 0, checks = 0;
  for (int threads : kPoolSizes) {
    Pool pool(threads);
    for (int level = 0; level <= paged::best_level(); ++level)
      for (int64_t m : {1, 3, 7, 100})
        for (int64_t n : {1, 64, 200}) {
          for (int64_t k : {1, 9, 66, 300}) {
            failures += !check<float>(pool, level, WeightType::kFloat8, m, n, k, 0, false);
            failures += !check<uint16_t>(pool, level, WeightType::kFloat8, m, n, k, 0, false);
            checks += 2;
          }
          for (int64_t group : {8, 32, 40})
            for (int64_t groups : {1, 3}) {
              const bool has_zeros = checks / 2 % 2 == 0;
              const int64_t k = group * groups;
              failures += !check<float>(pool, level, WeightType::kInt4, m, n, k, group, has_zeros);
              failures += !check<uint16_t>(pool, level, WeightType::kInt4, m, n, k, group, has_zeros);
              checks += 2;
            }
        }
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures != 0;
}
