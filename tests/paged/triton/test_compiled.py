"""The Triton kernels as they are compiled for GPUs that are not here (`pytest -m aot`).

What is read off is structure: it says that a program fits and copies nothing, not that it is fast.
"""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.kv_cache import KVCache
from paged.models.config import ModelConfig
from paged.models.forward import abstract_model
from paged.models.packing import BatchLayout
from paged.models.step import forward_step, step_leaves

pytestmark = pytest.mark.aot

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "gpu_kernels.md"
TOOLS = ("triton", "jax_triton", "jax_cuda12_plugin")

# Bytes of what may be copied: loop counters and the like, never an array of the cache.
SMALL = 1024


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    for name in TOOLS:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"missing tool: {name}, of the extra `aot`")
    from triton import knobs

    if knobs.runtime.interpret:
        pytest.fail("these tests need a process of their own: pytest -m aot")


@functools.cache
def target(name: str):
    from paged.gpu.aot import Target

    return Target(name)


@functools.cache
def report(name: str, target_name: str):
    from paged.gpu.kernel_table import CALLS, compile_call

    return compile_call(target(target_name), CALLS[name])


CALL_NAMES = [
    "decode, head size 128",
    "decode, 128, e4m3 cache",
    "mixed, head size 128",
    "mixed, 128, e4m3 cache",
    "mixed, 64, group 8, window, sinks",
    "mixed, head size 256",
]
TARGETS = ["a100", "h200", "b200"]


@pytest.mark.parametrize("target_name", TARGETS)
@pytest.mark.parametrize("name", CALL_NAMES)
def test_kernels_fit_their_target(name: str, target_name: str):
    from paged.gpu.kernel_table import TENSOR_CORE

    compiled = report(name, target_name)
    names = [kernel.name for kernel in compiled.kernels]
    has_parts = "window" not in name
    assert names == ["write_kv_kernel", "attention_kernel"] + ["combine_kernel"] * has_parts
    for kernel in compiled.kernels:
        assert kernel.spill_bytes == 0
        assert kernel.shared_bytes <= target(target_name).shared_bytes_per_program
    attention = compiled.kernel("attention_kernel")
    is_decode = name.startswith("decode")
    assert attention.count("HMMA" if is_decode else TENSOR_CORE[target_name])
    assert attention.count("LDGSTS"), "keys and values are loaded asynchronously"
    # Bytes on their way are what a decode lives on, so several programs share a multiprocessor.
    programs = attention.programs_per_multiprocessor(
        target(target_name).shared_bytes_per_multiprocessor
    )
    assert programs >= (2 if is_decode else 1)


@pytest.mark.parametrize("target_name", TARGETS)
@pytest.mark.parametrize("name", CALL_NAMES)
def test_cache_is_updated_in_place_within_one_graph(name: str, target_name: str):
    from paged.gpu.kernel_table import CALLS

    call, compiled = CALLS[name], report(name, target_name)
    element = 1 if call.cache_dtype else 2
    assert compiled.alias_bytes == 4096 * 2 * 8 * 16 * call.head_dim * element
    assert compiled.largest_copy_bytes <= SMALL
    assert compiled.operations == {"kCommandBuffer": 1}


def test_table_of_kernels_is_current():
    from paged.gpu.kernel_table import rows

    page = DOCS.read_text()
    for name in CALL_NAMES:
        for target_name in TARGETS:
            for line in rows(name, target(target_name), report(name, target_name)):
                assert line in page, "write what `python -m paged.gpu.kernel_table` prints there"


@pytest.mark.parametrize("target_name", TARGETS)
def test_weights_of_4_bits_are_read_as_they_are_stored(target_name: str):
    from paged.gpu.kernel_table import PRODUCTS, TENSOR_CORE, compile_product, rows
    from paged.gpu.traffic import kernel_traffic

    for name, num_rows in PRODUCTS.items():
        compiled = compile_product(target(target_name), num_rows)
        kernel = compiled.kernel("int4_product_kernel")
        assert kernel.spill_bytes == 0
        assert kernel.count(TENSOR_CORE[target_name])
        product, sums = kernel_traffic(compiled.hlo)
        weight = 4096 * 2048 + 32 * 4096 * 3  # codes, scales and zero points
        assert product.read_bytes == weight + num_rows * 4096 * 2
        # The partial sums are added up and rounded in one kernel; there are fewer than weights.
        assert product.written_bytes == sums.read_bytes < weight
        assert sums.written_bytes == num_rows * 4096 * 2
        (line,) = rows(name, target(target_name), compiled)
        assert line in DOCS.read_text(), (
            "write what `python -m paged.gpu.kernel_table` prints there"
        )


