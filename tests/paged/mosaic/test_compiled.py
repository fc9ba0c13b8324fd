"""The Mosaic kernel as it is compiled for GPUs that are not here (`pytest -m aot`)."""

import functools
import importlib.util
import pathlib

import pytest

pytestmark = pytest.mark.aot

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "gpu_kernels.md"
TOOLS = ("triton", "jax_triton", "jax_cuda12_plugin")
NAMES = [
    "Mosaic, head size 128",
    "Mosaic, 128, blocks of 64",
    "Mosaic, 64, group 8, window, sinks",
    "Mosaic, head size 256",
]


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    for name in TOOLS:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"missing tool: {name}, of the extra `aot`")


@functools.cache
def target():
    from paged.gpu.aot import Target

    # An H100 has the same multiprocessors, and as many.
    return Target("h200")


@functools.cache
def report(name: str):
    from paged.gpu.kernel_table import MOSAIC_CALLS, compile_call

    return compile_call(target(), MOSAIC_CALLS[name])


@pytest.mark.parametrize("name", NAMES)
def test_kernel_fits_its_target(name: str):
    kernel = report(name).kernel("ragged_paged_attention")
    assert kernel.arch == "sm_90a"
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= target().shared_bytes_per_program
    # Registers move between warpgroups, so each thread starts with a third of the whole.
    assert kernel.num_threads == 384
    assert kernel.registers == 168
    code = kernel.machine_code()
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in code
    assert "HMMA.16816" not in code


@pytest.mark.parametrize("name", NAMES)
def test_cache_is_updated_in_place(name: str):
    from paged.gpu.kernel_table import MOSAIC_CALLS

    call, compiled = MOSAIC_CALLS[name], report(name)
    assert compiled.alias_bytes == 4096 * 2 * 8 * call.block_size * call.head_dim * 2
    assert compiled.largest_copy_bytes <= 1024
    assert compiled.operations == {"kCommandBuffer": 1}


def test_table_of_kernels_is_current():
    from paged.gpu.kernel_table import rows

    page = DOCS.read_text()
    for name in NAMES:
        for line in rows(name, target(), report(name)):
            assert line in page, "write what `python -m paged.gpu.kernel_table` prints there"


def test_calls_of_the_table_are_those_tested():
    from paged.gpu.kernel_table import MOSAIC_CALLS, MOSAIC_TARGETS

    assert list(MOSAIC_CALLS) == NAMES
    assert MOSAIC_TARGETS == ("h200",)


def test_blackwell_is_refused():
    from paged.gpu.aot import Target
    from paged.gpu.kernel_table import MOSAIC_CALLS, compile_call

    with pytest.raises(NotImplementedError, match=r"not 10.0, which would need a kernel of its"):
        compile_call(Target("b200"), MOSAIC_CALLS[NAMES[0]])
