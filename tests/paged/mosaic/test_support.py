"""What the Mosaic backend takes, where it runs, and who serves what it leaves."""

import dataclasses
import functools
import importlib.metadata
import importlib.util

import jax
import pytest

from paged import backends
from paged.attention import plan_attention, ragged_paged_attention
from paged.attention_call import AttentionCall
from paged.kv_write import write_kv
from paged.mosaic.plan import AttentionPlan
from paged.mosaic.support import unsupported, why_no_assembler
from paged.rope_write import rotate_and_write_kv


def struct(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


USUAL = AttentionCall(
    num_tokens=64,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    q_dtype="bfloat16",
    kv_cache_dtype="bfloat16",
)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_usual_shapes_are_taken(head_dim: int, block_size: int, dtype: str):
    call = dataclasses.replace(
        USUAL, head_dim=head_dim, block_size=block_size, q_dtype=dtype, kv_cache_dtype=dtype
    )
    assert unsupported(call, 90) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 80}, "head_dim=80 is none of 64, 128, 256"),
        ({"num_planes": 1}, "it does not read a cache whose keys are its values"),
        ({"block_size": 8}, "block_size=8 is none of 16, 32, 64, 128"),
        ({"num_q_heads": 65, "num_kv_heads": 1}, "65 q heads share a kv head, more than 64"),
        ({"q_dtype": "float32"}, "q is float32, none of bfloat16, float16"),
        (
            {"kv_cache_dtype": "float8_e4m3fn"},
            "the cache is float8_e4m3fn, not bfloat16 like q",
        ),
    ],
)
def test_what_is_not_taken_has_a_reason(change: dict, reason: str):
    assert unsupported(dataclasses.replace(USUAL, **change), 90) == reason


def test_blackwell_takes_smaller_heads():
    assert unsupported(USUAL, 100) is None
    reason = unsupported(dataclasses.replace(USUAL, head_dim=256), 100)
    assert reason == "head_dim=256 is more than 128, on Blackwell"


class Device:
    """An absent accelerator."""

    platform = "gpu"
    device_kind = "absent"
    core_count = 132

    def __init__(self, compute_capability: str, platform_version: str = "") -> None:
        self.compute_capability = compute_capability
        self.platform_version = platform_version

    @property
    def client(self) -> "Device":
        return self


def resolve(device: Device, requested: str = "mosaic", **options) -> str:
    with backends.compiling_for(device):
        return backends.resolve_backend(requested, backends.current_platform(), **options)


@pytest.fixture
def no_nvcc_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.usefixtures("no_nvcc_package")
@pytest.mark.parametrize("capability", ["9.0", "10.0"])
def test_hopper_and_blackwell_are_served(capability: str):
    assert resolve(Device(capability, "PJRT C API\ncuda 13000")) == "mosaic"


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ("8.0", r"9.0 \(Hopper\) or 10.0 \(Blackwell\), not 8.0; use"),
        ("12.0", r"9.0 \(Hopper\) or 10.0 \(Blackwell\), not 12.0; use"),
        ("gfx942", r"it needs an NVIDIA GPU .*, not gfx942"),
    ],
)
def test_other_gpus_are_refused(capability: str, reason: str):
    with pytest.raises(NotImplementedError, match=reason):
        resolve(Device(capability))


@pytest.mark.usefixtures("no_nvcc_package")
def test_assembler_that_miscompiles_is_refused():
    with pytest.raises(NotImplementedError, match=r"ptxas 12.8 miscompiles its .* 12.9.1 or newer"):
        resolve(Device("9.0", "PJRT C API\ncuda 12080"))


@pytest.mark.parametrize(
    ("nvcc", "cuda", "is_bad"),
    [
        ("12.6.85", 12080, False),
        ("12.8.93", 12090, True),
        ("12.9.41", 12090, True),
        ("12.9.86", 12090, False),
        ("13.0.48", None, False),
        ("12.8.93", 13000, False),
        (None, 12060, False),
        (None, 12080, True),
        (None, 12090, False),
        (None, 13000, False),
        (None, None, False),
    ],
)
def test_bad_assemblers_are_known(nvcc: str | None, cuda: int | None, is_bad: bool):
    assert (why_no_assembler(nvcc, cuda) is not None) == is_bad


CACHE = struct((9, 2, 8, 16, 128), "bfloat16")


def call(num_tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (
        struct((num_tokens, 32, 128), "bfloat16"),
        CACHE,
        struct((8, 4), "int32"),
        struct((8,), "int32"),
        struct((9,), "int32"),
    )


attend = functools.partial(ragged_paged_attention, backend="mosaic")


def test_cpu_is_refused():
    with pytest.raises(NotImplementedError, match="'mosaic' is unavailable: it runs on gpu, not o"):
        jax.eval_shape(attend, *call(8))


@pytest.mark.usefixtures("no_nvcc_package")
def test_shapes_that_are_not_taken_are_refused():
    q, cache, *tables = call(64)
    with (
        backends.compiling_for(Device("9.0")),
        pytest.raises(NotImplementedError, match=r"'mosaic' .*: q is float32, none of"),
    ):
        jax.eval_shape(attend, struct(q.shape, "float32"), cache, *tables)


def make_plan(num_tokens: int):
    static = dataclasses.replace(USUAL, num_tokens=num_tokens)
    return jax.eval_shape(
        functools.partial(plan_attention, call=static, backend="mosaic"), *call(num_tokens)[2:]
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="missing tool: triton")
@pytest.mark.usefixtures("no_nvcc_package")
def test_decodes_alone_go_to_triton():
    from paged.triton.plan import AttentionPlan as TritonPlan

    with backends.compiling_for(Device("9.0")):
        assert isinstance(make_plan(8), TritonPlan)
        assert isinstance(make_plan(9), AttentionPlan)


@pytest.mark.usefixtures("no_nvcc_package")
def test_cache_is_written_by_another_backend():
    rows, slots = struct((8, 8, 128), "bfloat16"), struct((8,), "int32")
    cache = struct(CACHE.shape, "float8_e5m2")  # which Triton does not write
    with backends.compiling_for(Device("9.0")):
        written = jax.eval_shape(
            functools.partial(write_kv, backend="mosaic"), cache, rows, rows, slots
        )
        angles = struct((8, 64), "float32")
        rotate = functools.partial(rotate_and_write_kv, backend="mosaic")
        both = jax.eval_shape(rotate, rows, rows, rows, cache, angles, angles, slots)
    assert written == cache
    assert both == (rows, cache)


@pytest.mark.usefixtures("no_nvcc_package")
def test_auto_follows_what_was_measured():
    fastest = {"absent": ("mosaic", "triton")}
    assert resolve(Device("9.0"), "auto", fastest=fastest) == "mosaic"
    assert resolve(Device("9.0"), "auto", fastest={"other": ("mosaic",)}) != "mosaic"


def test_nothing_was_measured_yet():
    assert not backends.FASTEST_ATTENTION, (
        "add its figures to docs/performance.md, then to this test"
    )
