"""Ragged paged attention: one launch for wide tiles (prefill) and narrow ones (decode).

A tile holds consecutive query rows of one sequence, each with all q heads of one kv head, so that
keys and values are read once for the whole group. An item is a tile and a range of keys; one
program takes one item for one kv head. `paged/triton/plan.py` makes the items.
"""

import triton
import triton.language as tl

from paged.triton.kernels.float8 import E4M3_AS_FLOAT16, e4m3_as_float16

# Stands for minus infinity where the difference of two must not be NaN.
MASKED: tl.constexpr = tl.constexpr(-1e30)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_kernel(
    q_ptr,  # [num_tokens, num_q_heads, head_dim]
    cache_ptr,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    tables_ptr,  # [num_seqs, table_width]
    items_ptr,  # [num_items, 8]
    scales_ptr,  # [2, num_kv_heads] float32, unless not has_kv_scales
    sinks_ptr,  # [num_q_heads], unless not has_sinks
    output_ptr,  # [num_tokens, num_q_heads, head_dim]
    partial_ptr,  # [num_narrow_items, num_kv_heads, narrow_rows, head_dim] float32
    stats_ptr,  # [num_narrow_items, num_kv_heads, narrow_rows, 2] float32
    spec: tl.constexpr,
):
    """Write the attention of each item: to the output, or as a part if its tile has several."""
    item = tl.program_id(0)
    if spec.num_wide_items == 0:
        # No branch: what is not compiled takes no registers and no shared memory.
        _attend_item(
            item, q_ptr, cache_ptr, tables_ptr, items_ptr, scales_ptr, sinks_ptr, output_ptr,
            partial_ptr, stats_ptr, spec, spec.narrow_rows, spec.narrow_keys, is_wide=False,
        )  # fmt: skip
    elif item < spec.num_wide_items:
        _attend_item(
            item, q_ptr, cache_ptr, tables_ptr, items_ptr, scales_ptr, sinks_ptr, output_ptr,
            partial_ptr, stats_ptr, spec, spec.wide_rows, spec.wide_keys, is_wide=True,
        )  # fmt: skip
    else:
        _attend_item(
            item, q_ptr, cache_ptr, tables_ptr, items_ptr, scales_ptr, sinks_ptr, output_ptr,
            partial_ptr, stats_ptr, spec, spec.narrow_rows, spec.narrow_keys, is_wide=False,
        )  # fmt: skip