@pytest.mark.parametrize("target_name", TARGETS)
def test_experts_are_multiplied_by_one_kernel_that_copies_no_weight(target_name: str):
    from paged.gpu.kernel_table import EXPERT_PRODUCTS, TENSOR_CORE, compile_expert_product, rows

    for name, num_rows in EXPERT_PRODUCTS.items():
        compiled = compile_expert_product(target(target_name), num_rows)
        kernel = compiled.kernel("expert_product_kernel")
        assert kernel.spill_bytes == 0
        assert kernel.count(TENSOR_CORE[target_name])
        # The table of tiles is made on the device, within the graph.
        assert compiled.operations == {"kCommandBuffer": 1}
        assert compiled.largest_copy_bytes <= SMALL
        (line,) = rows(name, target(target_name), compiled)
        assert line in DOCS.read_text(), (
            "write what `python -m paged.gpu.kernel_table` prints there"
        )


def test_calls_of_the_table_are_those_tested():
    from paged.gpu.kernel_table import CALLS, TABLE_TARGETS

    assert list(CALLS) == CALL_NAMES
    assert list(TABLE_TARGETS) == TARGETS


# Two layers of an 8B model's shape, apart from its vocabulary.
MODEL = ModelConfig(
    "LlamaForCausalLM",
    vocab_size=512,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=2,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
)
NUM_BLOCKS, BLOCK_SIZE = 2000, 16


def compile_step(
    target_name: str, layout: BatchLayout, cache_dtype: str, quantization: str | None = None
):
    gpu = target(target_name)
    graphdef, params = abstract_model(
        MODEL, dtype="bfloat16", attention_backend="triton", quantization=quantization
    )
    leaves, treedef = step_leaves(params, None)
    step = functools.partial(forward_step, treedef=treedef, graphdef=graphdef, layout=layout)
    layer = gpu.struct((NUM_BLOCKS, 2, 8, BLOCK_SIZE, 128), cache_dtype)
    cache = KVCache((layer, layer), gpu.struct((NUM_BLOCKS, BLOCK_SIZE), jnp.int32))
    return gpu.compile(
        jax.jit(step, donate_argnums=1),
        tuple(gpu.struct(leaf.shape, leaf.dtype) for leaf in leaves),
        cache,
        gpu.struct((layout.size,), jnp.int32),
        gpu.struct((64,), jnp.int32),
    )


@pytest.mark.parametrize(
    ("target_name", "num_tokens", "cache_dtype"),
    [("h100", 64, "bfloat16"), ("h100", 1024, "bfloat16"), ("a100", 64, "float8_e4m3fn")],
)
def test_step_of_a_model_copies_no_cache_and_is_one_graph(
    target_name: str, num_tokens: int, cache_dtype: str
):
    layout = BatchLayout(num_tokens, 64, 512, max_logit_edits=8, vocab_size=MODEL.vocab_size)
    compiled = compile_step(target_name, layout, cache_dtype)
    layer_bytes = NUM_BLOCKS * 2 * 8 * BLOCK_SIZE * 128 * jnp.dtype(cache_dtype).itemsize
    assert compiled.alias_bytes == 2 * layer_bytes + NUM_BLOCKS * BLOCK_SIZE * 4
    # Nothing as large as a layer's cache is copied, or held beside it.
    assert compiled.largest_copy_bytes < layer_bytes // 100
    assert compiled.temp_bytes < 2 * layer_bytes
    assert compiled.operations == {"kCommandBuffer": 1}
    # Both layers call the same kernels.
    names = sorted(kernel.name for kernel in compiled.kernels)
    assert names == ["attention_kernel", "combine_kernel"]
    assert_keys_are_rotated_where_they_are_written(compiled, num_tokens, cache_dtype)


