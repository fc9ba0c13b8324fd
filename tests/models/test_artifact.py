"""Exported programs are those that were written, whatever the program they stand for does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from paged.kv_cache import KVCache, KVCacheSpec, allocate_kv_cache
from paged.models.artifact import Artifact, ArtifactPrograms, ArtifactWriter
from paged.models.executables import ExecutableStore
from paged.models.programs import Program


def step(weights: dict[str, Array], cache: KVCache, x: Array) -> tuple[Array, KVCache]:
    cache = KVCache(cache.layers, cache.token_ids.at[1].set(7))
    return x @ weights["b"] + weights["a"], cache


def refuse(*_: object) -> None:
    raise AssertionError("this function is traced")


def make_cache() -> KVCache:
    return allocate_kv_cache(KVCacheSpec(2, 1, 8, 4, "float32"), 3)


def test_trees_and_donation_survive_and_nothing_is_traced(tmp_path):
    rng = np.random.default_rng(0)
    weights = {"a": jnp.float32(3.0), "b": jnp.asarray(rng.standard_normal((4, 2)), jnp.float32)}
    x = np.asarray(rng.standard_normal((3, 4)), np.float32)
    arguments = weights, jax.eval_shape(make_cache), x
    writer = ArtifactWriter(tmp_path, "cpu")
    writer.make(Program("step 3", step, arguments, (0, make_cache()), donated=(1,)))
    writer.finish({"width": (1, 2)})

    artifact = Artifact.open(tmp_path)
    artifact.check({"width": (1, 2), "depth": 5})
    untraceable = Program("step 3", refuse, arguments, (0, make_cache()), donated=(1,))
    program = ArtifactPrograms(artifact, ExecutableStore(None)).make(untraceable)
    cache = make_cache()
    y, updated = program(weights, cache, x)
    np.testing.assert_allclose(y, x @ np.asarray(weights["b"]) + 3, rtol=1e-5)
    assert isinstance(updated, KVCache)
    assert updated.token_ids[1].tolist() == [7] * 4
    assert cache.token_ids.is_deleted()
    with pytest.raises(ValueError, match=r"was made for width=\[1, 2\], but here it is \[1, 3\]"):
        artifact.check({"width": (1, 3)})
    with pytest.raises(ValueError, match="has no program 'step 4'"):
        artifact.read("step 4")
