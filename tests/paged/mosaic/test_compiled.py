"""The Mosaic kernel as it is compiled for GPUs that are not here (`pytest -m aot`)."""

import functools
import importlib.util
import pathlib

import pytest

pytestmark = pytest.mark.aot

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "gpu_kernels.md"
TOOLS = ("triton", "jax_triton", "jax_cuda12_plugin")
# An H100 has the multiprocessors of an H200, and as many.
CASES = [
    ("Mosaic, head size 128", "h200"),
    ("Mosaic, head size 128", "b200"),
    ("Mosaic, 64, group 8, window, sinks", "h200"),
    ("Mosaic, head size 256", "h200"),
]


@pytest.fixture(scope="module", autouse=True)
def tools():
    for name in TOOLS:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"missing tool: {name}, of the extra `aot`")
    yield
    from paged.gpu.kernel_table import process_for

    for target_name in {target_name for _, target_name in CASES}:
        process_for(target_name).shutdown()


@functools.cache
def target(name: str):
    from paged.gpu.aot import Target

    return Target(name)


@functools.cache
def report(name: str, target_name: str):
    from paged.gpu.kernel_table import compile_case, process_for

    return process_for(target_name).submit(compile_case, name, target_name).result()


@pytest.mark.parametrize(("name", "target_name"), CASES)
def test_kernel_fits_its_target(name: str, target_name: str):
    kernel = report(name, target_name).kernel("ragged_paged_attention")
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= target(target_name).shared_bytes_per_program
    # Registers move between warpgroups, so each thread starts with a third of the whole.
    assert kernel.num_threads == 384
    assert kernel.registers == 168
    code = kernel.machine_code()
    products = "HGMMA" if target_name == "h200" else "UTCHMMA"
    for instruction in (products, "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in code
    assert "HMMA.16816" not in code


@pytest.mark.parametrize(("name", "target_name"), CASES)
def test_cache_is_updated_in_place_within_one_graph(name: str, target_name: str):
    from paged.gpu.kernel_table import MOSAIC_CALLS

    call, compiled = MOSAIC_CALLS[name], report(name, target_name)
    assert compiled.alias_bytes == 4096 * 2 * 8 * call.block_size * call.head_dim * 2
    assert compiled.largest_copy_bytes <= 1024
    assert compiled.operations == {"kCommandBuffer": 1}


def test_table_of_kernels_is_current():
    from paged.gpu.kernel_table import rows

    page = DOCS.read_text()
    for name, target_name in CASES:
        for line in rows(name, target(target_name), report(name, target_name)):
            assert line in page, "write what `python -m paged.gpu.kernel_table` prints there"


def test_calls_of_the_table_are_those_tested():
    from paged.gpu.kernel_table import cases

    assert [case for case in cases() if case[0].startswith("Mosaic")] == CASES
