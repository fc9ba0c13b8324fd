"""The kernels and the parallel loop under the compiler's sanitizers, in a program of their own."""

import concurrent.futures
import os
import pathlib
import subprocess

import pytest

from paged.native.build import SOURCES, BuildError, find_compiler, flags_of

KERNELS = [path for path in sorted(SOURCES.glob("*.cc")) if not path.name.endswith("_ffi.cc")]
DRIVERS = sorted(pathlib.Path(__file__).parent.glob("*_driver.cc"))


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_kernels_pass_the_sanitizers(tmp_path, sanitizers):
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(f"missing tool: {error}")
    checks = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-Og", "-g1", "-Werror"]

    def compiled(source: pathlib.Path) -> str:
        target = f"{tmp_path}/{source.stem}.o"
        flags = [*flags_of(source.name), *checks, "-I", str(SOURCES)]
        run(compiler, *flags, "-c", str(source), "-o", target)
        return target

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = [pool.submit(compiled, source) for source in KERNELS]
        drivers = [pool.submit(compiled, source) for source in DRIVERS]
        objects = [future.result() for future in kernels]
        for driver in drivers:
            program = driver.result().removesuffix(".o")
            run(compiler, *checks, "-pthread", driver.result(), *objects, "-o", program)
            assert run(program).endswith(" 0 failures\n")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout
