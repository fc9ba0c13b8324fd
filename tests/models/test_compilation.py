"""The compile counter and the disk cache."""

import jax
import jax.numpy as jnp
import pytest

from paged.models.compilation import (
    CompilationCounter,
    make_cache_directory,
    no_persistent_cache,
    persistent_cache,
)


def compile_something(number: int) -> None:
    # A new function every time, so that no cache of JAX knows it.
    jax.jit(lambda x: x * number + number).lower(jnp.zeros(3)).compile()


def test_counter_counts_programs_while_it_is_open():
    compile_something(1)
    with CompilationCounter() as counter:
        assert counter.count == 0
        compile_something(2)
        compile_something(3)
    counted = counter.count
    assert counted >= 2
    compile_something(4)
    assert counter.count == counted


def test_counter_sees_nothing_when_a_compiled_program_runs():
    compiled = jax.jit(lambda x: x + 5).lower(jnp.zeros(3)).compile()
    argument = jnp.ones(3)
    with CompilationCounter() as counter:
        compiled(argument).block_until_ready()
    assert counter.count == 0


def test_programs_are_kept_on_disk_and_the_settings_put_back(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    with persistent_cache(str(tmp_path / "xla")):
        compile_something(6)
    assert list((tmp_path / "xla").iterdir())
    assert jax.config.jax_compilation_cache_dir == before


def test_a_block_without_the_cache_neither_reads_nor_writes_it(tmp_path):
    with persistent_cache(str(tmp_path)):
        compile_something(7)
        files = sorted(tmp_path.rglob("*-cache"))
        assert files
        with no_persistent_cache(), CompilationCounter() as counter:
            compile_something(8)
        assert counter.count
        assert sorted(tmp_path.rglob("*-cache")) == files
        compile_something(9)
        assert len(sorted(tmp_path.rglob("*-cache"))) > len(files)


def test_no_folder_means_no_cache(tmp_path):
    assert make_cache_directory(None) is None
    before = jax.config.jax_compilation_cache_dir
    with persistent_cache(None):
        assert jax.config.jax_compilation_cache_dir == before


def test_a_folder_that_cannot_be_made_is_refused_with_the_alternatives(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written \(.*\); choose another folder"):
        make_cache_directory(str(tmp_path / "file" / "xla"))
