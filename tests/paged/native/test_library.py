"""What `linear_backend` resolves to: native kernels, XLA with a warning, or an error."""

import logging

import pytest

from paged.native import library
from paged.native.library import resolve_linear_backend


def resolve(requested="auto", platform="cpu", dtype="float32", cache_dir="/nowhere"):
    return resolve_linear_backend(requested, platform, dtype, cache_dir=cache_dir)


@pytest.fixture
def not_loaded(monkeypatch) -> None:
    monkeypatch.setattr(library, "_loaded", None)


@pytest.fixture
def no_compiler(not_loaded, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_uses_native_kernels(native, dtype):
    assert resolve(dtype=dtype) == resolve("native", dtype=dtype) == "native"


def test_xla_is_taken_at_its_word(no_compiler, caplog):
    assert resolve("xla") == "xla"
    assert not caplog.records


@pytest.mark.parametrize(
    ("platform", "dtype", "reason"),
    [
        ("gpu", "float32", "it runs on cpu, not on gpu"),
        ("cpu", "float16", "it computes in bfloat16 or float32, not in float16"),
    ],
)
def test_what_native_was_not_made_for_is_xlas(platform, dtype, reason, caplog):
    assert resolve(platform=platform, dtype=dtype) == "xla"
    assert not caplog.records
    with pytest.raises(ValueError, match=f"linear_backend='native' is unavailable: {reason}"):
        resolve("native", platform, dtype)


def test_no_compiler_is_xla_and_one_warning_with_the_remedy(no_compiler, caplog, tmp_path):
    assert resolve(cache_dir=tmp_path / "cache") == "xla"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "install g++" in record.message
    assert "run on XLA, which is slower" in record.message


def test_no_compiler_is_an_error_where_native_is_asked_for(no_compiler, tmp_path):
    with pytest.raises(ValueError, match=r"unavailable: there is no C\+\+ compiler"):
        resolve("native", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_kernels_that_compute_something_else_are_not_used(
    native, monkeypatch, caplog, tmp_path_factory, dtype
):
    # The kernels are right; what they are given is not.
    real = library.pack
    monkeypatch.setattr(
        library, "pack", lambda w: real(w if w.dtype.name != dtype else w[::-1].copy())
    )
    monkeypatch.setattr(library, "build_library", lambda *_, **__: None)
    monkeypatch.setattr(library, "_register", lambda _: library._loaded)
    monkeypatch.setattr(library, "_loaded", None)
    assert resolve() == "xla"
    assert f"the self-test failed: {dtype} products are off by" in caplog.records[0].message


def test_kernels_that_refuse_the_self_test_are_not_used(native, monkeypatch):
    real = library.pack
    monkeypatch.setattr(library, "pack", lambda w: real(w[:, :-2].copy()))
    assert "the self-test failed: " in (library.self_test() or "")


def test_a_library_that_cannot_be_loaded_is_xlas(not_loaded, monkeypatch, tmp_path, caplog):
    broken = tmp_path / "broken.so"
    broken.write_text("no ELF")
    monkeypatch.setattr(library, "build_library", lambda *_, **__: broken)
    assert resolve() == "xla"
    assert "broken.so" in caplog.records[0].message


def test_level_of_nothing_is_a_mistake_of_ours(not_loaded):
    with pytest.raises(RuntimeError, match=r"Call load_library\(\) first"):
        library.best_level()
