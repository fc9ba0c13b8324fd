"""Compilation as seen from outside: a counter that proves none happens, and JAX's disk cache."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

# JAX reports this once for every program handed to XLA, also when the disk cache answers.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts the programs that this process compiles from now on.

    Use as a context manager, or read `count` while it is open.
    """

    def __init__(self) -> None:
        self.count = 0
        self._open = False

    def __enter__(self) -> "CompilationCounter":
        self._open = True
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        # JAX's public interface cannot remove one listener; a closed one stays and does nothing.
        self._open = False

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if self._open and event == _COMPILE_EVENT:
            self.count += 1


def make_cache_directory(directory: str | None) -> Path | None:
    """Create the folder of the disk cache if it is missing, and return it; None stays None.

    Raises:
      ValueError: if it cannot be created or written to.
    """
    if directory is None:
        return None
    path = Path(directory).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"compilation_cache_dir={str(path)!r} cannot be written ({error.strerror}); choose "
            "another folder with --compilation-cache-dir, or do without (--no-compilation-cache)."
        ) from None
    return path


@contextlib.contextmanager
def persistent_cache(directory: str | None) -> Iterator[None]:
    """Keep every program compiled inside the block in `directory`, and read it from there.

    The settings are the whole process's, so they are put back afterwards: research code that
    shares the process keeps its own. None leaves everything as it is.

    Raises:
      ValueError: as `make_cache_directory`.
    """
    path = make_cache_directory(directory)
    if path is None:
        yield
        return
    wanted = {
        "jax_compilation_cache_dir": str(path),
        # Without these two nothing small or quick to compile is kept.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    try:
        _configure(wanted)
        yield
    finally:
        _configure(before)


@contextlib.contextmanager
def no_persistent_cache() -> Iterator[None]:
    """Compile every program inside the block, whatever disk cache the process uses.

    For programs that are to be serialised: XLA:CPU leaves the machine code out of those that it has
    loaded itself, and such a file fails when it is run, not when it is loaded.
    """
    before = jax.config.jax_enable_compilation_cache
    try:
        _configure({"jax_enable_compilation_cache": False})
        yield
    finally:
        _configure({"jax_enable_compilation_cache": before})


def _configure(settings: dict[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    # JAX opens the cache once; a changed folder is seen only after a reset.
    compilation_cache.reset_cache()
