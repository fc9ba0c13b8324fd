// The entry points: the handlers that XLA calls, and the CPU's level.
#include <algorithm>
#include <cstring>
#include <optional>

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

// Reads x [M, K] into the problem, whose products are of inputs of type `type`.
Error read_input(ffi::AnyBuffer x, ffi::DataType type, LinearProblem* p) {
  if (type != ffi::BF16 && type != ffi::F32)
    return Error::InvalidArgument("x must be bfloat16 or float32");
  if (x.dimensions().size() != 2) return Error::InvalidArgument("x must have two axes");
  p->x = x.untyped_data();
  p->num_rows = x.dimensions()[0];
  p->depth = x.dimensions()[1];
  p->is_bf16 = type == ffi::BF16;
  return Error::Success();
}

// The type of what weights are multiplied by: of x, or, if there is a norm, of the result that holds
// the normalised x, the last of all. A norm rounds float32 to bfloat16, but widens nothing.
ffi::ErrorOr<ffi::DataType> product_type(ffi::AnyBuffer x, ffi::RemainingRets results,
                                         bool has_norm) {
  const ffi::DataType type = x.element_type();
  if (!has_norm) return type;
  auto normed = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (!normed.has_value()) return ffi::Unexpected(normed.error());
  const ffi::DataType rounded = (*normed)->element_type();
  if ((rounded != type && type != ffi::F32) || (*normed)->element_count() != x.element_count())
    return ffi::Unexpected(Error::InvalidArgument(
        "the normalised x must have the size of x, and its type or fewer bits"));
  return rounded;
}

// Leaves the first rows to be computed, as many as an int32 [1] says, and sets the others to zero:
// not to what memory holds, as NaN in the padding of a cache spreads where it is multiplied by zero.
void limit_rows(const int32_t* num_rows, int64_t element_bytes, LinearProblem* p) {
  const int64_t rows = std::clamp<int64_t>(*num_rows, 0, p->num_rows);
  for (int i = 0; i < p->num_weights; ++i) {
    const int64_t row_bytes = p->weights[i].num_columns * element_bytes;
    std::memset(static_cast<char*>(p->weights[i].y) + rows * row_bytes, 0,
                static_cast<size_t>((p->num_rows - rows) * row_bytes));
  }
  p->num_rows = rows;
}

// x [M, K]; for each weight: the packed weight, scales if it has less than 16 bits, zero points if
// its bit of `zeros` is set, a bias [N] if its bit of `biases` is; a norm's weight [K] if epsilon is not negative; a residual [M, N] if
// `has_residual`; int32 [1], how many rows are not padding, if `has_num_rows`. Results: y [M, N] of each weight, or one of both if there is an activation; and
// the normalised x, which is there for its memory.
Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs args,
             ffi::RemainingRets results, int32_t num_weights, int32_t zeros, int32_t biases,
             float epsilon, bool has_residual, bool has_num_rows, int32_t activation, int32_t level) {
  const paged::LinearKernels* kernels = kernels_of(level);
  if (!kernels) return unknown_level();
  LinearProblem p{};
  const bool has_norm = epsilon >= 0;
  const auto found_type = product_type(x, results, has_norm);
  if (!found_type.has_value()) return found_type.error();
  const ffi::DataType type = *found_type;
  if (Error error = read_input(x, type, &p); error.failure()) return error;
  if (activation < 0 || activation > 2) return Error::InvalidArgument("unknown activation");
  p.activation = static_cast<paged::Activation>(activation);
  const bool is_gated = activation != 0;
  if (num_weights < 1 || num_weights > paged::kMaxWeights || (is_gated && num_weights != 2))
    return Error::InvalidArgument("there are one to four weights, with an activation two");
  const size_t num_outputs = is_gated ? 1 : num_weights;
  if (results.size() != num_outputs + has_norm)
    return Error::InvalidArgument("there is a result for each weight, or one with an activation");
  Operands operands(args);
  ffi::DataType output_type = type;
  for (int i = 0; i < num_weights; ++i) {
    auto y = results.get<ffi::AnyBuffer>(is_gated ? 0 : i);
    if (!y.has_value()) return y.error();
    if (i == 0) output_type = (*y)->element_type();
    if ((*y)->element_type() != output_type || (output_type != type && output_type != ffi::F32))
      return Error::InvalidArgument("y must have the type of x, or float32");
    if ((*y)->dimensions().size() != 2 || (*y)->dimensions()[0] != p.num_rows)
      return Error::InvalidArgument("y must have two axes, and the rows of x");
    const int64_t num_columns = (*y)->dimensions()[1];
    read_weight(operands, type, std::nullopt, num_columns, zeros >> i & 1, &p);
    p.weights[i].y = (*y)->untyped_data();
    if (biases >> i & 1) p.weights[i].bias = operands.take("a bias", type, {num_columns});
  }
  p.output_is_bf16 = output_type == ffi::BF16;
  // float32 for any x: 1 plus a weight of Gemma has more digits than bfloat16.
  const ffi::DataType norm_type = operands.next_type() == ffi::F32 ? ffi::F32 : type;
  const void* norm = has_norm ? operands.take("the norm's weight", norm_type, {p.depth}) : nullptr;
  if (has_residual)
    p.residual = operands.take("the residual", output_type, {p.num_rows, p.weights[0].num_columns});
  const void* num_rows = has_num_rows ? operands.take("num_rows", ffi::S32, {1}) : nullptr;
  if (Error error = operands.finish(); error.failure()) return error;
  if (num_rows)
    limit_rows(static_cast<const int32_t*>(num_rows),
               static_cast<int64_t>(ffi::ByteWidth(output_type)), &p);
  if (has_norm) {
    auto normed = results.get<ffi::AnyBuffer>(num_outputs);
    if (!normed.has_value()) return normed.error();
    paged::run_norm(pool,
                    {p.x, norm, (*normed)->untyped_data(), p.num_rows, p.depth, epsilon,
                     x.element_type() == ffi::BF16, norm_type == ffi::BF16, p.is_bf16},
                    *kernels);
    p.x = (*normed)->untyped_data();
  }
  paged::run_linear(pool, p, *kernels);
  return Error::Success();
}

