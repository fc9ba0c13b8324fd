"""`ExecutableStore`: compiled programs kept whole in a folder, so that a start traces nothing.

JAX's own disk cache knows a program by its lowered form, which takes longer to make than loading
what XLA made of it. Here a program is known by what goes into it instead: the sources, the
versions, the machine, the settings, and the shapes it is called with (docs/decisions/0024). A file
that is missing, damaged or refused by XLA is compiled anew and replaced. Whoever can write to the
folder decides what the process runs.
"""

import functools
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import pickle
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.experimental import serialize_executable

from paged.models.programs import Program

logger = logging.getLogger(__name__)

_KEPT_GENERATIONS = 4
_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
_DIGEST_BYTES = 32


class ExecutableStore:
    """Compiled programs of one model and one set of settings, on disk.

    Files of other sources, versions, machines or settings lie in folders of their own; all but the
    few used last are deleted.

    Args:
      directory: folder of the store; made if missing. None keeps nothing.
      settings: text that stands for whatever the programs depend on beside their arguments' shapes
        and what this module looks up itself.
    """

    def __init__(self, directory: str | pathlib.Path | None, *settings: str) -> None:
        self._folder: pathlib.Path | None = None
        if directory is not None:
            root = pathlib.Path(directory).expanduser()
            self._folder = root / _digest([*_surroundings(), *settings])

    def make(self, program: Program) -> Any:
        """Return a program of a step, from disk or compiled now."""
        return self.get(program.name, program.compile, *program.arguments)

    def get(self, name: str, compile_program: Callable[[], Any], *arguments: Any) -> Any:
        """Return a compiled program, from disk or compiled now; threads may call this at once.

        Args:
          name: tells programs with equal arguments apart; whatever was static is part of it.
          compile_program: makes it, a `jax.stages.Compiled`, under `no_persistent_cache`.
          *arguments: what it will be called with, or their abstract shapes.
        """
        if self._folder is None:
            return compile_program()
        file = self._folder / _digest([name, *_shapes(arguments)])
        program = _load(file)
        if program is None:
            program = compile_program()
            self._save(file, program)
        return program

    def _save(self, file: pathlib.Path, program: Any) -> None:
        try:
            devices = [device.id for device in program.runtime_executable().local_devices()]
            content = pickle.dumps((serialize_executable.serialize(program), devices))
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as scratch:
                scratch.write(hashlib.sha256(content).digest() + content)
            pathlib.Path(scratch.name).replace(file)  # appears whole, or not at all
            self._forget_old()
        except Exception as error:  # a full disk, or a program that cannot be stored
            logger.info("A compiled program is not kept for the next start: %s", error)

    def _forget_old(self) -> None:
        assert self._folder is not None
        generations = sorted(
            (folder for folder in self._folder.parent.iterdir() if folder.is_dir()),
            key=lambda folder: folder.stat().st_mtime,
        )
        for folder in generations[:-_KEPT_GENERATIONS]:
            shutil.rmtree(folder, ignore_errors=True)


def _load(file: pathlib.Path) -> Any:
    """Return the program of a file, or None if there is none that can be used."""
    try:
        stored = file.read_bytes()
        digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            logger.info("%s is damaged; compiling its program again.", file)
            return None
        (executable, in_tree, out_tree), ids = pickle.loads(content)
        by_id = {device.id: device for device in jax.devices()}
        program = serialize_executable.deserialize_and_load(
            executable, in_tree, out_tree, execution_devices=[by_id[i] for i in ids]
        )
        os.utime(file.parent)  # in use
        return program
    except FileNotFoundError:
        return None
    except Exception as error:  # what XLA or pickle refuse, they refuse in many ways
        logger.info("%s cannot be used (%s); compiling its program again.", file, error)
        return None


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _shapes(arguments: tuple[Any, ...]) -> Iterator[str]:
    leaves, tree = jax.tree.flatten(arguments)
    yield str(tree)
    for leaf in leaves:
        yield f"{leaf.dtype} {leaf.shape}"


def _surroundings() -> Iterator[str]:
    """What compiled programs depend on that is the same for all programs of a process."""
    yield sys.version
    yield from (importlib.metadata.version(package) for package in _PACKAGES)
    yield sources_digest()
    yield _cpu()
    for device in jax.devices():
        yield f"{device.platform} {device.device_kind} {device.client.platform_version}"
    yield os.environ.get("XLA_FLAGS", "")
    for name, value in sorted(jax.config.values.items()):
        # Neither where compiled programs lie nor when they are kept changes what they are.
        if "cache" not in name:
            yield f"{name}={value}"


@functools.cache
def sources_digest() -> str:
    """Return a digest of the files of this package, which tells two states of it apart."""
    return _digest(f"{path} {digest}" for path, digest in _sources())


def _sources() -> Iterator[tuple[str, str]]:
    """The files of this package and their digests; in a checkout, some folders are links."""
    root = pathlib.Path(__file__).parents[1]
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            yield str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).hexdigest()


def _cpu() -> str:
    """The instructions that the CPU has, as far as the system tells."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
