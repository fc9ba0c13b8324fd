"""Ragged paged attention for Hopper: TMA, wgmma, warp specialisation and a persistent grid.

A program has three warpgroups. One copies queries, and the blocks of keys and values that the
block table names, into shared memory; two multiply, 64 rows each, and take turns: while one has
the tensor cores, the other does its softmax. Source: FlashAttention-3, arXiv:2407.08608; online
softmax, arXiv:2205.14135.

Everything shared is handed over by barriers: `ready` from the loading warpgroup to the others,
`free` back.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.mosaic.spec import COMPUTE_WARPGROUPS, TILE_ROWS, AttentionSpec

# Stands for minus infinity where the difference of two must not be NaN.
_MASKED = -1e30
_LOG2_E = math.log2(math.e)

# Registers of a thread: 65,536 of a multiprocessor among 2 x 128 that compute and 128 that load.
_COMPUTE_REGISTERS, _LOAD_REGISTERS = 232, 40

_ROW = plgpu.Layout.WGMMA.reduce(1)


def run_kernel(q, kv_cache, tables, items, num_items, kv_scales, sinks, spec, interpret=None):
    extras = [each for each in (kv_scales, sinks) if each is not None]

    def body(q_ref, cache_ref, tables_ref, items_ref, num_items_ref, columns_ref, *refs):
        rest = list(refs)
        scales_ref = rest.pop(0) if kv_scales is not None else None
        sinks_ref = rest.pop(0) if sinks is not None else None
        out_ref, *scratch = rest
        kernel(q_ref, cache_ref, tables_ref, items_ref, num_items_ref, columns_ref, scales_ref, sinks_ref, out_ref, *scratch, spec=spec, interpret=bool(interpret))

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tile = (COMPUTE_WARPGROUPS, TILE_ROWS, spec.head_dim)
    keys = (spec.num_stages, spec.tile_keys, spec.head_dim)
    stages = spec.num_stages
    ready = plgpu.Barrier(num_arrivals=spec.blocks_per_tile, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages)
    both = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            plgpu.SMEM(tile, q.dtype, transforms=swizzled),
            plgpu.SMEM(keys, q.dtype, transforms=swizzled),
            plgpu.SMEM(keys, q.dtype, transforms=swizzled),
            plgpu.SMEM(tile, q.dtype),
            plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS * spec.folding.num_heads),
            both,
            ready, free, ready, free,
            plgpu.Barrier(),
            both,
        ],
        grid=(spec.num_programs,),
        grid_names=("program",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, kv_cache, tables, items, num_items, np.arange(spec.tile_keys, dtype=np.int32), *extras)


def kernel(q_ref, cache_ref, tables_ref, items_ref, num_items_ref, columns_ref, scales_ref, sinks_ref, out_ref,
           q_s, k_s, v_s, o_s, q_ready, q_free, k_ready, k_free, v_ready, v_free, v_clean, turn, *, spec, interpret):
    T, G, BN, S, D = spec.folding.num_tokens, spec.folding.num_heads, spec.tile_keys, spec.num_stages, spec.head_dim
    program = lax.axis_index("program")
    warpgroup = lax.axis_index("warpgroup")
    num_work = num_items_ref[0] * spec.num_head_tiles
    num_rounds = lax.div(num_work + (spec.num_programs - 1 ), jnp.int32(spec.num_programs))

    def work(round_):
        # Every other round goes backwards
        back = lax.rem(round_, jnp.int32(2)) == 1
        index = round_ * spec.num_programs + jnp.where(back, spec.num_programs - 1 - program, program)
        index = index.astype(jnp.int32)
        item = lax.div(index, jnp.int32(spec.num_head_tiles))
        head_tile = lax.rem(index, jnp.int32(spec.num_head_tiles))
        f = [items_ref[item, c] for c in range(8)]
        f[0] = pl.multiple_of(f[0], 8)
        return index < num_work, head_tile, f

    def tiles(f):
        row, low, high, offset, seq, first_key, end_key, context = f
        first_block = lax.div(first_key, jnp.int32(spec.block_size))
        key0 = first_block * spec.block_size
        num_tiles = lax.div(end_key - key0 + (BN - 1), jnp.int32(BN))
        return first_block, key0, num_tiles

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _load():
        plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")

        def one(round_, step):
            live, head_tile, f = work(round_)
            row, low, high, offset, seq, first_key, end_key, context = f
            first_block, key0, num_tiles = tiles(f)
            num_tiles = jnp.where(live, num_tiles, 0)
            kv_head = lax.div(head_tile, jnp.int32(spec.tiles_per_kv_head))
            last_block = jnp.maximum(lax.div(context - 1, jnp.int32(spec.block_size)), 0)

            @pl.when(live)
            def _():
                pl.when(round_ > 0)(lambda: plgpu.barrier_wait(q_free))
                for w in range(COMPUTE_WARPGROUPS):
                    for g in range(G):
                        plgpu.copy_gmem_to_smem(
                            q_ref.at[pl.ds(pl.multiple_of(row + w * T, 8), T), head_tile * G + g],
                            q_s.at[w, pl.ds(g * T, T)], q_ready)

            def tile(j, step):
                slot = lax.rem(step, jnp.int32(S))
                blocks = []
                for p in range(spec.blocks_per_tile):
                    b = jnp.minimum(first_block + j * spec.blocks_per_tile + p, last_block)
                    blocks.append(tables_ref[seq, b])
                for kind, (s_, r_, f_) in enumerate(((k_s, k_ready, k_free), (v_s, v_ready, v_free))):
                    pl.when(step >= S)(lambda: plgpu.barrier_wait(f_.at[slot]))
                    for p, block in enumerate(blocks):
                        plgpu.copy_gmem_to_smem(cache_ref.at[block, kind, kv_head],
                            s_.at[slot, pl.ds(p * spec.block_size, spec.block_size)], r_.at[slot])
                return step + 1
            return lax.fori_loop(0, num_tiles, tile, step)
        steps = lax.fori_loop(0, num_rounds, one, jnp.int32(0))
        pl.when(program < num_work)(lambda: plgpu.barrier_wait(q_free))
        for i in range(S):
            @pl.when(steps > i)
            def _():
                plgpu.barrier_wait(k_free.at[i])
                plgpu.barrier_wait(v_free.at[i])

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def one(round_, step):
            live, head_tile, f = work(round_)
            def go():
                return item(head_tile, f, step)
            return lax.cond(live, go, lambda: step)

        def item(head_tile, f, step0):
            row, low, high, offset, seq, first_key, end_key, context = f
            first_block, key0, num_tiles = tiles(f)
            kv_head = lax.div(head_tile, jnp.int32(spec.tiles_per_kv_head))
            my_pos = row + offset + warpgroup * T
            factor = jnp.float32(spec.scale)
            value_scale = jnp.float32(1)
            if scales_ref is not None:
                factor = factor * scales_ref[0, kv_head]
                value_scale = scales_ref[1, kv_head]
            m = plgpu.layout_cast(jnp.full((TILE_ROWS,), _MASKED, jnp.float32), _ROW)
            l = plgpu.layout_cast(jnp.full((TILE_ROWS,), 0.0 if sinks_ref is None else 1.0, jnp.float32), _ROW)
            if sinks_ref is not None:
                lane = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=_ROW)
                for g in range(G):
                    sink = sinks_ref[head_tile * G + g].astype(jnp.float32) * _LOG2_E
                    m = jnp.where(lane >= g * T, sink, m)
            acc = plgpu.layout_cast(jnp.zeros((TILE_ROWS, D), jnp.float32), plgpu.Layout.WGMMA)

            plgpu.barrier_wait(q_ready)
            pl.when(num_tiles > 0)(lambda: plgpu.barrier_wait(k_ready.at[lax.rem(step0, jnp.int32(S))]))
            pl.when(warpgroup == 1)(take_turns)

            def tile(j, carry, masked):
                acc, m, l = carry
                step = step0 + j
                slot = lax.rem(step, jnp.int32(S))

                def multiply(r):
                    plgpu.wgmma(r, q_s.at[warpgroup], k_s.at[slot].transpose((1, 0)))
                    take_turns()
                    return r[...]
                scores = pl.run_scoped(multiply, plgpu.ACC((TILE_ROWS, BN), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                fac = factor * _LOG2_E
                if spec.soft_cap is not None:
                    power = jnp.exp2(scores * (fac * (2.0 / spec.soft_cap)))
                    scores = spec.soft_cap * (1.0 - 2.0 / (power + 1.0))
                    fac = jnp.float32(_LOG2_E)
                start = key0 + j * BN
                if masked:
                    c = plgpu.load(columns_ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    c = lax.broadcast_in_dim(c, scores.shape, [1])
                    rr = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=_ROW)
                    last = (rr & (T - 1)) + (my_pos - start)
                    last = lax.broadcast_in_dim(last, scores.shape, [0])
                    seen = c <= last
                    if spec.sliding_window is not None:
                        seen = seen & (c > last - spec.sliding_window)
                    scores = jnp.where(seen, scores, _MASKED)
                m_new = jnp.maximum(m, scores.max(axis=1) * fac)
                decay = jnp.exp2(m - m_new)
                p = jnp.exp2(scores * fac - lax.broadcast_in_dim(m_new, scores.shape, [0]))
                acc *= lax.broadcast_in_dim(decay, acc.shape, [0])
                l = l * decay
                p16 = p.astype(q_s.dtype)
                l += p.sum(axis=1)
                acc, l, m_new, p16 = lax.optimization_barrier((acc, l, m_new, p16))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_ready.at[slot])
                if masked:
                    dirty = (start < first_key) | (start + BN > context)
                    @pl.when(dirty)
                    def _():
                        @pl.when(warpgroup == 0)
                        def _():
                            for chunk in range(0, BN, 64):
                                part = v_s.at[slot, pl.ds(chunk, 64)]
                                key = plgpu.broadcasted_iota(jnp.int32, (64, D), 0, layout=plgpu.Layout.WGMMA) + (start + chunk)
                                v = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
                                part[...] = jnp.where((key >= first_key) & (key < context), v, jnp.zeros_like(v))
                            plgpu.commit_smem()
                            plgpu.barrier_arrive(v_clean)
                        plgpu.barrier_wait(v_clean)
                plgpu.barrier_wait(turn)

                def next_keys():
                    plgpu.barrier_wait(k_ready.at[lax.rem(step + 1, jnp.int32(S))])
                if interpret:
                    acc = acc + jnp.dot(p16, v_s[slot], preferred_element_type=jnp.float32)
                    plgpu.commit_smem()
                    pl.when(j + 1 < num_tiles)(next_keys)
                else:
                    def weigh(r):
                        plgpu.wgmma(r, p16, v_s.at[slot])
                        pl.when(j + 1 < num_tiles)(next_keys)
                    acc = pl.run_state(weigh)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, m_new, l

            open_start = jnp.int32(0)
            carry = (acc, m, l)
            if spec.sliding_window is not None:
                left = jnp.maximum(high + offset - spec.sliding_window - key0, 0)
                open_start = jnp.minimum(lax.div(left + (BN - 1), jnp.int32(BN)), num_tiles)
                carry = lax.fori_loop(0, open_start, functools.partial(tile, masked=True), carry)
            open_end = jnp.clip(lax.div(jnp.maximum(low + offset + 1 - key0, 0), jnp.int32(BN)), open_start, num_tiles)
            carry = lax.fori_loop(open_start, open_end, functools.partial(tile, masked=False), carry)
            acc, m, l = lax.fori_loop(open_end, num_tiles, functools.partial(tile, masked=True), carry)
            pl.when(warpgroup == 0)(take_turns)
            plgpu.barrier_arrive(q_free)

            share = value_scale / jnp.where(l == 0.0, 1.0, l)
            acc = acc * lax.broadcast_in_dim(share, acc.shape, [0])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            mine = o_s.at[warpgroup]
            mine[...] = acc.astype(q_s.dtype)
            plgpu.commit_smem()
            my_row = row + warpgroup * T
            first = jnp.clip(low - my_row, 0, T)
            end = jnp.clip(high - my_row, 0, T)
            whole = end - first == T
            for g in range(G):
                head = head_tile * G + g
                @pl.when(whole)
                def _():
                    plgpu.copy_smem_to_gmem(mine.at[pl.ds(g * T, T)], out_ref.at[pl.ds(my_row, T), head])
                @pl.when(jnp.logical_not(whole))
                def _():
                    @pl.loop(first, end)
                    def _(t):
                        plgpu.copy_smem_to_gmem(mine.at[pl.ds(g * T + t, 1)], out_ref.at[pl.ds(my_row + t, 1), head])
            return step0 + num_tiles
        lax.fori_loop(0, num_rounds, one, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
