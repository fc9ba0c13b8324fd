"""The product of a few rows with a weight of 4-bit integers, which widen in registers."""

import triton
import triton.language as tl


@triton.jit
def int4_product_kernel(
    x_ptr,  # [num_rows, num_inputs]
    values_ptr,  # [num_outputs, num_inputs // 2] uint8
    scales_ptr,  # [num_groups, num_outputs]
    zeros_ptr,  # [num_groups, num_outputs] uint8, unless not has_zeros
    sums_ptr,  # [num_splits, num_rows, num_outputs] float32
    spec: tl.constexpr,
):
    """Write the sum over some groups of inputs for one tile of outputs and rows."""
    out = tl.program_id(0) * spec.tile_outputs + tl.arange(0, spec.tile_outputs)
    split = tl.program_id(1)
    row = tl.program_id(2) * spec.tile_rows + tl.arange(0, spec.tile_rows)
    half = tl.arange(0, spec.half_group)
    is_out = out < spec.num_outputs
    is_row = row < spec.num_rows
    sums = tl.zeros((spec.tile_outputs, spec.tile_rows), tl.float32)
    for index in range(spec.groups_per_split):
        group = split * spec.groups_per_split + index
        codes_at = (out * spec.num_groups + group)[:, None] * spec.half_group + half[None, :]
        codes = tl.load(values_ptr + codes_at, mask=is_out[:, None], other=0)
        x_at = row[None, :] * spec.num_inputs + group * (2 * spec.half_group) + half[:, None]
        first = tl.load(x_ptr + x_at, mask=is_row[None, :], other=0.0)
        second = tl.load(x_ptr + x_at + spec.half_group, mask=is_row[None, :], other=0.0)
        scales_at = group * spec.num_outputs + out
        scale = tl.load(scales_ptr + scales_at, mask=is_out, other=0.0)
        if spec.has_zeros:
            zero = tl.load(zeros_ptr + scales_at, mask=is_out, other=0)
        else:
            zero = tl.full((spec.tile_outputs,), 8, tl.uint8)
        zero = _widen(zero, x_ptr.dtype.element_ty)[:, None]
        low = _widen(codes & 15, x_ptr.dtype.element_ty) - zero
        high = _widen(codes >> 4, x_ptr.dtype.element_ty) - zero
        part = tl.dot(low, first)
        part = tl.dot(high, second, acc=part)
        # After the product: differences of integers are exact in 16 bits, scaled ones are not.
        sums += part * scale.to(tl.float32)[:, None]
    sums_at = (split * spec.num_rows + row)[None, :] * spec.num_outputs + out[:, None]
    tl.store(sums_ptr + sums_at, sums, mask=is_out[:, None] & is_row[None, :])


@triton.jit
def _widen(code, dtype: tl.constexpr):
    # Not by a conversion, of which there are few a cycle: below 16, a code is the last bits of
    # the mantissa of 1024 (float16) or 128 (bfloat16). What is added so, a difference takes off.
    if dtype == tl.float16:
        return (code.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        return (code.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
