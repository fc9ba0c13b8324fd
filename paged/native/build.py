"""`build_library`: the C++ sources of this package as a shared library, compiled once per machine.

The library lies in a cache folder under a name that is a digest of all that goes into it. Which
instructions it uses is decided when it runs (`cpp/cpu_level.cc`), so CPUs may share the folder.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

import jax
from tqdm import tqdm

logger = logging.getLogger(__name__)

SOURCES = pathlib.Path(__file__).parent / "cpp"

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx512vbmi")
# Further flags by the end of a file's name, on x86-64; only code behind a test of the CPU may be in
# such files.
_X86_FLAGS = {
    "_avx2.cc": ("-mavx2", "-mfma"),
    "_avx512_bf16.cc": ("-mavx2", "-mfma", *_AVX512),
}


class BuildError(Exception):
    """The library cannot be built; the message says what to install or to look at."""


def build_library(cache_dir: str | pathlib.Path, *, progress: bool = False) -> pathlib.Path:
    """Return the path of the library, after compiling it if the folder does not hold it.

    Processes that want it at once wait for the first of them. A file that is not what was built,
    such as one cut short by a full disk, is built again.

    Args:
      cache_dir: folder for the library; made if missing.
      progress: show a bar on standard error while compiling.

    Raises:
      BuildError: there is no compiler, it failed, or the folder cannot be written.
    """
    compiler = find_compiler()
    folder = pathlib.Path(cache_dir).expanduser()
    library = folder / f"paged-{_digest_of_inputs(compiler)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not _is_intact(library):
                logger.info("Compiling the native CPU kernels into %s, once.", folder)
                _compile(compiler, library, progress=progress)
    except OSError as error:
        raise BuildError(
            f"{folder} cannot be used ({error.strerror}); name a folder that can be written"
        ) from None
    return library


def find_compiler() -> str:
    """Return the path of a C++ compiler.

    Raises:
      BuildError: if there is none.
    """
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        raise BuildError("there is no C++ compiler; install g++ (Debian: apt-get install g++)")
    return found


def flags_of(source: str) -> tuple[str, ...]:
    """Return the compiler's flags for one of the sources, by its file name."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    further = next((flags for end, flags in _X86_FLAGS.items() if source.endswith(end)), ())
    return (*_FLAGS, *(further if is_x86 else ()))


def _digest_of_inputs(compiler: str) -> str:
    digest = hashlib.sha256()
    version = _run([compiler, "--version"]).splitlines()[0]
    for text in (version, platform.machine(), importlib.metadata.version("jaxlib")):
        digest.update(text.encode() + b"\0")
    for path in sorted(SOURCES.iterdir()):
        digest.update(f"{path.name} {flags_of(path.name)}".encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with path.open("w") as file:
        # Released with the file, also when the process dies.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _checksum_file(library: pathlib.Path) -> pathlib.Path:
    return library.with_suffix(".sha256")


def _is_intact(library: pathlib.Path) -> bool:
    # Before it is loaded: a damaged library can end the process.
    try:
        expected = _checksum_file(library).read_text()
        return hashlib.sha256(library.read_bytes()).hexdigest() == expected
    except FileNotFoundError:
        return False


def _compile(compiler: str, library: pathlib.Path, *, progress: bool) -> None:
    sources = sorted(SOURCES.glob("*.cc"))
    with (
        tempfile.TemporaryDirectory(dir=library.parent) as scratch,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
        tqdm(
            total=len(sources) + 1, desc="Compiling kernels", unit="file", disable=not progress
        ) as bar,
    ):

        def compile_source(source: pathlib.Path) -> str:
            target = f"{scratch}/{source.stem}.o"
            include = ("-isystem", jax.ffi.include_dir())
            _run([compiler, *flags_of(source.name), *include, "-c", str(source), "-o", target])
            bar.update()
            return target

        objects = list(pool.map(compile_source, sources))
        built = pathlib.Path(scratch) / library.name
        # -pthread: parts of the C++ library's threads were in a library of their own until 2021.
        _run([compiler, "-shared", "-pthread", *objects, "-o", str(built)])
        bar.update()
        checksum = pathlib.Path(scratch) / "sha256"
        checksum.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
        # Each appears whole. A process that has the old one loaded keeps it.
        built.replace(library)
        checksum.replace(_checksum_file(library))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error.strerror})") from None
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
