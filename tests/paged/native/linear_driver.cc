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
#include "eighths.h"
#include "linear_run.h"
#include "pool.h"

namespace {

// A weight of type W [n, k], and its bias and scales.
template <class T, class W>
struct Weight {
  Weight(std::mt19937& random, int64_t n, int64_t k)
      : values(fill<W>(random, n * k)), bias(fill<T>(random, n)), scales(n, 0.125f) {}

  double product(const T* x, int64_t column, int64_t k) const {
    const W* weights = values.data() + column * k;
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += value_of(x[j]) * value_of(weights[j]);
    return (sizeof(W) == 1 ? sum / 8 : sum) + value_of(bias[column]);
  }

  paged::LinearWeight pack(int64_t n, int64_t k, float* y) {
    const int64_t per_word = 4 / sizeof(W), steps = (k + per_word - 1) / per_word;
    packed.assign(paged::num_tiles(n) * steps * 64 * per_word, W{});
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < k; ++j)
        packed[(((i / 64) * steps + j / per_word) * 64 + i % 64) * per_word + j % per_word] =
            values[i * k + j];
    return {packed.data(), sizeof(W) == 1 ? scales.data() : nullptr, bias.data(), y, n};
  }

  std::vector<W> values, packed;
  std::vector<T> bias;
  std::vector<float> scales;
};

enum class Mode { kPlain, kResidual, kTwo, kGated, kBest };

template <class T, class W>
bool check(Pool& pool, int level, int64_t m, int64_t n, int64_t k, Mode mode) {
  std::mt19937 random(static_cast<unsigned>(m * 131 + n * 17 + k));
  const std::vector<T> x = fill<T>(random, m * k);
  const std::vector<float> residual = fill<float>(random, m * n);
  const bool has_two = mode == Mode::kTwo || mode == Mode::kGated;
  Weight<T, W> first(random, n, k), second(random, has_two ? n : 0, k);
  std::vector<float> y(m * n, NAN), y2(m * n, NAN), best_values;
  std::vector<int32_t> best_columns, best(m, -1);
  paged::LinearProblem p{};
  p.x = x.data();
  p.num_rows = m;
  p.depth = k;
  p.num_weights = has_two ? 2 : 1;
  p.weights[0] = first.pack(n, k, y.data());
  if (has_two) p.weights[1] = second.pack(n, k, y2.data());
  p.weight_type = sizeof(W) == 1   ? paged::WeightType::kInt8
                  : sizeof(W) == 2 ? paged::WeightType::kBfloat16
                                   : paged::WeightType::kFloat32;
  p.is_bf16 = sizeof(T) == 2;
  if (mode == Mode::kResidual) p.residual = residual.data();
  if (mode == Mode::kGated) p.activation = paged::Activation::kSilu;
  if (mode == Mode::kBest) {
    best_values.resize(paged::num_tiles(p) * m);
    best_columns.resize(paged::num_tiles(p) * m);
    p.weights[0].bias = nullptr;
    p.weights[0].y = nullptr;
    p.best_values = best_values.data();
    p.best_columns = best_columns.data();
  }
  paged::run_linear(pool, p, *paged::linear_kernels(level));
  if (mode == Mode::kBest) paged::choose_best(p, best.data());
  bool is_right = true;
  for (int64_t row = 0; row < m; ++row) {
    int64_t largest = 0;
    double most = -INFINITY;
    for (int64_t i = 0; i < n; ++i) {
      double expected = first.product(&x[row * k], i, k), allowed = 0;
      if (mode == Mode::kBest) expected -= value_of(first.bias[i]);
      if (expected > most) most = expected, largest = i;
      if (mode == Mode::kBest) continue;
      if (mode == Mode::kResidual) expected += value_of(residual[row * n + i]);
      if (mode == Mode::kGated) {
        expected = expected / (1 + std::exp(-expected)) * second.product(&x[row * k], i, k);
        allowed = 1e-6 * std::fabs(expected) + 1e-30;
      }
      is_right &= std::fabs(y[row * n + i] - expected) <= allowed;
      if (mode == Mode::kTwo) is_right &= y2[row * n + i] == second.product(&x[row * k], i, k);
    }
    if (mode == Mode::kBest) is_right &= best[row] == largest;
  }
  if (!is_right)
    std::printf("level %d, mode %d, types of %zu and %zu bytes: %ld x %ld x %ld differs\n", level,
                static_cast<int>(mode), sizeof(T), sizeof(W), static_cast<long>(m),
                static_cast<long>(n), static_cast<long>(k));
  return is_right;
}

