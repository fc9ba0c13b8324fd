// The attention handler that XLA calls.
#include "attention_run.h"
#include "cpu_level.h"
#include "ffi_types.h"

namespace {

// q [T, N, H], cache [B, P, K, block, H], block tables [S, M], lengths [S], starts [S + 1],
// kv_scales [P, K] or [0, K], sinks [N] or [0] -> out [T, N, H]
ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv_cache,
                     ffi::Buffer<ffi::S32> block_tables, ffi::Buffer<ffi::S32> seq_lens,
                     ffi::Buffer<ffi::S32> query_start_loc, ffi::Buffer<ffi::F32> kv_scales,
                     ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out, float scale,
                     int64_t sliding_window, float soft_cap, int32_t level) {
  const auto queries = q.dimensions(), cache = kv_cache.dimensions();
  const auto tables = block_tables.dimensions();
  if (queries.size() != 3 || cache.size() != 5 || tables.size() != 2)
    return ffi::Error::InvalidArgument("q, the cache and the block tables have 3, 5 and 2 axes");
  paged::AttentionProblem p{};
  if (!paged::element_type_of(q.element_type(), &p.q_type) ||
      !paged::element_type_of(kv_cache.element_type(), &p.kv_type) ||
      paged::element_bytes(p.q_type) == 1)
    return ffi::Error::InvalidArgument("an element type has no kernel");
  p.q = q.untyped_data();
  p.kv_cache = kv_cache.untyped_data();
  p.block_tables = block_tables.typed_data();
  p.seq_lens = seq_lens.typed_data();
  p.query_start_loc = query_start_loc.typed_data();
  p.kv_scales = kv_scales.element_count() ? kv_scales.typed_data() : nullptr;
  p.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  p.out = out->untyped_data();
  p.num_tokens = queries[0];
  p.num_q_heads = queries[1];
  p.head_dim = queries[2];
  p.num_blocks = cache[0];
  p.num_planes = cache[1];
  p.num_kv_heads = cache[2];
  p.block_size = cache[3];
  p.num_seqs = tables[0];
  p.max_blocks = tables[1];
  p.window = sliding_window > 0 ? sliding_window : int64_t{1} << 40;
  p.scale = scale;
  p.soft_cap = soft_cap;
  if (p.num_planes < 1 || p.num_planes > 2 || cache[4] != p.head_dim || p.num_q_heads % p.num_kv_heads ||
      out->element_count() != q.element_count() || out->element_type() != q.element_type() ||
      seq_lens.element_count() != static_cast<size_t>(p.num_seqs) ||
      query_start_loc.element_count() != static_cast<size_t>(p.num_seqs) + 1 ||
      (p.kv_scales && kv_scales.element_count() != static_cast<size_t>(p.num_planes * p.num_kv_heads)) ||
      (p.sinks && sinks.element_count() != static_cast<size_t>(p.num_q_heads)))
    return ffi::Error::InvalidArgument("the arrays of attention do not fit each other");
  const paged::AttentionKernel kernel =
      paged::attention_kernel(level < 0 ? paged::best_level() : level);
  if (!kernel.attend) return ffi::Error::InvalidArgument("this CPU lacks that level");
  paged::run_attention(pool, p, kernel);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(paged_attention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("sliding_window")
                                  .Attr<float>("soft_cap")
                                  .Attr<int32_t>("level"));