def assert_keys_are_rotated_where_they_are_written(
    compiled, num_tokens: int, cache_dtype: str
) -> None:
    from paged.gpu.traffic import kernel_traffic

    kernels = kernel_traffic(compiled.hlo)
    elements = num_tokens * 8 * 128
    # Keys and values of a layer leave the scatter for the cache, and no other kernel writes them.
    both = 2 * elements * jnp.dtype(cache_dtype).itemsize
    sizes = (both, elements * 2)
    assert [each.written_bytes for each in kernels if each.written_bytes in sizes] == [both, both]
    # Else XLA writes them by atomic exchanges, a loop for each element.
    assert compiled.hlo.count("unique_indices=true") == 2


@pytest.mark.parametrize("num_tokens", [64, 1024])
def test_int8_weights_are_widened_inside_the_product(num_tokens: int):
    from paged.gpu.traffic import kernel_traffic

    layout = BatchLayout(num_tokens, 64, 512, max_logit_edits=8, vocab_size=MODEL.vocab_size)
    compiled = compile_step("h200", layout, "bfloat16", "int8")
    smallest = 4096 * 4096  # of the projections that XLA does not join
    weights = 3 * 14336 * 4096 + smallest + 6144 * 4096
    # Activations are not as many, so what reads a weight shows.
    products = [each for each in kernel_traffic(compiled.hlo) if "gemm_fusion" in each.name]
    assert len(products) == 10, "q, k and v in one"
    activations = sum(each.read_bytes for each in products) - 2 * weights
    assert 0 < activations < (0.1 if num_tokens == 64 else 0.8) * 2 * weights
    assert compiled.temp_bytes < 6 * smallest


def test_weights_of_four_bits_are_multiplied_as_they_are_stored():
    layout = BatchLayout(64, 64, 512, max_logit_edits=8, vocab_size=MODEL.vocab_size)
    compiled = compile_step("h200", layout, "bfloat16", "int4")
    names = {kernel.name for kernel in compiled.kernels}
    assert names == {"attention_kernel", "combine_kernel", "int4_product_kernel"}
    # No room for a widened weight of the MLP.
    assert compiled.temp_bytes < 2 * 14336 * 4096
    assert compiled.operations == {"kCommandBuffer": 1}


def test_unknown_target_is_named():
    from paged.gpu.aot import Target

    with pytest.raises(ValueError, match="target 'v100' is unknown; choose one of a100, h100, h2"):
        Target("v100")


def test_copies_are_found_and_measured():
    gpu = target("h200")

    def keep_both(x):
        return x.at[0].set(1.0), x  # the argument is not donated

    x = gpu.struct((1024, 256), "float32")
    compiled = gpu.compile(jax.jit(keep_both), x)
    assert compiled.largest_copy_bytes == 1024 * 256 * 4
    assert compiled.alias_bytes == 0
    with pytest.raises(LookupError, match=r"0 kernels are called attention_kernel; .* has: none"):
        compiled.kernel("attention_kernel")


def test_collectives_are_counted():
    from paged.gpu.aot import Target

    gpu = Target("h200", mesh={"tp": 8})
    x, w = gpu.struct((64, 4096), "bfloat16", None, "tp"), gpu.struct((4096, 512), "bfloat16", "tp")
    out = jax.NamedSharding(gpu.mesh, jax.P())
    compiled = gpu.compile(jax.jit(lambda x, w: x @ w, out_shardings=out), x, w)
    assert compiled.collectives == {"all-reduce": 1}
    assert compiled.argument_bytes == (64 * 512 + 512 * 512) * 2


def test_target_tells_what_kernels_ask():
    from paged.gpu.traits import Gpu

    assert target("a100").gpu == Gpu(80, 108)
    assert target("b200").gpu == Gpu(100, 148)
    assert np.diff([target(name).gpu.has_float8 for name in ("a100", "h100")]).tolist() == [True]
