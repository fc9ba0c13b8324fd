"""What the compiled kernels take on each target: the table in docs/gpu_kernels.md.

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m paged.gpu.kernel_table

prints it. A test compares it with the page, so both change together.
"""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from paged.attention import ragged_paged_attention
from paged.expert_product import expert_product
from paged.gpu.aot import Report, Target
from paged.int4_product import int4_product
from paged.kv_write import write_kv

# An h100 has the multiprocessors of an h200, and gets the same kernels.
TABLE_TARGETS = ("a100", "h200", "b200")

# Products of the tensor cores, by target; narrow tiles keep to HMMA everywhere.
TENSOR_CORE = {"a100": "HMMA", "h100": "HGMMA", "h200": "HGMMA", "b200": "UTCHMMA"}

_NUM_SEQS, _NUM_KV_HEADS = 64, 8


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of the op on 64 sequences and 8 kv heads, as shapes.

    Attributes:
      num_tokens: query rows; a batch of decodes if there are as many as sequences.
      head_dim: head size.
      dtype: of the queries.
      cache_dtype: of the cache; None: that of the queries.
      group: q heads per kv head.
      sliding_window: as in `ragged_paged_attention`.
      has_sinks: whether sinks are given.
      table_width: blocks of a sequence, at most.
      block_size: tokens of a block.
      backend: of the attention.
      targets: what it is compiled for.
    """

    num_tokens: int
    head_dim: int = 128
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    group: int = 4
    sliding_window: int | None = None
    has_sinks: bool = False
    table_width: int = 512
    block_size: int = 16
    backend: str = "triton"
    targets: tuple[str, ...] = TABLE_TARGETS


CALLS: dict[str, Call] = {
    "decode, head size 128": Call(64),
    "decode, 128, e4m3 cache": Call(64, cache_dtype="float8_e4m3fn"),
    "mixed, head size 128": Call(2048),
    "mixed, 128, e4m3 cache": Call(2048, cache_dtype="float8_e4m3fn"),
    "mixed, 64, group 8, window, sinks": Call(
        2048, head_dim=64, group=8, sliding_window=128, has_sinks=True
    ),
    "mixed, head size 256": Call(2048, head_dim=256),
}

# Mosaic's kernel, which is for prefill.
MOSAIC_CALLS: dict[str, Call] = {
    "Mosaic, head size 128": Call(2048, backend="mosaic", targets=("h200", "b200")),
    "Mosaic, 64, group 8, window, sinks": Call(
        2048,
        head_dim=64,
        group=8,
        sliding_window=128,
        has_sinks=True,
        backend="mosaic",
        targets=("h200",),
    ),
    "Mosaic, head size 256": Call(2048, head_dim=256, backend="mosaic", targets=("h200",)),
}


def cases() -> Iterator[tuple[str, str]]:
    """Yield the calls and targets of the table, by name."""
    for name, call in (CALLS | MOSAIC_CALLS).items():
        for target_name in call.targets:
            yield name, target_name


def compile_call(target: Target, call: Call) -> Report:
    """Compile the write of the new keys and values, and the attention after it, for a target."""

    def step(
        cache: jax.Array,
        q: jax.Array,
        k: jax.Array,
        tables: jax.Array,
        lens: jax.Array,
        starts: jax.Array,
        slots: jax.Array,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        cache = write_kv(cache, k, k, slots, backend=call.backend)
        attend = functools.partial(ragged_paged_attention, sliding_window=call.sliding_window)
        return cache, attend(q, cache, tables, lens, starts, sinks=sinks, backend=call.backend)

    num_q_heads = _NUM_KV_HEADS * call.group
    cache_shape = (4096, 2, _NUM_KV_HEADS, call.block_size, call.head_dim)
    int32s = functools.partial(target.struct, dtype=jnp.int32)
    return target.compile(
        jax.jit(step, donate_argnums=0),
        target.struct(cache_shape, call.cache_dtype or call.dtype),
        target.struct((call.num_tokens, num_q_heads, call.head_dim), call.dtype),
        target.struct((call.num_tokens, _NUM_KV_HEADS, call.head_dim), call.dtype),
        int32s((_NUM_SEQS, call.table_width)),
        int32s((_NUM_SEQS,)),
        int32s((_NUM_SEQS + 1,)),
        int32s((call.num_tokens,)),
        target.struct((num_q_heads,), jnp.float32) if call.has_sinks else None,
    )


def compile_case(name: str, target_name: str) -> Report:
    """Compile a call of the table, by name, for a target."""
    return compile_call(Target(target_name), (CALLS | MOSAIC_CALLS)[name])


@functools.cache
def process_for(target_name: str) -> concurrent.futures.Executor:
    """Return a process to compile Mosaic's kernels for a target in.

    Its compiler remembers the first target of a process, and refuses newer ones.
    """
    return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


# Rows of products of 4,096 inputs with 4,096 outputs, groups of 128 and zero points.
PRODUCTS: dict[str, int] = {"1 row": 1, "64 rows": 64}


def compile_product(target: Target, num_rows: int) -> Report:
    """Compile a product with a 4-bit weight for a target."""
    size, num_groups = 4096, 32

    def step(x: jax.Array, values: jax.Array, scales: jax.Array, zeros: jax.Array) -> jax.Array:
        return int4_product(x, values, scales, zeros, backend="triton").astype(x.dtype)

    return target.compile(
        jax.jit(step),
        target.struct((num_rows, size), jnp.bfloat16),
        target.struct((size, size // 2), jnp.uint8),
        target.struct((num_groups, size), jnp.bfloat16),
        target.struct((num_groups, size), jnp.uint8),
    )


# Pairs of a row and one of 128 experts: 64 and 1,024 tokens with 8 experts each.
EXPERT_PRODUCTS: dict[str, int] = {"512 rows": 512, "8,192 rows": 8192}


def compile_expert_product(target: Target, num_rows: int) -> Report:
    """Compile a product of 128 groups of rows with experts for a target: Qwen3-30B-A3B's up."""
    num_experts, num_outputs, num_inputs = 128, 768, 2048

    def step(x: jax.Array, weights: jax.Array, ends: jax.Array) -> jax.Array:
        return expert_product(x, weights, None, ends, backend="triton")

    return target.compile(
        jax.jit(step),
        target.struct((num_rows, num_inputs), jnp.bfloat16),
        target.struct((num_experts, num_outputs, num_inputs), jnp.bfloat16),
        target.struct((num_experts,), jnp.int32),
    )


