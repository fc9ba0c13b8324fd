// The entry point of linear layers of experts: a group of rows for each, with weights of its own.
#include <algorithm>
#include <cstring>
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
};

// Reads what belongs to one weight: words [E, tiles, steps, 64, elements of a word], for int8 scales
// [E, N], with a bias [E, N].
Error read_stack(ffi::RemainingArgs args, size_t* taken, ffi::DataType type, int64_t experts,
                 int64_t num_columns, bool has_bias, LinearProblem* p, Stack* stack) {
  auto words = args.get<ffi::AnyBuffer>((*taken)++);
  if (!words.has_value()) return words.error();
  const ffi::DataType stored = words->element_type();
  if (stored != ffi::S8 && stored != type)
    return Error::InvalidArgument("a weight must have the type of x, or int8");
  p->weight_type = stored == ffi::S8    ? WeightType::kInt8
                   : stored == ffi::F32 ? WeightType::kFloat32
                                        : WeightType::kBfloat16;
  const int64_t tiles = paged::num_tiles(num_columns), steps = paged::num_steps(*p);
  const int64_t expected[] = {experts, tiles, steps, paged::kTileColumns,
                              paged::elements_per_word(p->weight_type)};
  const auto shape = words->dimensions();
  if (!std::equal(shape.begin(), shape.end(), std::begin(expected), std::end(expected)))
    return Error::InvalidArgument("x, the packed weights of experts and y do not fit each other");
  *stack = {{words->untyped_data(), nullptr, nullptr, nullptr, num_columns},
            tiles * steps * paged::kStepBytes};
  const auto take = [&](const char* what, ffi::DataType wanted, const void** data) {
    auto buffer = args.get<ffi::AnyBuffer>((*taken)++);
    if (!buffer.has_value()) return buffer.error();
    const auto dimensions = buffer->dimensions();
    if (buffer->element_type() != wanted || dimensions.size() != 2 || dimensions[0] != experts ||
        dimensions[1] != num_columns)
      return Error::InvalidArgument(what);
    *data = buffer->untyped_data();
    return Error::Success();
  };
  if (stored == ffi::S8) {
    const void* scales = nullptr;
    if (Error error = take("the scales do not fit the weights", ffi::F32, &scales); error.failure())
      return error;
    stack->first.scales = static_cast<const float*>(scales);
  }
  if (has_bias) return take("the biases do not fit the weights", type, &stack->first.bias);
  return Error::Success();
}

// x [P, K], ends of groups [E], and one weight, or two with an activation -> y [P, N]: of each group
// of rows its expert's product; zeros after the last group.
Error ExpertLinear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> group_ends,
                   ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y, bool has_bias,
                   int32_t activation, float gate_slope, float gate_limit, int32_t level) {
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
  size_t taken = 0;
  for (int i = 0; i < p.num_weights; ++i) {
    const WeightType before = p.weight_type;
    if (Error error = read_stack(args, &taken, type, experts, columns, has_bias, &p, &stacks[i]);
        error.failure())
      return error;
    if (i && p.weight_type != before)
      return Error::InvalidArgument("the weights must all have one type");
  }
  if (taken != args.size()) return Error::InvalidArgument("there are operands that nothing asks for");

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
      if (weight.scales) weight.scales += expert * columns;
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
                                  .Attr<bool>("has_bias")
                                  .Attr<int32_t>("activation")
                                  .Attr<float>("gate_slope")
                                  .Attr<float>("gate_limit")
                                  .Attr<int32_t>("level"));
