// The entry point of linear layers of experts: a group of rows for each, with weights of its own.
#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "cpu_level.h"
#include "linear_run.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using ffi::Error;
using paged::LinearProblem;
using paged::WeightType;

// The packed weights of all experts, and how far those of one are from those of the next.
struct Stack {
  paged::LinearWeight first;
  int64_t words_bytes;
  int64_t num_scales;
};

// Takes operands of experts one after the other.
class Operands {
 public:
  explicit Operands(ffi::RemainingArgs args) : args_(args) {}

  ffi::ErrorOr<ffi::AnyBuffer> next() { return args_.get<ffi::AnyBuffer>(taken_++); }

  // The data of the next operand, which must be of this type and shape; else the error says so.
  Error take(const char* error, ffi::DataType type, std::initializer_list<int64_t> shape,
             const void** data) {
    auto buffer = next();
    if (!buffer.has_value()) return buffer.error();
    const auto dimensions = buffer->dimensions();
    if (buffer->element_type() != type ||
        !std::equal(dimensions.begin(), dimensions.end(), shape.begin(), shape.end()))
      return Error::InvalidArgument(error);
    *data = buffer->untyped_data();
    return Error::Success();
  }

  bool is_empty() const { return taken_ == args_.size(); }

 private:
  ffi::RemainingArgs args_;
  size_t taken_ = 0;
};

// The type of packed weights for an x of type `type`; bytes without a sign are pairs of codes.
std::optional<WeightType> weight_type_of(ffi::DataType weight, ffi::DataType type) {
  switch (weight) {
    case ffi::S8: return WeightType::kInt8;
    case ffi::F8E4M3FN: return WeightType::kFloat8;
    case ffi::U8: return WeightType::kInt4;
    default: break;
  }
  if (weight != type) return std::nullopt;
  return type == ffi::F32 ? WeightType::kFloat32 : WeightType::kBfloat16;
}

// Reads what codes of 4 bits are less by and multiplied by: [E, groups, N] both.
Error read_groups(Operands& operands, int64_t experts, bool has_zeros, int64_t depth,
                  Stack* stack) {
  auto scales = operands.next();
  if (!scales.has_value()) return scales.error();
  const auto shape = scales->dimensions();
  const int64_t columns = stack->first.num_columns;
  if (scales->element_type() != ffi::F32 || shape.size() != 3 || shape[0] != experts ||
      shape[1] < 1 || shape[2] != columns || depth % (8 * shape[1]))
    return Error::InvalidArgument(
        "the scales of 4-bit weights must be float32 for equal groups of inputs");
  stack->first.scales = static_cast<const float*>(scales->untyped_data());
  stack->first.group_size = depth / shape[1];
  stack->num_scales = shape[1] * columns;
  if (!has_zeros) return Error::Success();
  const void* zeros = nullptr;
  Error error = operands.take("the zero points do not fit the weights", ffi::U8,
                              {experts, shape[1], columns}, &zeros);
  stack->first.zeros = static_cast<const uint8_t*>(zeros);
  return error;
}

// Reads what belongs to one weight: words [E, tiles, steps, 64, elements of a word], for 8 bits
// scales [E, N], for 4 bits what groups have, with a bias [E, N].
Error read_stack(Operands& operands, ffi::DataType type, int64_t experts, int64_t num_columns,
                 bool has_zeros, bool has_bias, LinearProblem* p, Stack* stack) {
  auto words = operands.next();
  if (!words.has_value()) return words.error();
  const ffi::DataType stored = words->element_type();
  const auto found = weight_type_of(stored, type);
  if (!found)
    return Error::InvalidArgument(
        "a weight must have the type of x, or int8, e4m3 or codes in uint8");
  p->weight_type = *found;
  const int64_t tiles = paged::num_tiles(num_columns), steps = paged::num_steps(*p);
  const int64_t expected[] = {experts, tiles, steps, paged::kTileColumns,
                              4 / static_cast<int64_t>(ffi::ByteWidth(stored))};
  const auto shape = words->dimensions();
  if (!std::equal(shape.begin(), shape.end(), std::begin(expected), std::end(expected)))
    return Error::InvalidArgument("x, the packed weights of experts and y do not fit each other");
  *stack = {};
  stack->first.words = words->untyped_data();
  stack->first.num_columns = num_columns;
  stack->words_bytes = tiles * steps * paged::kStepBytes;
  if (*found == WeightType::kInt8 || *found == WeightType::kFloat8) {
    const void* scales = nullptr;
    if (Error error = operands.take("the scales do not fit the weights", ffi::F32,
                                    {experts, num_columns}, &scales);
        error.failure())
      return error;
    stack->first.scales = static_cast<const float*>(scales);
    stack->num_scales = num_columns;
  }
  if (*found == WeightType::kInt4)
    if (Error error = read_groups(operands, experts, has_zeros, p->depth, stack); error.failure())
      return error;
  if (!has_bias) return Error::Success();
  return operands.take("the biases do not fit the weights", type, {experts, num_columns},
                       &stack->first.bias);
}

