"""What the Triton backend takes, and what is said where it cannot be had."""

import functools
import importlib.util

import jax
import pytest

from paged import backends
from paged.attention import ragged_paged_attention
from paged.attention_call import AttentionCall
from paged.kv_write import write_kv
from paged.triton import support

# What is asked for before a kernel is imported needs no Triton.


def struct(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def unsupported(q: jax.ShapeDtypeStruct, kv_cache: jax.ShapeDtypeStruct) -> str | None:
    options = {"sliding_window": None, "soft_cap": None, "kv_scales": None, "sinks": None}
    return support.unsupported(AttentionCall.of(q, kv_cache, **options))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
def test_usual_shapes_are_taken(head_dim: int, block_size: int, cache_dtype: str):
    q = struct((8, 32, head_dim), "bfloat16")
    assert unsupported(q, struct((9, 2, 8, block_size, head_dim), cache_dtype)) is None


@pytest.mark.parametrize(
    ("q", "cache", "reason"),
    [
        (struct((8, 4, 8), "float32"), struct((9, 2, 4, 16, 8), "float32"), "head_dim=8 is none"),
        (
            struct((8, 4, 64), "float32"),
            struct((9, 2, 4, 8, 64), "float32"),
            "block_size=8 is none of 16, 32, 64, 128",
        ),
        (
            struct((8, 4, 64), "float32"),
            struct((9, 1, 1, 16, 64), "float32"),
            "it does not read a cache whose keys are its values",
        ),
        (
            struct((8, 65, 64), "float32"),
            struct((9, 2, 1, 16, 64), "float32"),
            "65 q heads share a kv head, more than 64",
        ),
        (
            struct((8, 4, 64), "bfloat16"),
            struct((9, 2, 4, 16, 64), "float8_e5m2"),
            "the cache is float8_e5m2, neither bfloat16 like q nor float8_e4m3fn",
        ),
    ],
)
def test_what_is_not_taken_has_a_reason(q, cache, reason: str):
    assert reason in (unsupported(q, cache) or "")


class Device:
    """An absent accelerator."""

    platform = "gpu"

    def __init__(self, compute_capability: str) -> None:
        self.compute_capability = compute_capability
        self.core_count = 80


CACHE = struct((9, 2, 8, 16, 128), "bfloat16")
CALL = (
    struct((8, 32, 128), "bfloat16"),
    CACHE,
    struct((8, 4), "int32"),
    struct((8,), "int32"),
    struct((9,), "int32"),
)
ROWS = struct((8, 8, 128), "bfloat16")


def resolve(device: Device) -> str:
    with backends.compiling_for(device):
        return backends.resolve_backend("triton", backends.current_platform())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="missing tool: triton")
@pytest.mark.parametrize(("capability", "works"), [("8.0", True), ("10.0", True), ("7.5", False)])
def test_old_gpus_are_refused(capability: str, works: bool):
    if works:
        assert resolve(Device(capability)) == "triton"
    else:
        with pytest.raises(
            NotImplementedError, match=r"capability 8.0 or more, not 7.5; use 'auto"
        ):
            resolve(Device(capability))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="missing tool: triton")
def test_other_makes_of_gpus_are_refused():
    with pytest.raises(NotImplementedError, match=r"it needs an NVIDIA GPU .*, not gfx942"):
        resolve(Device("gfx942"))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="triton and jax_triton cannot be imported; pip "):
        resolve(Device("9.0"))


@pytest.mark.parametrize(
    "call",
    [
        functools.partial(ragged_paged_attention, backend="triton"),
        lambda q, cache, tables, lens, starts: write_kv(cache, q, q, lens, backend="triton"),
    ],
    ids=["attention", "write"],
)
def test_cpu_is_refused(call):
    arguments = (ROWS, *CALL[1:])
    with pytest.raises(NotImplementedError, match="'triton' is unavailable: it runs on gpu, not o"):
        jax.eval_shape(call, *arguments)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="missing tool: triton")
def test_cache_that_is_not_written_is_refused_by_name_and_written_by_xla_on_auto():
    cache = struct(CACHE.shape, "float8_e5m2")
    slots = struct((8,), "int32")
    with backends.compiling_for(Device("9.0")):
        with pytest.raises(NotImplementedError, match="call: it does not write float8_e5m2; use"):
            jax.eval_shape(functools.partial(write_kv, backend="triton"), cache, ROWS, ROWS, slots)
        one_plane = struct((9, 1, 8, 16, 128), "bfloat16")
        with pytest.raises(NotImplementedError, match="not write a cache whose keys are its val"):
            jax.eval_shape(
                functools.partial(write_kv, backend="triton"), one_plane, ROWS, None, slots
            )
        assert jax.eval_shape(write_kv, cache, ROWS, ROWS, slots) == cache


def test_auto_says_why_it_passes_a_backend_over(caplog: pytest.LogCaptureFixture):
    chosen = {"wood": backends.Backend(missing=lambda: "no axe"), "xla": backends.Backend()}
    with caplog.at_level("INFO", logger="paged.backends"):
        for _ in range(2):
            name = backends.resolve_backend(
                "auto", "gpu", backends=chosen, preference={"gpu": ("wood",)}
            )
            assert name == "xla"
    assert [record.message for record in caplog.records] == ["backend 'wood' is not used: no axe."]
