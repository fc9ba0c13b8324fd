"""New parameters come where the engine has them, without a copy where that can be."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged.models.forward import abstract_model
from paged.models.linear_packing import pack_linear_layers
from paged.models.params_layout import ParamsLayout
from paged.models.tensor_parallel import TensorParallel
from paged.sharding import tensor_parallel_mesh
from tests.models.dense import random_params
from tests.models.test_decoder import CONFIG


def layout(**options: Any) -> ParamsLayout:
    return ParamsLayout(*abstract_model(CONFIG, dtype="float32"), **options)


def test_arrays_in_place_are_not_copied() -> None:
    params = random_params(CONFIG)
    arranged = layout().arrange(params)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(arranged), strict=True):
        assert a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer()


def test_arrays_of_numpys_are_copied_as_their_owner_may_write_to_them() -> None:
    given = jax.tree.map(lambda leaf: np.array(leaf), random_params(CONFIG))
    arranged = layout().arrange(given)
    given["norm"]["weight"][...][:] = 7
    np.testing.assert_array_equal(
        arranged["norm"]["weight"][...], random_params(CONFIG)["norm"]["weight"][...]
    )


def test_packing_leaves_the_given_parameters_as_they_are(native: None) -> None:
    params = random_params(CONFIG)
    graphdef, _ = abstract_model(CONFIG, dtype="float32")
    arranged = layout(is_packed=True).arrange(params)
    expected = pack_linear_layers(graphdef, random_params(CONFIG), progress=False)
    for a, b in zip(jax.tree.leaves(arranged), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(random_params(CONFIG)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_several_devices_get_their_slices_and_copies_of_kv_heads() -> None:
    config = dataclasses.replace(CONFIG, num_q_heads=8, num_kv_heads=2)
    split, mesh = TensorParallel(config, 4), tensor_parallel_mesh(4)
    shardings = split.param_shardings(mesh, dtype="float32")
    graphdef, expected = abstract_model(config, dtype="float32")
    params = random_params(config)
    arranged = ParamsLayout(graphdef, expected, shardings, kv_head_copies=2).arrange(params)
    for leaf, where in zip(jax.tree.leaves(arranged), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == where
    key = arranged["layers"][0]["attention"]["k_proj"]["weight"][...]
    given = params["layers"][0]["attention"]["k_proj"]["weight"][...]
    np.testing.assert_array_equal(key, np.asarray(given)[[0, 0, 1, 1]])


def test_what_does_not_fit_is_named() -> None:
    params = random_params(CONFIG)
    del params["norm"]
    up = params["layers"][0]["mlp"]["up_proj"]
    up["weight"] = nnx.Param(up["weight"][...].astype(jnp.bfloat16))
    params["extra"] = {"weight": nnx.Param(jnp.zeros(3))}
    with pytest.raises(ValueError, match="params are not those of this engine") as error:
        layout().arrange(params)
    for part in (
        "missing: norm.weight",
        "unexpected: extra.weight",
        "layers.0.mlp.up_proj.weight [48, 32] bfloat16 instead of [48, 32] float32",
        "cast to its dtype",
    ):
        assert part in str(error.value)
