"""Compiled programs on disk: loaded instead of compiled, and never trusted blindly."""

import logging
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged.kv_cache import KVCache, KVCacheSpec, allocate_kv_cache
from paged.models.compilation import CompilationCounter
from paged.models.executables import ExecutableStore
from paged.native.linear import PackedWeight, pack, packed_linear

X = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)


class Recipe:
    """Something to compile, and how often it was."""

    def __init__(self, number: float) -> None:
        self.number = number
        self.count = 0

    def __call__(self):
        self.count += 1
        return jax.jit(lambda x: x * self.number).lower(X).compile()


def the_file(folder: pathlib.Path) -> pathlib.Path:
    (file,) = (path for path in folder.rglob("*") if path.is_file())
    return file


def test_a_stored_program_is_loaded_by_the_next_start_without_compiling(tmp_path):
    recipe = Recipe(3.0)
    first = ExecutableStore(tmp_path, "model").get("times", recipe, X)
    with CompilationCounter() as counter:
        second = ExecutableStore(tmp_path, "model").get("times", recipe, X)
        assert second(X).tolist() == first(X).tolist() == (np.asarray(X) * 3).tolist()
    assert counter.count == 0
    assert recipe.count == 1


def test_other_settings_names_and_shapes_have_programs_of_their_own(tmp_path):
    recipe = Recipe(3.0)
    store = ExecutableStore(tmp_path, "model")
    store.get("times", recipe, X)
    store.get("times", recipe, X.astype(jnp.int32))
    store.get("times", recipe, (X,))
    store.get("plus", recipe, X)
    ExecutableStore(tmp_path, "other model").get("times", recipe, X)
    assert recipe.count == 5
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 5


def test_other_xla_flags_and_jax_settings_compile_again(tmp_path, monkeypatch):
    recipe = Recipe(3.0)
    ExecutableStore(tmp_path, "model").get("times", recipe, X)
    with jax.default_matmul_precision("highest"):
        ExecutableStore(tmp_path, "model").get("times", recipe, X)
    assert recipe.count == 2
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    ExecutableStore(tmp_path, "model").get("times", recipe, X)
    assert recipe.count == 3


@pytest.mark.parametrize("damage", ["cut short", "flipped", "emptied", "not ours"])
def test_a_damaged_file_is_compiled_again_and_replaced(tmp_path, caplog, damage):
    recipe = Recipe(3.0)
    ExecutableStore(tmp_path, "model").get("times", recipe, X)
    file = the_file(tmp_path)
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(
        {
            "cut short": content[:middle],
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "emptied": b"",
            "not ours": b"\x80\x04}." * 50,
        }[damage]
    )
    with caplog.at_level(logging.INFO, "paged.models.executables"):
        program = ExecutableStore(tmp_path, "model").get("times", recipe, X)
    assert "is damaged; compiling its program again" in caplog.text
    assert program(X).tolist() == (np.asarray(X) * 3).tolist()
    assert recipe.count == 2
    ExecutableStore(tmp_path, "model").get("times", recipe, X)
    assert recipe.count == 2


def test_a_folder_that_cannot_be_written_costs_the_next_start_only(tmp_path, caplog):
    (tmp_path / "file").touch()
    recipe = Recipe(3.0)
    with caplog.at_level(logging.INFO, "paged.models.executables"):
        program = ExecutableStore(tmp_path / "file", "model").get("times", recipe, X)
    assert program(X).shape == X.shape
    assert "is not kept for the next start" in caplog.text


def test_without_a_folder_nothing_is_kept():
    recipe = Recipe(3.0)
    for _ in range(2):
        ExecutableStore(None).get("times", recipe, X)
    assert recipe.count == 2


def test_only_the_generations_used_last_are_kept(tmp_path):
    for i in range(6):
        ExecutableStore(tmp_path, str(i)).get("times", Recipe(3.0), X)
    assert len(list(tmp_path.iterdir())) == 4


def test_donation_custom_nodes_and_native_calls_survive(native, tmp_path):
    """What the programs of a step consist of: a model's state, a donated cache, C++ kernels."""
    weight = np.random.default_rng(0).standard_normal((70, 16)).astype(np.float32)
    state = nnx.state(nnx.Dict(w=nnx.Param(jnp.asarray(pack(weight)))))
    x = np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)

    def step(state: nnx.State, cache: KVCache, x: jax.Array) -> tuple[jax.Array, KVCache]:
        (y,) = packed_linear(x, [PackedWeight(state["w"][...], 70)])
        return y, KVCache(cache.layers, cache.token_ids.at[1].set(7))

    def make_cache() -> KVCache:
        return allocate_kv_cache(KVCacheSpec(2, 1, 8, 4, "float32"), 3)

    def compile_step():
        return jax.jit(step, donate_argnums=1).lower(state, make_cache(), x).compile()

    for _ in range(2):  # compiled, then loaded
        store = ExecutableStore(tmp_path, "model")
        program = store.get("step", compile_step, state, make_cache(), x)
        cache = make_cache()
        y, updated = program(state, cache, x)
        np.testing.assert_allclose(y, x @ weight.T, atol=1e-5)
        assert updated.token_ids[1].tolist() == [7] * 4
        assert cache.token_ids.is_deleted()  # donated
