"""What packing a model replaces, and what it leaves."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged.models.config import ModelConfig
from paged.models.forward import abstract_model, init_random_params
from paged.models.linear_packing import pack_linear_layers
from paged.native.huge_pages import PAGE_BYTES
from paged.native.linear import packed_rows

# 70 entries and 27 features: neither fills its tile.
SHAPE: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 27,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


def pack(*, tied: bool, dtype: str = "bfloat16"):
    """Copies of the parameters before packing, those after it, and the arrays that were given."""
    config = ModelConfig("LlamaForCausalLM", tie_word_embeddings=tied, **SHAPE)
    graphdef, _ = abstract_model(config, dtype=dtype)
    params = init_random_params(config, dtype=dtype)
    given = arrays(params)
    plain = jax.tree.map(np.array, params)
    packed = pack_linear_layers(graphdef, params, progress=False)
    return arrays(plain), arrays(packed), given


def arrays(state: nnx.State) -> dict[str, Any]:
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, path)): variable[...] for path, variable in flat}


@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_is_packed_but_an_embedding_that_is_no_head(tied):
    plain, packed, _ = pack(tied=tied)
    assert list(plain) == list(packed)
    kept = {name for name in plain if plain[name].shape == packed[name].shape}
    norms = {name for name in plain if "norm" in name}
    assert kept == norms | (set() if tied else {"embed.weight"})
    for name in kept:
        np.testing.assert_array_equal(packed[name], plain[name])


def test_weights_keep_their_values_output_axes_first(native):
    plain, packed, _ = pack(tied=True)
    name = "layers.1.attention.o_proj.weight"
    rows = packed_rows(packed[name], jnp.arange(27), num_inputs=32)
    np.testing.assert_array_equal(rows, plain[name].reshape(27, 32))
    name = "layers.0.attention.q_proj.weight"
    rows = packed_rows(packed[name], jnp.arange(32), num_inputs=27)
    np.testing.assert_array_equal(rows, plain[name].reshape(32, 27))


def test_weights_are_given_up_as_they_are_packed():
    _, packed, left = pack(tied=False)
    gone = {name for name, array in left.items() if array.is_deleted()}
    assert gone == {name for name in packed if packed[name].ndim == 4}


def test_packed_weights_lie_side_by_side_in_memory_that_is_not_copied():
    _, packed, _ = pack(tied=False)
    arrays = [array for array in packed.values() if array.ndim == 4]
    starts = sorted((array.unsafe_buffer_pointer(), array.nbytes) for array in arrays)
    first, last = starts[0][0], starts[-1]
    assert first % PAGE_BYTES == 0
    used = sum(num_bytes for _, num_bytes in starts)
    assert used <= last[0] + last[1] - first < used + 64 * len(starts)


def test_packed_weights_outlive_what_they_were_packed_with():
    _, packed, _ = pack(tied=True)
    name = "layers.1.mlp.up_proj.weight"
    array, before = packed[name], np.array(packed[name])
    packed.clear()
    gc.collect()
    np.testing.assert_array_equal(array, before)


def test_type_without_kernels_is_refused():
    with pytest.raises(ValueError, match="dtype=float16 has no native kernel"):
        pack(tied=True, dtype="float16")