@triton.jit
def _attend_item(
    item,
    q_ptr,
    cache_ptr,
    tables_ptr,
    items_ptr,
    scales_ptr,
    sinks_ptr,
    output_ptr,
    partial_ptr,
    stats_ptr,
    spec: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    is_wide: tl.constexpr,
):
    kv_head = tl.program_id(1)
    field_ptr = items_ptr + item * 8
    num_rows = tl.load(field_ptr + 1)
    # A wide tile may be sliced among programs; a narrow one is the first one's alone.
    first_lane = tl.program_id(2) * rows
    if num_rows * spec.group > first_lane:
        first_position = tl.load(field_ptr + 2)
        table_ptr = tables_ptr + tl.load(field_ptr + 3).to(tl.int64) * spec.table_width
        first_key = tl.load(field_ptr + 4)
        end_key = tl.load(field_ptr + 5)
        part = tl.load(field_ptr + 6)
        lane = first_lane + tl.arange(0, rows)
        position = first_position + lane // spec.group
        offset, mask = _query_rows(field_ptr, kv_head, lane, spec)
        q = tl.load(q_ptr + offset, mask=mask, other=0.0)

        score_scale = tl.full([], spec.scale, tl.float32)
        value_scale = tl.full([], 1.0, tl.float32)
        if spec.has_kv_scales:
            score_scale *= tl.load(scales_ptr + kv_head)
            value_scale *= tl.load(scales_ptr + spec.num_kv_heads + kv_head)
        if spec.is_e4m3:
            # float16 holds every e4m3 exactly, and the hardware converts to it in one step.
            q = q.to(tl.float16)
        if spec.decodes_bytes:
            score_scale *= E4M3_AS_FLOAT16
            value_scale *= E4M3_AS_FLOAT16

        maximum = tl.full([rows], MASKED, tl.float32)
        total = tl.zeros([rows], tl.float32)
        weighted = tl.zeros([rows, spec.padded_dim], tl.float32)
        # Two conditions: the first is known when the kernel is compiled.
        if spec.has_sinks:  # noqa: SIM102
            if part <= 0:
                sink = tl.load(sinks_ptr + kv_head * spec.group + lane % spec.group)
                maximum = sink.to(tl.float32) * LOG2_E
                total = tl.full([rows], 1.0, tl.float32)

        # Keys that all rows see need no mask: those before them have left the window of the last
        # rows, those behind them are still to come for the first rows.
        open_end = first_key
        if is_wide:
            open_start = first_key
            if spec.sliding_window is not None:
                num_left = first_position + num_rows - spec.sliding_window - first_key
                open_start += (tl.maximum(num_left, 0) + keys - 1) // keys * keys
                open_start = tl.minimum(open_start, end_key)
                maximum, total, weighted = _fold_keys(
                    maximum, total, weighted, q, position, cache_ptr, table_ptr, kv_head,
                    first_key, open_start, open_start, score_scale, spec, keys, is_masked=True,
                )  # fmt: skip
            num_open = tl.maximum(tl.minimum(first_position + 1, end_key) - open_start, 0)
            open_end = open_start + num_open // keys * keys
            maximum, total, weighted = _fold_keys(
                maximum, total, weighted, q, position, cache_ptr, table_ptr, kv_head,
                open_start, open_end, open_end, score_scale, spec, keys, is_masked=False,
            )  # fmt: skip
        maximum, total, weighted = _fold_keys(
            maximum, total, weighted, q, position, cache_ptr, table_ptr, kv_head,
            open_end, end_key, end_key, score_scale, spec, keys, is_masked=True,
        )  # fmt: skip

        if part < 0:
            weighted *= (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
            tl.store(output_ptr + offset, weighted.to(output_ptr.dtype.element_ty), mask=mask)
        elif not is_wide:
            # A part has one query row.
            slot = (item - spec.num_wide_items).to(tl.int64) * spec.num_kv_heads + kv_head
            row = slot * rows + lane
            dim = tl.arange(0, spec.padded_dim)
            offset = row[:, None] * spec.head_dim + dim[None, :]
            tl.store(partial_ptr + offset, weighted * value_scale, mask=mask)
            tl.store(stats_ptr + row * 2, maximum, mask=lane < spec.group)
            tl.store(stats_ptr + row * 2 + 1, total, mask=lane < spec.group)


@triton.jit
def _query_rows(field_ptr, kv_head, lane, spec: tl.constexpr):
    """Return offsets and mask of an item's rows in queries and output, `[rows, padded_dim]`."""
    first_row = tl.load(field_ptr)
    num_rows = tl.load(field_ptr + 1)
    dim = tl.arange(0, spec.padded_dim)
    row = (first_row + lane // spec.group) * spec.num_q_heads
    row += kv_head * spec.group + lane % spec.group
    offset = row.to(tl.int64)[:, None] * spec.head_dim + dim[None, :]
    return offset, (lane < num_rows * spec.group)[:, None] & (dim < spec.head_dim)[None, :]


@triton.jit
def _fold_keys(
    maximum,
    total,
    weighted,
    q,
    position,
    cache_ptr,
    table_ptr,
    kv_head,
    start,
    end,
    end_key,
    score_scale,
    spec: tl.constexpr,
    keys: tl.constexpr,
    is_masked: tl.constexpr,
):
    """Fold the keys from `start` to `end` into the online softmax of arXiv:2205.14135, base 2.

    Unless `is_masked`, every row sees all of them and they fill whole tiles.
    """
    lane = tl.arange(0, keys)
    dim = tl.arange(0, spec.padded_dim)
    key = start + lane
    # The block ids of a tile are loaded one tile ahead: the load of its keys, which needs them,
    # can then be issued as many tiles ahead as the pipeline has stages.
    block = tl.load(table_ptr + key // spec.block_size, mask=key < end_key, other=0)
    for tile in tl.range(start, end, keys):
        key = tile + lane
        is_key = key < end_key
        row = (block * (2 * spec.num_kv_heads) + kv_head) * spec.block_size + key % spec.block_size
        # A cache has fewer rows than 2^31, but not fewer elements.
        offset = row.to(tl.int64)[:, None] * spec.head_dim + dim[None, :]
        mask = is_key[:, None] & (dim < spec.head_dim)[None, :]
        k = _load_rows(cache_ptr, offset, mask, q.dtype, spec, is_masked)
        v = _load_rows(cache_ptr, offset + spec.values_offset, mask, q.dtype, spec, is_masked)
        next_key = key + keys
        block = tl.load(table_ptr + next_key // spec.block_size, mask=next_key < end_key, other=0)

        scores = tl.dot(q, tl.trans(k), input_precision=spec.precision)
        factor = score_scale * LOG2_E
        if spec.soft_cap is not None:
            # cap tanh(x) = cap (1 - 2 / (exp(2 x) + 1)), all in base 2.
            power = tl.exp2(scores * (2.0 / spec.soft_cap * factor))
            scores = spec.soft_cap * (1.0 - 2.0 / (power + 1.0))
            factor = tl.full([], LOG2_E, tl.float32)
        if is_masked:
            is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
            if spec.sliding_window is not None:
                is_seen &= key[None, :] > position[:, None] - spec.sliding_window
            scores = tl.where(is_seen, scores, MASKED)
        larger = tl.maximum(maximum, tl.max(scores, 1) * factor)
        # Until a row meets its first key its weights are 1 on masked ones; the decay wipes them.
        weights = tl.exp2(scores * factor - larger[:, None])
        decay = tl.exp2(maximum - larger)
        total = total * decay + tl.sum(weights, 1)
        weighted = weighted * decay[:, None]
        weighted = tl.dot(weights.to(v.dtype), v, weighted, input_precision=spec.precision)
        maximum = larger
    return maximum, total, weighted


@triton.jit
def _load_rows(
    cache_ptr, offset, mask, dtype: tl.constexpr, spec: tl.constexpr, is_masked: tl.constexpr
):
    """Return rows of the cache in the type of the products."""
    if spec.decodes_bytes:
        cache_ptr = cache_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    if is_masked or spec.padded_dim != spec.head_dim:
        rows = tl.load(cache_ptr + offset, mask=mask, other=0.0)
    else:
        rows = tl.load(cache_ptr + offset)
    if spec.decodes_bytes:
        return e4m3_as_float16(rows)
    else:
        return rows.to(dtype)
