// What happens to the sums of a tile before they are stored: scales, bias, activation, residual.
#pragma once

#include "linear.h"
#include "vectors.h"

namespace paged {
namespace {

// Scales sums of products of 8 bits, of which those of 4 bits come scaled, and adds the bias.
template <class Element>
inline void finish_products(const LinearWeight& weight, int64_t first, int64_t columns,
                            float* sums) {
  if (weight.scales && weight.group_size == 0)
    for (int64_t i = 0; i < columns; ++i) sums[i] *= weight.scales[first + i];
  if (weight.bias) {
    const Element* bias = static_cast<const Element*>(weight.bias) + first;
    for (int64_t i = 0; i < columns; ++i) sums[i] += widen(bias[i]);
  }
}

// The same for kClampedSwiglu.
inline void apply_clamped_gates(float slope, float limit, const float* values, float* gates) {
  const Floats most = Floats{} + limit, least = -most;
  for (int64_t i = 0; i < kTileColumns; i += kLanes) {
    Floats g = load_floats(gates + i), v = load_floats(values + i);
    g = g > most ? most : g;  // a NaN stays one
    v = v > most ? most : v;
    v = v < least ? least : v;
    store_floats(g / (1.0f + exponential(-slope * g)) * (v + 1.0f), gates + i);
  }
}

// gates = activation(gates) * values, for kTileColumns of each. Both other activations are
// g / (1 + e^-z): z is g for SiLU, and for GELU what makes its tanh a sigmoid.
inline void apply_gates(const LinearProblem& p, const float* values, float* gates) {
  const Activation activation = p.activation;
  if (activation == Activation::kClampedSwiglu)
    return apply_clamped_gates(p.gate_slope, p.gate_limit, values, gates);
  for (int64_t i = 0; i < kTileColumns; i += kLanes) {
    const Floats g = load_floats(gates + i);
    const Floats z = activation == Activation::kSilu
                         ? g
                         : 1.5957691216f * (g + 0.044715f * g * g * g);
    store_floats(g / (1.0f + exponential(-z)) * load_floats(values + i), gates + i);
  }
}

template <class Output>
inline void store_row(const float* sums, const Output* residual, int64_t columns, Output* out) {
  if (residual)
    for (int64_t i = 0; i < columns; ++i) narrow(sums[i] + widen(residual[i]), out + i);
  else
    for (int64_t i = 0; i < columns; ++i) narrow(sums[i], out + i);
}

// Finds the largest of `columns` sums and the first that equals it; a NaN is larger than all.
inline void find_best(float* sums, int64_t columns, float* value, int32_t* index) {
  for (int64_t i = columns; i < kTileColumns; ++i) sums[i] = -__builtin_inff();
  Floats most = load_floats(sums);
  Ints is_nan = most != most;
  for (int64_t i = kLanes; i < kTileColumns; i += kLanes) {
    const Floats next = load_floats(sums + i);
    is_nan |= next != next;
    most = next > most ? next : most;
  }
  float best = most[0];
  int32_t has_nan = is_nan[0];
  for (int i = 1; i < kLanes; ++i) {
    best = most[i] > best ? most[i] : best;
    has_nan |= is_nan[i];
  }
  int64_t at = 0;
  if (has_nan)
    best = __builtin_nanf("");
  else
    while (sums[at] != best) ++at;
  *value = best;
  *index = static_cast<int32_t>(at);
}

}  // namespace
}  // namespace paged
