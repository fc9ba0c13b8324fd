"""The Mosaic kernel against the dense oracle, in JAX's interpreter for GPU kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.gpu.traits import Gpu
from tests.paged.mosaic import interpreted
from tests.paged.mosaic.interpreted import BLACKWELL, HOPPER
from tests.paged.oracle import Batch, Shape, assert_matches, make_batch

# Poison is multiplied, and then masked.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")

# On Hopper: slabs of 16 rows, items of 32, tiles of 128 keys in 4 loads; the last rows of the last
# slab are not there.
MIXED = Shape(45, 4, 10, 32, 2, 4, 64, "bfloat16")
# Slabs of 8 rows for 7 heads, tiles in 8 loads.
WINDOW = Shape(40, 4, 20, 16, 1, 7, 64, "float16", sliding_window=70, soft_cap=20.0, has_sinks=True)
FEATURES = {
    # Two tiles of 8 heads share a kv head.
    "scales": (Shape(24, 3, 3, 128, 1, 16, 64, "bfloat16", has_kv_scales=True), [(300, 5), (9, 8)]),
    # Tiles of 64 keys, two in a block; rows leave in halves.
    "head_dim_256": (
        Shape(24, 3, 3, 128, 1, 2, 256, "bfloat16", sliding_window=150, has_sinks=True),
        [(300, 20), (129, 1)],
    ),
}


@pytest.fixture(autouse=True)
def _state_of_the_interpreter_ends_with_the_test():
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_every_feature_equals_dense_attention_on_hopper(name: str):
    shape, seqs = FEATURES[name]
    batch = make_batch(shape, seqs, seed=1)
    assert_matches(interpreted.attend(batch), batch)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", [MIXED, WINDOW], ids=["mixed", "window"])
@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_random_ragged_batches_equal_dense_attention(gpu: Gpu, shape: Shape, seed: int):
    rng = np.random.default_rng(seed)
    edges = [1, 31, 32, 33, 127, 128, 129, 255, 256, 257, shape.max_context]
    seqs: list[tuple[int, int]] = []
    rows_left = shape.num_tokens
    for context in rng.permutation(edges)[: shape.num_seqs].tolist():
        longest = min(context, rows_left)
        if longest:
            query = int(rng.choice([1, longest, rng.integers(1, longest, endpoint=True)]))
            seqs.append((context, query))
            rows_left -= query
    shared_blocks = 0 if shape.sliding_window else int(rng.integers(3))
    batch = make_batch(shape, seqs, seed, shared_blocks)
    assert_matches(interpreted.attend(batch, gpu), batch)


@pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_empty_batch_and_empty_sequences_give_zeros(gpu: Gpu):
    empty = make_batch(MIXED, [], seed=2)
    assert_matches(interpreted.attend(empty, gpu), empty)
    batch = make_batch(MIXED, [(20, 7), (30, 30)], seed=4)
    tables, seq_lens = np.zeros_like(batch.block_tables), np.zeros_like(batch.seq_lens)
    tables[[0, 2]], seq_lens[[0, 2]] = batch.block_tables[:2], batch.seq_lens[:2]
    starts = np.array([0, 7, 7, 37, 37], np.int32)
    spread = Batch(MIXED, batch.q, batch.kv_cache, tables, seq_lens, starts)
    assert_matches(interpreted.attend(spread, gpu), spread)


def test_race_detector_sees_a_race():
    def body(output, shared):
        shared[...] = jnp.full((128,), 1.0, jnp.float32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared, output)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpreted.INTERPRET,
    )
    jax.block_until_ready(jax.jit(kernel)())
    assert gpu_callbacks.get_races().races_found
