// The entry point of linear layers of experts: a group of rows for each, with weights of its own.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu_level.h"
#include "linear_run.h"
#include "packed_weight_ffi.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using ffi::Error;
using paged::kernels_of;
using paged::LinearProblem;
using paged::Operands;
using paged::unknown_level;

// x [P, K], ends of groups [E], and one weight, or two with an activation -> y [P, N]: of each group
// of rows its expert's product; zeros after the last group.
Error ExpertLinear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> group_ends,
                   ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y, int32_t zeros,
                   bool has_bias, int32_t activation, float gate_slope, float gate_limit, int32_t level) {
  const paged::LinearKernels* kernels = kernels_of(level);
  if (!kernels) return unknown_level();
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
  p.gate_slope = gate_slope;
  p.gate_limit = gate_limit;
  const int64_t rows = x.dimensions()[0], columns = y->dimensions()[1];
  const int64_t experts = static_cast<int64_t>(group_ends.element_count());
  Operands operands(args);
  for (int i = 0; i < (activation ? 2 : 1); ++i) {
    read_weight(operands, type, experts, columns, zeros >> i & 1, &p);
    if (has_bias) p.weights[i].bias = operands.take("a bias", type, {experts, columns});
  }
  if (Error error = operands.finish(); error.failure()) return error;

  // How far what belongs to one expert is from what belongs to the next.
  const int64_t words_bytes = paged::num_tiles(columns) * paged::num_steps(p) * paged::kStepBytes;
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
      paged::LinearWeight& weight = group.weights[i];
      const int64_t scales = columns * (weight.group_size ? p.depth / weight.group_size : 1);
      weight.words = static_cast<const char*>(weight.words) + expert * words_bytes;
      if (weight.scales) weight.scales += expert * scales;
      if (weight.zeros) weight.zeros += expert * scales;
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
