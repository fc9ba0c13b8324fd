"""Products of groups of rows, each with a weight of its own."""

import triton
import triton.language as tl


@triton.jit
def expert_product_kernel(
    x_ptr,  # [num_rows, num_inputs], sorted by expert
    weights_ptr,  # [num_experts, num_outputs, num_inputs]
    bias_ptr,  # [num_experts, num_outputs], unless not has_bias
    experts_ptr,  # [num_tiles] int32, num_experts for a tile that is not needed
    starts_ptr,  # [num_tiles] int32, first row
    ends_ptr,  # [num_experts] int32, where each group ends
    y_ptr,  # [num_rows, num_outputs]
    spec: tl.constexpr,
):
    """Write one tile of outputs of up to `tile_rows` rows of one expert."""
    out = tl.program_id(0) * spec.tile_outputs + tl.arange(0, spec.tile_outputs)
    tile = tl.program_id(1)
    expert = tl.load(experts_ptr + tile)
    if expert < spec.num_experts:
        row = tl.load(starts_ptr + tile) + tl.arange(0, spec.tile_rows)
        is_row = row < tl.load(ends_ptr + expert)
        is_out = out < spec.num_outputs
        # 64 bit: a stack of weights has more than 2 ** 31 elements.
        weight_row = (expert.to(tl.int64) * spec.num_outputs + out) * spec.num_inputs
        sums = tl.zeros((spec.tile_outputs, spec.tile_rows), tl.float32)
        for first in range(0, spec.num_inputs, spec.tile_inputs):
            at = first + tl.arange(0, spec.tile_inputs)
            is_in = at < spec.num_inputs
            # Weights on the left: their 64 outputs fill a wgmma at any number of rows.
            weight = tl.load(
                weights_ptr + weight_row[:, None] + at[None, :],
                mask=is_out[:, None] & is_in[None, :],
                other=0.0,
            )
            x = tl.load(
                x_ptr + row[None, :].to(tl.int64) * spec.num_inputs + at[:, None],
                mask=is_row[None, :] & is_in[:, None],
                other=0.0,
            )
            sums = tl.dot(weight, x, acc=sums)
        if spec.has_bias:
            bias = tl.load(bias_ptr + expert * spec.num_outputs + out, mask=is_out, other=0.0)
            sums += bias.to(tl.float32)[:, None]
        y_at = row[None, :].to(tl.int64) * spec.num_outputs + out[:, None]
        y = sums.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + y_at, y, mask=is_out[:, None] & is_row[None, :])
