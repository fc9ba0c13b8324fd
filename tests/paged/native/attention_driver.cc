// Attention and the writes to the cache without XLA or Python, to be run under sanitizers.
//
// Random ragged batches. Every array is a heap block of its own of exactly the size it should have,
// and slots that nobody owns hold NaN. Prints what differs from plain loops in double.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "attention_run.h"
#include "cpu_level.h"
#include "kv_write_run.h"
#include "pool.h"

namespace {

using paged::ElementType;

std::mt19937 random_bits(7);

int64_t below(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint64_t>(n)); }

double value_at(ElementType type, const void* array, int64_t index) {
  const char* bytes = static_cast<const char*>(array);
  switch (type) {
    case ElementType::kFloat32: return paged::element_at<paged::Float32>(bytes, index);
    case ElementType::kBfloat16: return paged::element_at<paged::Bfloat16>(bytes, index);
    case ElementType::kFloat8E4M3: return paged::element_at<paged::Float8E4M3>(bytes, index);
    case ElementType::kFloat8E5M2: return paged::element_at<paged::Float8E5M2>(bytes, index);
  }
  return NAN;
}

// All elements of an array: each is read many times, and reading one is slow under sanitizers.
std::vector<double> widened(ElementType type, const std::vector<char>& array) {
  std::vector<double> values(array.size() / paged::element_bytes(type));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = value_at(type, array.data(), static_cast<int64_t>(i));
  return values;
}

void set_row(ElementType type, std::vector<char>& array) {
  const int64_t size = static_cast<int64_t>(array.size()) / paged::element_bytes(type);
  for (int64_t i = 0; i < size; ++i) {
    const float value = static_cast<float>(below(2001) - 1000) / 500;
    if (type == ElementType::kFloat32)
      std::memcpy(&array[4 * i], &value, 4);
    else {
      const uint16_t half = paged::Bfloat16::narrow(value);
      std::memcpy(&array[2 * i], &half, 2);
    }
  }
}

struct Case {
  int64_t kv_heads, heads, head_dim, block_size, window;
  ElementType type, kv_type;
  float soft_cap;
  bool extras;  // scales and sinks
  int64_t planes;
};

