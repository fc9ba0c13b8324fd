"""The parts of contexts that were split among programs, put together again."""

import triton
import triton.language as tl

from paged.triton.kernels.attention import MASKED


@triton.jit
def combine_kernel(
    partial_ptr,  # [num_items, num_kv_heads, rows, head_dim] float32 sums, not normalised
    stats_ptr,  # [num_items, num_kv_heads, rows, 2] float32 maximum (base 2) and total
    tiles_ptr,  # [num_tiles, 4] first item, number of items, row of the queries, 0
    output_ptr,  # [num_tokens, num_q_heads, head_dim]
    spec: tl.constexpr,
):
    """Write the attention of a narrow tile and a q head; what came in one part is there already.

    Source: Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    num_items = tl.load(tiles_ptr + tile * 4 + 1)
    if num_items > 1:
        first_item = tl.load(tiles_ptr + tile * 4).to(tl.int64)
        row = tl.load(tiles_ptr + tile * 4 + 2).to(tl.int64)
        dim = tl.arange(0, spec.padded_dim)
        is_dim = dim < spec.head_dim
        lane = tl.arange(0, spec.chunk)
        start = (first_item * spec.num_kv_heads + head // spec.group) * spec.rows
        start += head % spec.group
        maximum = tl.full([], MASKED, tl.float32)
        total = tl.full([], 0.0, tl.float32)
        weighted = tl.zeros([spec.padded_dim], tl.float32)
        for item in range(0, num_items, spec.chunk):
            is_item = item + lane < num_items
            index = start + (item + lane) * (spec.num_kv_heads * spec.rows)
            maxima = tl.load(stats_ptr + index * 2, mask=is_item, other=MASKED)
            totals = tl.load(stats_ptr + index * 2 + 1, mask=is_item, other=0.0)
            offset = index[:, None] * spec.head_dim + dim[None, :]
            mask = is_item[:, None] & is_dim[None, :]
            sums = tl.load(partial_ptr + offset, mask=mask, other=0.0)
            larger = tl.maximum(maximum, tl.max(maxima, 0))
            decay = tl.exp2(maximum - larger)
            weights = tl.exp2(maxima - larger)
            total = total * decay + tl.sum(weights * totals, 0)
            weighted = weighted * decay + tl.sum(weights[:, None] * sums, 0)
            maximum = larger
        result = weighted / tl.where(total == 0.0, 1.0, total)
        offset = (row * spec.num_q_heads + head) * spec.head_dim + dim
        tl.store(output_ptr + offset, result.to(output_ptr.dtype.element_ty), mask=is_dim)