// Rows of 13 elements out of two tiles, whose last word is padded unless an element is a word.
template <class T>
bool check_rows(Pool& pool) {
  constexpr int64_t kSize = 13, kPerWord = 4 / sizeof(T), kTiles = 2;
  constexpr int64_t kSteps = (kSize + kPerWord - 1) / kPerWord, kOutputs = kTiles * 64;
  std::mt19937 random(7);
  const std::vector<T> packed = fill<T>(random, kOutputs * kSteps * kPerWord);
  std::vector<int32_t> rows(100);
  for (int32_t& row : rows) row = static_cast<int32_t>(random() % kOutputs);
  std::vector<T> y(rows.size() * kSize);
  paged::gather_rows(pool, {reinterpret_cast<const uint32_t*>(packed.data()), rows.data(),
                            reinterpret_cast<char*>(y.data()), static_cast<int64_t>(rows.size()),
                            kTiles, kSteps, static_cast<int64_t>(kSize * sizeof(T))});
  for (size_t i = 0; i < rows.size(); ++i)
    for (int64_t k = 0; k < kSize; ++k) {
      const int64_t step = rows[i] / 64 * kSteps + k / kPerWord;
      const T expected = packed[(step * 64 + rows[i] % 64) * kPerWord + k % kPerWord];
      if (std::memcmp(&y[i * kSize + k], &expected, sizeof(T)) != 0) {
        std::printf("row %d differs\n", rows[i]);
        return false;
      }
    }
  return true;
}

// From x of type X to y of type T, with a weight of type W.
template <class X, class W, class T>
bool check_norm(Pool& pool, int level, int64_t m, int64_t size) {
  std::mt19937 random(static_cast<unsigned>(m * 131 + size));
  const std::vector<X> x = fill<X>(random, m * size);
  const std::vector<W> weight = fill<W>(random, size);
  std::vector<T> y(m * size);
  const float epsilon = 0.5f;
  paged::run_norm(pool,
                  {x.data(), weight.data(), y.data(), m, size, epsilon, sizeof(X) == 2,
                   sizeof(W) == 2, sizeof(T) == 2},
                  *paged::linear_kernels(level));
  for (int64_t row = 0; row < m; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += std::pow(value_of(x[row * size + i]), 2);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(size) + epsilon);
    for (int64_t i = 0; i < size; ++i) {
      const double expected = value_of(x[row * size + i]) * scale * value_of(weight[i]);
      const double allowed = std::fabs(expected) * (sizeof(T) == 2 ? 1.0 / 256 : 1e-6);
      if (!(std::fabs(value_of(y[row * size + i]) - expected) <= allowed)) {
        std::printf("level %d: the norm of %ld x %ld differs\n", level, static_cast<long>(m),
                    static_cast<long>(size));
        return false;
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  int failures = 0, checks = 0;
  for (int threads : kPoolSizes) {
    Pool pool(threads);
    for (int level = 0; level <= paged::best_level(); ++level) {
      for (int64_t m : {1, 3, 6, 7, 13, 100})
        for (int64_t n : {1, 64, 200, 1300})
          for (int64_t k : {1, 9, 66, 300}) {
            if (m == 100 && n * k > 20000) continue;
            const Mode mode = static_cast<Mode>(checks / 4 % 5);
            failures += !check<float, float>(pool, level, m, n, k, mode);
            failures += !check<uint16_t, uint16_t>(pool, level, m, n, k, mode);
            failures += !check<float, int8_t>(pool, level, m, n, k, mode);
            failures += !check<uint16_t, int8_t>(pool, level, m, n, k, mode);
            checks += 4;
          }
      for (int64_t m : {1, 100})
        for (int64_t size : {1, 63, 64, 600}) {
          failures += !check_norm<float, float, float>(pool, level, m, size);
          failures += !check_norm<float, float, uint16_t>(pool, level, m, size);
          failures += !check_norm<float, uint16_t, uint16_t>(pool, level, m, size);
          failures += !check_norm<uint16_t, float, uint16_t>(pool, level, m, size);
          failures += !check_norm<uint16_t, uint16_t, uint16_t>(pool, level, m, size);
        }
    }
    failures += !check_rows<float>(pool) + !check_rows<uint16_t>(pool) + !check_rows<int8_t>(pool);
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