// Writes the keys and values of a batch token by token, then attends to them.
bool check(Pool& pool, int level, const Case& c) {
  const int64_t num_seqs = 1 + below(5), bytes = paged::element_bytes(c.type);
  std::vector<int32_t> lens, starts{0}, slots;
  int64_t max_blocks = 1, num_blocks = 1;
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t length = below(8) ? 1 + below(below(12) ? 60 : 1100) : 0;
    const int64_t rows = length ? 1 + (below(2) ? 0 : below(std::min<int64_t>(length, 50))) : 0;
    lens.push_back(static_cast<int32_t>(length));
    starts.push_back(static_cast<int32_t>(starts.back() + rows));
    const int64_t blocks = (length + c.block_size - 1) / c.block_size;
    max_blocks = std::max(max_blocks, blocks);
    num_blocks += blocks;
  }
  std::vector<int32_t> free_blocks(num_blocks - 1), tables(num_seqs * max_blocks, 0);
  std::iota(free_blocks.begin(), free_blocks.end(), 1);
  std::shuffle(free_blocks.begin(), free_blocks.end(), random_bits);
  for (int64_t i = 0; i < num_seqs; ++i)
    for (int64_t position = 0; position < lens[i]; ++position) {
      int32_t& block = tables[i * max_blocks + position / c.block_size];
      if (position % c.block_size == 0) {
        block = free_blocks.back();
        free_blocks.pop_back();
      }
      slots.push_back(static_cast<int32_t>(block * c.block_size + position % c.block_size));
    }
  const int64_t num_tokens = starts.back() + below(3), num_written = static_cast<int64_t>(slots.size());
  std::vector<char> k(num_written * c.kv_heads * c.head_dim * bytes), v(k.size());
  std::vector<char> q(num_tokens * c.heads * c.head_dim * bytes), out(q.size(), 1);
  set_row(c.type, k);
  set_row(c.type, v);
  set_row(c.type, q);
  // All ones are a NaN in every type.
  std::vector<char> cache(
      num_blocks * c.planes * c.kv_heads * c.block_size * c.head_dim *
          paged::element_bytes(c.kv_type),
      -1);
  std::vector<float> scales(c.planes * c.kv_heads, 1.5f), sinks(c.heads, 0.5f);
  // No rotation: angles of zero for all pairs there are.
  const int64_t half = c.head_dim / 2;
  const std::vector<float> cosine(num_written * half, 1.0f), sine(num_written * half, 0.0f);
  std::vector<char> rotated(k.size());
  paged::KvWriteProblem w{};
  w.q = k.data();
  w.q_out = rotated.data();
  w.num_q_heads = c.kv_heads;
  w.k = k.data();
  w.v = c.planes == 2 ? v.data() : nullptr;
  w.cosine = cosine.data();
  w.sine = sine.data();
  w.half = half;
  w.slots = slots.data();
  w.kv_scales = c.extras ? scales.data() : nullptr;
  w.kv_cache = cache.data();
  w.num_tokens = num_written;
  w.num_kv_heads = c.kv_heads;
  w.head_dim = c.head_dim;
  w.num_blocks = num_blocks;
  w.num_planes = c.planes;
  w.block_size = c.block_size;
  w.type = c.type;
  w.kv_type = c.kv_type;
  paged::run_kv_write(pool, w, paged::kv_write_function(level));
  if (rotated != k) return std::printf("level %d: a rotation by nothing changed rows\n", level), false;

  paged::AttentionProblem p{};
  p.q = q.data();
  p.kv_cache = cache.data();
  p.block_tables = tables.data();
  p.seq_lens = lens.data();
  p.query_start_loc = starts.data();
  p.kv_scales = w.kv_scales;
  p.sinks = c.extras ? sinks.data() : nullptr;
  p.out = out.data();
  p.num_tokens = num_tokens;
  p.num_q_heads = c.heads;
  p.num_blocks = num_blocks;
  p.num_planes = c.planes;
  p.num_kv_heads = c.kv_heads;
  p.block_size = c.block_size;
  p.head_dim = c.head_dim;
  p.num_seqs = num_seqs;
  p.max_blocks = max_blocks;
  p.window = c.window ? c.window : int64_t{1} << 40;
  p.scale = 0.3f;
  p.soft_cap = c.soft_cap;
  p.q_type = c.type;
  p.kv_type = c.kv_type;
  paged::run_attention(pool, p, paged::attention_kernel(level));

  const std::vector<double> queries = widened(c.type, q), cached = widened(c.kv_type, cache);
  std::vector<double> expected(num_tokens * c.heads * c.head_dim, 0.0);
  const double scale = c.extras ? 1.5 : 1.0;
  for (int64_t seq = 0; seq < num_seqs; ++seq)
    for (int64_t row = starts[seq]; row < starts[seq + 1]; ++row)
      for (int64_t head = 0; head < c.heads; ++head) {
        const int64_t position = lens[seq] - starts[seq + 1] + row;
        const int64_t kv_head = head / (c.heads / c.kv_heads);
        double total = c.extras ? std::exp(0.5) : 0.0;
        double* result = &expected[(row * c.heads + head) * c.head_dim];
        for (int64_t key = c.window ? std::max<int64_t>(0, position - c.window + 1) : 0;
             key <= position; ++key) {
          const int64_t at =
              ((tables[seq * max_blocks + key / c.block_size] * c.planes * c.kv_heads + kv_head) *
                   c.block_size + key % c.block_size) * c.head_dim;
          const int64_t to_value = (c.planes - 1) * c.kv_heads * c.block_size * c.head_dim;
          const double* query = &queries[(row * c.heads + head) * c.head_dim];
          const double *keys = &cached[at], *values = &cached[at + to_value];
          double score = 0;
          for (int64_t d = 0; d < c.head_dim; ++d) score += query[d] * keys[d];
          score *= double{0.3f} * scale;
          if (c.soft_cap != 0) score = c.soft_cap * std::tanh(score / c.soft_cap);
          const double weight = std::exp(score);
          total += weight;
          for (int64_t d = 0; d < c.head_dim; ++d) result[d] += weight * scale * values[d];
        }
        for (int64_t d = 0; d < c.head_dim; ++d) result[d] /= total;
      }
  // Values are at most 3 in size, a cache of 8 bits included, and bfloat16 rounds at 2^-8.
  const double limit = c.type == ElementType::kFloat32 ? 1e-4 : 3 * 3.0 / 256;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double got = value_at(c.type, out.data(), static_cast<int64_t>(i));
    if (!(std::abs(got - expected[i]) <= limit)) {
      std::printf("level %d, head_dim %ld, block %ld, window %ld, planes %ld: element %zu is %g, not %g\n", level,
                  static_cast<long>(c.head_dim), static_cast<long>(c.block_size),
                  static_cast<long>(c.window), static_cast<long>(c.planes), i, got, expected[i]);
      return false;
    }
  }
  return true;
}

}  // namespace

int main() {
  int failures = 0, checks = 0;
  for (int threads : kPoolSizes) {
    Pool pool(threads);
    for (int level = 0; level <= paged::best_level(); ++level)
      for (int64_t head_dim : {1, 37, 64, 80})
        for (int64_t block_size : {1, 7, 16})
          for (int kind = 0; kind < 4; ++kind) {
            const auto kv_type = static_cast<ElementType>(kind);
            const bool is_odd = (checks / 2) % 2;
            for (ElementType type : {ElementType::kFloat32, ElementType::kBfloat16}) {
              const Case c{is_odd ? 1 : 2, is_odd ? 7 : 6, head_dim, block_size, is_odd ? 40 : 0,
                           type, kv_type, checks % 3 ? 0.0f : 5.0f, checks % 5 < 2, 1 + checks % 7 % 2};
              failures += !check(pool, level, c);
              ++checks;
            }
          }
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures != 0;
}
