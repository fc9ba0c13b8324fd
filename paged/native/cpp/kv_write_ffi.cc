// The handlers that write to the cache: alone, and with the rotation of queries and keys.
#include "cpu_level.h"
#include "ffi_types.h"
#include "kv_write_run.h"

namespace {

// Checks and fills in what both handlers have; null if all is well.
const char* set_cache(ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> slots,
                      ffi::Buffer<ffi::F32> kv_scales, ffi::AnyBuffer cache,
                      ffi::Result<ffi::AnyBuffer>& cache_out, paged::KvWriteProblem& p) {
  // The worst that could happen is silent: XLA copying the cache in every layer.
  if (cache.untyped_data() != cache_out->untyped_data())
    return "the cache was copied instead of updated in place; donate it to the jitted step";
  const auto rows = k.dimensions(), shape = cache.dimensions();
  if (rows.size() != 3 || shape.size() != 5) return "k has 3 axes and the cache 5";
  if (!paged::element_type_of(k.element_type(), &p.type) ||
      !paged::element_type_of(cache.element_type(), &p.kv_type) ||
      paged::element_bytes(p.type) == 1)
    return "an element type has no kernel";
  p.k = k.untyped_data();
  p.v = v.untyped_data();
  p.slots = slots.typed_data();
  p.kv_scales = kv_scales.element_count() ? kv_scales.typed_data() : nullptr;
  p.kv_cache = cache_out->untyped_data();
  p.num_tokens = rows[0];
  p.num_kv_heads = rows[1];
  p.head_dim = rows[2];
  p.num_blocks = shape[0];
  p.num_planes = shape[1];
  p.block_size = shape[3];
  if (p.num_planes < 1 || p.num_planes > 2 || shape[2] != p.num_kv_heads || shape[4] != p.head_dim ||
      v.element_count() != k.element_count() || v.element_type() != k.element_type() ||
      slots.element_count() != static_cast<size_t>(p.num_tokens) ||
      (p.kv_scales && kv_scales.element_count() != static_cast<size_t>(p.num_planes * p.num_kv_heads)))
    return "k, v, the slots and the cache do not fit each other";
  return nullptr;
}

ffi::Error run(ffi::ThreadPool& pool, const paged::KvWriteProblem& p, int32_t level) {
  const auto write = paged::kv_write_function(level < 0 ? paged::best_level() : level);
  if (!write) return ffi::Error::InvalidArgument("this CPU lacks that level");
  paged::run_kv_write(pool, p, write);
  return ffi::Error::Success();
}

// cache [B, P, K, block, H], k and v [T, K, H], slots [T], kv_scales [P, K] or [0, K] -> cache
ffi::Error KvWrite(ffi::ThreadPool pool, ffi::AnyBuffer cache, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::F32> kv_scales,
                   ffi::Result<ffi::AnyBuffer> cache_out, int32_t level) {
  paged::KvWriteProblem p{};
  if (const char* wrong = set_cache(k, v, slots, kv_scales, cache, cache_out, p))
    return ffi::Error::InvalidArgument(wrong);
  return run(pool, p, level);
}

// The same after q [T, N, H], with cosine and sine [T, half] -> rotated q, cache
ffi::Error RotateAndWrite(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer cache,
                          ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::F32> cosine,
                          ffi::Buffer<ffi::F32> sine, ffi::Buffer<ffi::S32> slots,
                          ffi::Buffer<ffi::F32> kv_scales, ffi::Result<ffi::AnyBuffer> q_out,
                          ffi::Result<ffi::AnyBuffer> cache_out, int32_t level) {
  paged::KvWriteProblem p{};
  if (const char* wrong = set_cache(k, v, slots, kv_scales, cache, cache_out, p))
    return ffi::Error::InvalidArgument(wrong);
  const auto queries = q.dimensions(), angles = cosine.dimensions();
  if (queries.size() != 3 || angles.size() != 2 || queries[0] != p.num_tokens ||
      queries[2] != p.head_dim || angles[0] != p.num_tokens || 2 * angles[1] > p.head_dim ||
      sine.element_count() != cosine.element_count() ||
      q.element_type() != k.element_type() || q_out->element_type() != q.element_type() ||
      q_out->element_count() != q.element_count())
    return ffi::Error::InvalidArgument("q, the angles and k do not fit each other");
  p.q = q.untyped_data();
  p.q_out = q_out->untyped_data();
  p.num_q_heads = queries[1];
  p.cosine = cosine.typed_data();
  p.sine = sine.typed_data();
  p.half = angles[1];
  return run(pool, p, level);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_kv_write, KvWrite,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("level"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_rotate_and_write, RotateAndWrite,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("level"));
