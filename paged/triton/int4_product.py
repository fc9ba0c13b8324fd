"""The Triton backend of `int4_product`: the weight is read once, as it is stored."""

import jax.numpy as jnp
from jax import Array

from paged.gpu.traits import Gpu, current_gpu
from paged.triton.kernels.int4_product import int4_product_kernel
from paged.triton.launch import Launch, NewArray, Runner, run_on_gpu
from paged.triton.spec import Int4ProductSpec, next_power_of_2

# Each 64 rows read the weight again, if only from the L2 cache; above, XLA's products are faster
# than widening it costs: 4.5 bytes a weight there, 0.5 for each 64 rows here.
MAX_ROWS = 256

_TILE_ROWS, _TILE_OUTPUTS = 64, 64
_GROUP_SIZES = (32, 64, 128, 256)


def int4_product(x: Array, values: Array, scales: Array, zeros: Array | None) -> Array:
    """Return the float32 product, as `paged.int4_product.int4_product` documents."""
    return int4_product_with(run_on_gpu, current_gpu(), x, values, scales, zeros)


def int4_product_with(
    run: Runner, gpu: Gpu, x: Array, values: Array, scales: Array, zeros: Array | None
) -> Array:
    """Return the same by a kernel that `run` runs."""
    num_rows, num_inputs = x.shape
    num_groups, num_outputs = scales.shape
    tile_rows = min(max(next_power_of_2(num_rows), 16), _TILE_ROWS)
    tiles = -(-num_outputs // _TILE_OUTPUTS), -(-num_rows // tile_rows)
    # Two programs per multiprocessor, if the groups can be cut so: more would write more sums.
    most = max(2 * gpu.num_multiprocessors // (tiles[0] * tiles[1]), 1)
    num_splits = max(n for n in range(1, num_groups + 1) if num_groups % n == 0 and n <= most)
    spec = Int4ProductSpec(
        num_rows=num_rows,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        group_size=num_inputs // num_groups,
        has_zeros=zeros is not None,
        tile_rows=tile_rows,
        tile_outputs=_TILE_OUTPUTS,
        num_splits=num_splits,
    )
    (sums,) = run(
        Launch(
            kernel=int4_product_kernel,
            grid=(tiles[0], num_splits, tiles[1]),
            # A pointer must be passed even where nothing goes through it.
            inputs=(x, values, scales, scales if zeros is None else zeros),
            updated=(),
            outputs=(NewArray((num_splits, num_rows, num_outputs), jnp.float32),),
            spec=spec,
            num_warps=4,
            num_stages=3,
        )
    )
    # XLA adds them up in the kernel that uses them.
    return jnp.sum(sums, axis=0)


def unsupported(x: Array, scales: Array) -> str | None:
    """Return why the kernel does not multiply these, or None if it does."""
    group_size = x.shape[1] // scales.shape[0]
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {x.dtype}, neither bfloat16 nor float16"
    if group_size not in _GROUP_SIZES:
        return f"groups of {group_size} inputs are none of {', '.join(map(str, _GROUP_SIZES))}"
    if x.shape[0] > MAX_ROWS:
        return f"{x.shape[0]} rows are more than {MAX_ROWS}"
    return None
