"""The Triton backend of `expert_product`: programs only for the rows that there are."""

import jax.numpy as jnp
from jax import Array

from paged.triton.kernels.expert_product import expert_product_kernel
from paged.triton.launch import Launch, NewArray, Runner, run_on_gpu
from paged.triton.spec import ExpertProductSpec, next_power_of_2

_TILE_OUTPUTS, _TILE_INPUTS = 64, 64
_MIN_TILE_ROWS, _MAX_TILE_ROWS = 16, 64


def expert_product(x: Array, weights: Array, bias: Array | None, group_ends: Array) -> Array:
    """Return the products, as `paged.expert_product.expert_product` documents."""
    return expert_product_with(run_on_gpu, x, weights, bias, group_ends)


def expert_product_with(
    run: Runner, x: Array, weights: Array, bias: Array | None, group_ends: Array
) -> Array:
    """Return the same by a kernel that `run` runs."""
    num_rows, num_inputs = x.shape
    num_experts, num_outputs, _ = weights.shape
    average = max(num_rows // num_experts, 1)
    tile_rows = min(max(next_power_of_2(average), _MIN_TILE_ROWS), _MAX_TILE_ROWS)
    experts, starts = row_tiles(group_ends, num_rows, tile_rows)
    spec = ExpertProductSpec(
        num_experts=num_experts,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        has_bias=bias is not None,
        tile_rows=tile_rows,
        tile_outputs=_TILE_OUTPUTS,
        tile_inputs=_TILE_INPUTS,
    )
    (products,) = run(
        Launch(
            kernel=expert_product_kernel,
            # Tiles of outputs first: programs of one tile of rows share it in the cache.
            grid=(-(-num_outputs // _TILE_OUTPUTS), len(experts), 1),
            # A pointer must be passed even where nothing goes through it.
            inputs=(x, weights, x if bias is None else bias, experts, starts, group_ends),
            updated=(),
            outputs=(NewArray((num_rows, num_outputs), x.dtype),),
            spec=spec,
            num_warps=4,
            num_stages=3,
        )
    )
    return products


def row_tiles(group_ends: Array, num_rows: int, tile_rows: int) -> tuple[Array, Array]:
    """Return expert and first row of each tile of rows, int32 `[num_tiles]` each.

    There are as many tiles as any lengths of groups may need; the expert of those that are not
    needed is `num_experts`.
    """
    num_experts = len(group_ends)
    group_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), group_ends[:-1]])
    tile_ends = jnp.cumsum(-((group_starts - group_ends) // tile_rows)).astype(jnp.int32)
    tiles = jnp.arange(-(-num_rows // tile_rows) + min(num_experts, num_rows), dtype=jnp.int32)
    # By comparing all: a search would be a loop, which the host drives on a GPU.
    experts = jnp.searchsorted(tile_ends, tiles, side="right", method="compare_all")
    known = jnp.minimum(experts, num_experts - 1)
    tile_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), tile_ends[:-1]])
    return experts, group_starts[known] + (tiles - tile_starts[known]) * tile_rows


def unsupported(x: Array, weights: Array) -> str | None:
    """Return why the kernel does not multiply these, or None if it does."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {x.dtype}, neither bfloat16 nor float16"
    if weights.dtype != x.dtype:
        return f"the weights are {weights.dtype}, x is {x.dtype}"
    return None