// x [M, K], a packed weight, scales and zero points as above -> the first column of the largest product of
// each row, int32 [M]; and the largest products of tiles and their columns, [tiles, M] each, which
// are there for their memory.
Error LinearBest(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs args,
                 ffi::Result<ffi::Buffer<ffi::S32>> best, ffi::Result<ffi::Buffer<ffi::F32>> values,
                 ffi::Result<ffi::Buffer<ffi::S32>> columns, int32_t num_outputs, bool has_zeros,
                 int32_t level) {
  const paged::LinearKernels* kernels = kernels_of(level);
  if (!kernels) return unknown_level();
  LinearProblem p{};
  if (Error error = read_input(x, x.element_type(), &p); error.failure()) return error;
  if (num_outputs < 1) return Error::InvalidArgument("there is no output to choose");
  Operands operands(args);
  read_weight(operands, x.element_type(), std::nullopt, num_outputs, has_zeros, &p);
  if (Error error = operands.finish(); error.failure()) return error;
  const size_t partial = static_cast<size_t>(paged::num_tiles(p) * p.num_rows);
  if (best->element_count() != static_cast<size_t>(p.num_rows) ||
      values->element_count() != partial || columns->element_count() != partial)
    return Error::InvalidArgument("the results have other shapes than they should");
  p.best_values = values->typed_data();
  p.best_columns = columns->typed_data();
  paged::run_linear(pool, p, *kernels);
  paged::choose_best(p, best->typed_data());
  return Error::Success();
}

// A packed weight [tiles, steps, 64, elements of a word], row numbers [n] -> rows [n, K].
Error LinearRows(ffi::ThreadPool pool, ffi::AnyBuffer packed, ffi::Buffer<ffi::S32> rows,
                 ffi::Result<ffi::AnyBuffer> y) {
  const auto weight = packed.dimensions(), shape = y->dimensions();
  if (y->element_type() != packed.element_type())
    return Error::InvalidArgument("the rows must have the type of the weight");
  if (weight.size() != 4 || weight[0] < 1 || weight[2] != paged::kTileColumns)
    return Error::InvalidArgument("a packed weight has four axes, and tiles of 64 outputs");
  if (weight[3] * ffi::ByteWidth(packed.element_type()) != 4)
    return Error::InvalidArgument("a word of a packed weight has 32 bit");
  if (shape.size() != 2 || static_cast<size_t>(shape[0]) != rows.element_count() ||
      shape[1] > weight[1] * weight[3])
    return Error::InvalidArgument("the rows do not fit the weight");
  const int64_t row_bytes = shape[1] * static_cast<int64_t>(ffi::ByteWidth(y->element_type()));
  paged::gather_rows(pool, {static_cast<const uint32_t*>(packed.untyped_data()), rows.typed_data(),
                            static_cast<char*>(y->untyped_data()), shape[0], weight[0], weight[1],
                            row_bytes});
  return Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_linear, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("num_weights")
                                  .Attr<int32_t>("zeros")
                                  .Attr<int32_t>("biases")
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("has_residual")
                                  .Attr<bool>("has_num_rows")
                                  .Attr<int32_t>("activation")
                                  .Attr<int32_t>("level"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_linear_best, LinearBest,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<int32_t>("num_outputs")
                                  .Attr<bool>("has_zeros")
                                  .Attr<int32_t>("level"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_linear_rows, LinearRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

// The highest level of this CPU, see cpu_level.h.
extern "C" int paged_best_level() { return paged::best_level(); }
