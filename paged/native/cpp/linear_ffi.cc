// The entry points: the handler that XLA calls, and the CPU's level.
#include "cpu_level.h"
#include "linear_run.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

bool is_linear_type(ffi::DataType type) { return type == ffi::BF16 || type == ffi::F32; }

// x [M, K], packed weight [tiles, steps, 64, elements of a word], bias [N] or none -> y [M, N].
ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, int32_t level) {
  const ffi::DataType type = x.element_type(), output_type = y->element_type();
  if (!is_linear_type(type) || weight.element_type() != type)
    return ffi::Error::InvalidArgument("x and the weight must both be bfloat16 or float32");
  if (output_type != type && output_type != ffi::F32)
    return ffi::Error::InvalidArgument("y must have the type of x, or float32");
  if (x.dimensions().size() != 2 || y->dimensions().size() != 2 || weight.dimensions().size() != 4)
    return ffi::Error::InvalidArgument("x and y must have two axes, the weight four");
  paged::LinearProblem p{};
  p.x = x.untyped_data();
  p.weight = weight.untyped_data();
  p.y = y->untyped_data();
  p.num_rows = x.dimensions()[0];
  p.depth = x.dimensions()[1];
  p.num_columns = y->dimensions()[1];
  p.is_bf16 = type == ffi::BF16;
  p.output_is_bf16 = output_type == ffi::BF16;
  const auto packed = weight.dimensions();
  if (y->dimensions()[0] != p.num_rows || packed[0] != paged::num_tiles(p) ||
      packed[1] != paged::num_steps(p) || packed[2] != paged::kTileColumns ||
      packed[3] != (p.is_bf16 ? 2 : 1))
    return ffi::Error::InvalidArgument("x, the packed weight and y do not fit each other");
  if (rest.size() > 1) return ffi::Error::InvalidArgument("there is one bias at most");
  if (rest.size() == 1) {
    auto bias = rest.get<ffi::AnyBuffer>(0);
    if (!bias.has_value()) return bias.error();
    if (bias->element_type() != type || bias->dimensions().size() != 1 ||
        bias->dimensions()[0] != p.num_columns)
      return ffi::Error::InvalidArgument("the bias must have the columns of y and the type of x");
    p.bias = bias->untyped_data();
  }
  const paged::TileFunction compute_tile =
      paged::tile_function(level < 0 ? paged::best_level() : level);
  if (!compute_tile) return ffi::Error::InvalidArgument("this CPU lacks that level");
  paged::run_linear(pool, p, compute_tile);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_linear, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("level"));

// The highest level of this CPU, see cpu_level.h.
extern "C" int paged_best_level() { return paged::best_level(); }
