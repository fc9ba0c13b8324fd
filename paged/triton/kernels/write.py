"""New keys and values into their slots, in place."""

import triton
import triton.language as tl

from paged.triton.kernels.float8 import e4m3_codes


@triton.jit
def write_kv_kernel(
    k_ptr,  # [num_tokens, num_kv_heads, head_dim]
    v_ptr,  # [num_tokens, num_kv_heads, head_dim]
    slots_ptr,  # [num_tokens]
    scales_ptr,  # [2, num_kv_heads] float32, unless not has_kv_scales
    cache_ptr,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    spec: tl.constexpr,
):
    """Write all heads of one token; a slot past the end writes nothing."""
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token)
    if slot < spec.num_slots:
        head = tl.arange(0, spec.padded_heads)
        dim = tl.arange(0, spec.padded_dim)
        is_head = head < spec.num_kv_heads
        mask = is_head[:, None] & (dim < spec.head_dim)[None, :]
        source = (token.to(tl.int64) * spec.num_kv_heads + head)[:, None] * spec.head_dim + dim
        row = (slot // spec.block_size).to(tl.int64) * (2 * spec.num_kv_heads) + head
        row = row * spec.block_size + slot % spec.block_size
        target = row[:, None] * spec.head_dim + dim[None, :]
        k = tl.load(k_ptr + source, mask=mask, other=0.0)
        v = tl.load(v_ptr + source, mask=mask, other=0.0)
        if spec.has_kv_scales:
            k_scale = tl.load(scales_ptr + head, mask=is_head, other=1.0)
            v_scale = tl.load(scales_ptr + spec.num_kv_heads + head, mask=is_head, other=1.0)
            k = _divide(k, k_scale)
            v = _divide(v, v_scale)
        _store(cache_ptr, target, k, mask, spec.is_e4m3)
        _store(cache_ptr, target + spec.values_offset, v, mask, spec.is_e4m3)


@triton.jit
def _divide(rows, scale):
    # Rounded to nearest, as other backends do: a quotient of "/" may be off in its last bits.
    return tl.div_rn(rows.to(tl.float32), tl.broadcast_to(scale[:, None], rows.shape))


@triton.jit
def _store(cache_ptr, target, rows, mask, is_e4m3: tl.constexpr):
    if is_e4m3:
        codes_ptr = cache_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        tl.store(codes_ptr + target, e4m3_codes(rows.to(tl.float32)), mask=mask)
    else:
        tl.store(cache_ptr + target, rows.to(cache_ptr.dtype.element_ty), mask=mask)
