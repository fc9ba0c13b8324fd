// Root-mean-square normalisation of rows; arXiv:1910.07467.
#pragma once

#include "linear.h"
#include "vectors.h"

namespace paged {
namespace {

template <class Input, class Weight, class Output>
void normalize_row(const Input* x, const Weight* weight, int64_t size, float epsilon, Output* y) {
  // Four sums shorten the chain of dependent additions.
  Floats squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int part = 0; part < 4; ++part) {
      float values[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) values[lane] = widen(x[i + part * kLanes + lane]);
      const Floats wide = load_floats(values);
      squares[part] += wide * wide;
    }
  const Floats all = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += all[lane];
  for (; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
  const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(size) + epsilon);
  for (i = 0; i < size; ++i) narrow(widen(x[i]) * scale * widen(weight[i]), y + i);
}

template <class Input, class Weight, class Output>
void normalize_typed_rows(const NormProblem& p, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row)
    normalize_row(static_cast<const Input*>(p.x) + row * p.size,
                  static_cast<const Weight*>(p.weight), p.size, p.epsilon,
                  static_cast<Output*>(p.y) + row * p.size);
}

template <class Input>
void normalize_to_bf16(const NormProblem& p, int64_t first, int64_t last) {
  if (p.weight_is_bf16)
    normalize_typed_rows<Input, uint16_t, uint16_t>(p, first, last);
  else
    normalize_typed_rows<Input, float, uint16_t>(p, first, last);
}

void normalize(const NormProblem& p, int64_t first, int64_t last) {
  if (!p.y_is_bf16)
    normalize_typed_rows<float, float, float>(p, first, last);
  else if (p.x_is_bf16)
    normalize_to_bf16<uint16_t>(p, first, last);
  else
    normalize_to_bf16<float>(p, first, last);
}

}  // namespace
}  // namespace paged
