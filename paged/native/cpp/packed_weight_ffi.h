// Operands of a linear layer as XLA hands them over: read one after the other, and checked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "linear_run.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace paged {

// The axes of an operand, at most five.
class Shape {
 public:
  Shape(std::initializer_list<int64_t> axes) { append(axes); }

  // These axes, after the number of experts if there are such.
  Shape(std::optional<int64_t> num_experts, std::initializer_list<int64_t> axes) {
    if (num_experts) append({*num_experts});
    append(axes);
  }

  bool is(ffi::AnyBuffer buffer) const {
    const auto dimensions = buffer.dimensions();
    return std::equal(dimensions.begin(), dimensions.end(), axes_, axes_ + size_);
  }

 private:
  void append(std::initializer_list<int64_t> axes) {
    for (int64_t axis : axes) axes_[size_++] = axis;
  }

  int64_t axes_[5];
  size_t size_ = 0;
};

// Takes operands one after the other and remembers what was wrong with the first that did not fit.
class Operands {
 public:
  explicit Operands(ffi::RemainingArgs args) : args_(args) {}

  // The data of the next operand; null, and an error, unless it has this type and this shape.
  const void* take(const char* name, ffi::DataType type, const Shape& shape) {
    auto buffer = next(name);
    if (!buffer.has_value()) return nullptr;
    if (buffer->element_type() != type || !shape.is(*buffer)) {
      fail(std::string(name) + " has another type or shape than it should");
      return nullptr;
    }
    return buffer->untyped_data();
  }

  ffi::ErrorOr<ffi::AnyBuffer> next(const char* name) {
    auto buffer = args_.get<ffi::AnyBuffer>(taken_++);
    if (!buffer.has_value()) fail(std::string(name) + " is missing");
    return buffer;
  }

  // The type of the next operand, which stays; INVALID if there is none.
  ffi::DataType next_type() const {
    auto buffer = args_.get<ffi::AnyBuffer>(taken_);
    return buffer.has_value() ? buffer->element_type() : ffi::DataType::INVALID;
  }

  void fail(std::string message) {
    if (error_.success()) error_ = ffi::Error::InvalidArgument(std::move(message));
  }

  // The first error, or one if there are more operands than were taken.
  ffi::Error finish() {
    if (taken_ < args_.size()) fail("there are operands that nothing asks for");
    return error_;
  }

 private:
  ffi::RemainingArgs args_;
  size_t taken_ = 0;
  ffi::Error error_;
};

// The type of a packed weight for an x of type `type`; bytes without a sign are pairs of codes.
inline std::optional<WeightType> weight_type_of(ffi::DataType weight, ffi::DataType type) {
  switch (weight) {
    case ffi::S8: return WeightType::kInt8;
    case ffi::F8E4M3FN: return WeightType::kFloat8;
    case ffi::U8: return WeightType::kInt4;
    default: break;
  }
  if (weight != type) return std::nullopt;
  return type == ffi::F32 ? WeightType::kFloat32 : WeightType::kBfloat16;
}

// Reads what codes of 4 bits are multiplied by and less by: [E, groups, N] both, or without experts
// [groups, N].
inline void read_groups(Operands& operands, std::optional<int64_t> num_experts, int64_t depth,
                        bool has_zeros, LinearWeight* weight) {
  auto scales = operands.next("the scales");
  if (!scales.has_value()) return;
  const auto axes = scales->dimensions();
  const int64_t groups = axes.size() < 2 ? 0 : axes[axes.size() - 2];
  if (scales->element_type() != ffi::F32 || groups < 1 || depth % (8 * groups) ||
      !Shape(num_experts, {groups, weight->num_columns}).is(*scales))
    return operands.fail("the scales of 4-bit weights must be float32 for equal groups of inputs");
  weight->scales = static_cast<const float*>(scales->untyped_data());
  weight->group_size = depth / groups;
  if (has_zeros)
    weight->zeros = static_cast<const uint8_t*>(operands.take(
        "the zero points", ffi::U8, Shape(num_experts, {groups, weight->num_columns})));
}

// Reads one more packed weight of a problem, [tiles, steps, 64, elements of a word], and the scales
// [N] of 8 bits, or what 4 bits have instead; of all experts if there are such, one after the other.
inline void read_weight(Operands& operands, ffi::DataType type, std::optional<int64_t> num_experts,
                        int64_t num_columns, bool has_zeros, LinearProblem* p) {
  LinearWeight& weight = p->weights[p->num_weights++];
  weight.num_columns = num_columns;
  auto buffer = operands.next("a weight");
  if (!buffer.has_value()) return;
  const auto found = weight_type_of(buffer->element_type(), type);
  if (!found)
    return operands.fail("a weight must have the type of x, or int8, e4m3 or codes in uint8");
  if (p->num_weights > 1 && *found != p->weight_type)
    return operands.fail("the weights must all have one type");
  p->weight_type = *found;
  if (buffer->dimensions().size() != (num_experts ? 5 : 4))
    return operands.fail("a packed weight has four axes, and one more for experts");
  const int64_t per_word = 4 / static_cast<int64_t>(ffi::ByteWidth(buffer->element_type()));
  if (!Shape(num_experts, {num_tiles(num_columns), num_steps(*p), kTileColumns, per_word})
           .is(*buffer))
    return operands.fail("x, the packed weight and y do not fit each other");
  weight.words = buffer->untyped_data();
  if (*found == WeightType::kInt8 || *found == WeightType::kFloat8)
    weight.scales = static_cast<const float*>(
        operands.take("the scales", ffi::F32, Shape(num_experts, {num_columns})));
  if (*found == WeightType::kInt4)
    read_groups(operands, num_experts, p->depth, has_zeros, &weight);
}

inline const LinearKernels* kernels_of(int32_t level) {
  return linear_kernels(level < 0 ? best_level() : level);
}

inline ffi::Error unknown_level() {
  return ffi::Error::InvalidArgument("this CPU lacks that level");
}

}  // namespace paged