def rows(name: str, target: Target, report: Report) -> Iterator[str]:
    """Yield the lines of the table for one call, or one product."""
    for kernel in report.kernels:
        is_small = kernel.name in ("write_kv_kernel", "combine_kernel")
        if is_small and name != "decode, head size 128":
            continue  # they hardly differ between calls
        what = kernel.name.removeprefix("ragged_paged_").removesuffix("_kernel").replace("_", " ")
        what = what if is_small else f"{what}: {name}"
        products = [
            f"{count} {instruction}"
            for instruction in ("HMMA", "HGMMA", "UTCHMMA")
            if (count := kernel.count(instruction))
        ]
        fields = (
            what,
            target.name,
            kernel.registers,
            kernel.spill_bytes,
            f"{kernel.shared_bytes:,}",
            kernel.num_threads // 32,
            kernel.programs_per_multiprocessor(target.shared_bytes_per_multiprocessor),
            ", ".join(products) or "none",
        )
        yield f"| {' | '.join(map(str, fields))} |"


HEADER = """\
| kernel | target | registers | spill bytes | shared bytes | warps | per multiprocessor | products |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    """Print the table."""
    print(HEADER)
    for name, target_name in cases():
        if name in MOSAIC_CALLS:
            report = process_for(target_name).submit(compile_case, name, target_name).result()
        else:
            report = compile_case(name, target_name)
        print("\n".join(rows(name, Target(target_name), report)), flush=True)
    for name, num_rows in PRODUCTS.items():
        for target in map(Target, TABLE_TARGETS):
            print("\n".join(rows(name, target, compile_product(target, num_rows))), flush=True)
    for name, num_rows in EXPERT_PRODUCTS.items():
        for target in map(Target, TABLE_TARGETS):
            print(
                "\n".join(rows(name, target, compile_expert_product(target, num_rows))), flush=True
            )


if __name__ == "__main__":
    main()