// x [P, K], ends of groups [E], and one weight, or two with an activation -> y [P, N]: of each group
// of rows its expert's product; zeros after the last group.
Error ExpertLinear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> group_ends,
                   ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y, int32_t zeros,
                   bool has_bias, int32_t activation, float gate_slope, float gate_limit, int32_t level) {
  const paged::LinearKernels* kernels =
      paged::linear_kernels(level < 0 ? paged::best_level() : level);
  if (!kernels) return Error::InvalidArgument("this CPU lacks that level");
  const ffi::DataType type = x.element_type();
  if ((type != ffi::BF16 && type != ffi::F32) || y->element_type() != type)
    return Error::InvalidArgument("x and y must both be bfloat16 or float32");
  if (x.dimensions().size() != 2 || y->dimensions().size() != 2 ||
      x.dimensions()[0] != y->dimensions()[0])
    return Error::InvalidArgument("x and y must have two axes, and equal rows");
  if (activation < 0 || activation > 3) return Error::InvalidArgument("unknown activation");
  LinearProblem p{};
  p.depth = x.dimensions()[1];
  p.is_bf16 = p.output_is_bf16 = type == ffi::BF16;
  p.activation = static_cast<paged::Activation>(activation);
  p.num_weights = activation ? 2 : 1;
  p.gate_slope = gate_slope;
  p.gate_limit = gate_limit;
  const int64_t rows = x.dimensions()[0], columns = y->dimensions()[1];
  const int64_t experts = static_cast<int64_t>(group_ends.element_count());
  Stack stacks[2] = {};
  Operands operands(args);
  for (int i = 0; i < p.num_weights; ++i) {
    const WeightType before = p.weight_type;
    if (Error error = read_stack(operands, type, experts, columns, zeros >> i & 1, has_bias, &p,
                                 &stacks[i]);
        error.failure())
      return error;
    if (i && p.weight_type != before)
      return Error::InvalidArgument("the weights must all have one type");
  }
  if (!operands.is_empty()) return Error::InvalidArgument("there are operands that nothing asks for");

  const int64_t element = p.is_bf16 ? 2 : 4;
  const char* x_bytes = static_cast<const char*>(x.untyped_data());
  char* y_bytes = static_cast<char*>(y->untyped_data());
  std::vector<LinearProblem> groups;
  int64_t start = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t end = std::clamp<int64_t>(group_ends.typed_data()[expert], start, rows);
    if (end == start) continue;
    LinearProblem group = p;
    group.x = x_bytes + start * p.depth * element;
    group.num_rows = end - start;
    for (int i = 0; i < p.num_weights; ++i) {
      paged::LinearWeight& weight = group.weights[i] = stacks[i].first;
      weight.words = static_cast<const char*>(weight.words) + expert * stacks[i].words_bytes;
      if (weight.scales) weight.scales += expert * stacks[i].num_scales;
      if (weight.zeros) weight.zeros += expert * stacks[i].num_scales;
      if (weight.bias)
        weight.bias = static_cast<const char*>(weight.bias) + expert * columns * element;
      if (i == 0) weight.y = y_bytes + start * columns * element;
    }
    groups.push_back(group);
    start = end;
  }
  std::memset(y_bytes + start * columns * element, 0,
              static_cast<size_t>((rows - start) * columns * element));
  paged::run_groups(pool, std::move(groups), *kernels);
  return Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_expert_linear, ExpertLinear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("zeros")
                                  .Attr<bool>("has_bias")
                                  .Attr<int32_t>("activation")
                                  .Attr<float>("gate_slope")
                                  .Attr<float>("gate_limit")
                                  .Attr<int32_t>("level"));
